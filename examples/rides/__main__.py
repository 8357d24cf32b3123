"""Tells the story."""

import sys

from examples.rides.drive import main

if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
