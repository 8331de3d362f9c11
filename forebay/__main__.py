"""`python -m forebay`."""

import sys

from forebay.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
