"""The process of one rank; see rank.py."""

from surgeon.threads import wait_asleep

wait_asleep()

from surgeon.runtime.rank import main  # noqa: E402 - imports torch

main()
