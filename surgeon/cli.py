"""`python -m surgeon.cli`, by which scripts of 0.2.0 call what is `surgeon`, or `python -m surgeon.commands`, now."""

import sys

from surgeon.commands.app import main

if __name__ == "__main__":
    sys.exit(main())
