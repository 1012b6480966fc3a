"""`python -m recovery.demo`."""

import sys

from recovery.demo.run import main

if __name__ == "__main__":
    sys.exit(main())
