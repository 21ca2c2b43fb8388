"""`python -m engine` and the installed `millstream` are this program."""

import sys


def main() -> None:
    """Run the command line; Ctrl-C while it is still being imported ends like any other."""
    try:
        from .cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
