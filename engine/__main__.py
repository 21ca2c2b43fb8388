"""`python -m engine` is the same program as `millstream`."""

from .cli import main

if __name__ == "__main__":
    main()
