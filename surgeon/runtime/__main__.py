"""The process of one rank; see rank.py."""

from surgeon.runtime.rank import main

main()
