"""The process of one rank; see processes/rank.py."""

from surgeon.runtime.processes.rank import main

main()
