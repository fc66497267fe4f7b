"""`python -m headrace.launcher`: the `headrace` program, also where the environment's programs aren't on PATH."""

from headrace.launcher.cli import main

if __name__ == "__main__":
    main()
