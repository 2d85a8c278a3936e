"""`python -m zerosharder`."""

import sys

from zerosharder.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
