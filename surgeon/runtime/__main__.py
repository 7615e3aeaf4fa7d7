"""The process of one rank; see processes/rank.py."""

from surgeon.threads import wait_asleep

wait_asleep()

from surgeon.runtime.processes.rank import main  # noqa: E402 - imports torch

main()
