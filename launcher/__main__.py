"""`headrace`, or `python -m headrace.launcher` where the environment's programs aren't on PATH."""

import signal
import sys


def main() -> None:
    """The program. Importing it takes a moment, in which a Ctrl-C may come, too."""
    try:
        from headrace.launcher.cli import main as commands

        commands()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
