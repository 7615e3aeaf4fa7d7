"""The process of one rank; see processes/rank.py."""

from surgeon.memory import keep_freed_memory, use_huge_pages
from surgeon.threads import wait_asleep

wait_asleep()
use_huge_pages()
keep_freed_memory()

from surgeon.runtime.processes.rank import main  # noqa: E402 - imports torch

main()
