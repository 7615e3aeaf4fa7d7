"""`python -m surgeon.commands`: the `surgeon` command, for processes that it starts of itself."""

import sys

from surgeon.commands.app import main

sys.exit(main())
