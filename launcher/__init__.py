"""From a config file to running ranks: command line, config, MPI, live view, reports."""
