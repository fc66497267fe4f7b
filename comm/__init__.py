"""How ranks talk: wire format, transports, sample exchange, weight channels, torch process groups.

Nothing in this package imports torch or mpi4py at the top of a module, except `groups`, `devices` and
`collective`, which only ranks that own a device import.
"""
