"""`python -m surgeon.cli`: the `surgeon` command, for processes that it starts of itself."""

import sys

from surgeon.cli.app import main

sys.exit(main())
