"""``python -m semel`` is the command line."""

from semel.cli.main import main

if __name__ == "__main__":
    main()
