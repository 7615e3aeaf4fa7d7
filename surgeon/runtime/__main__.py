"""The process of one rank; see worker/rank.py."""

from surgeon.machine import avoid_cudnn_attention, use_huge_pages, wait_asleep

wait_asleep()
use_huge_pages()
avoid_cudnn_attention()

from surgeon.runtime.worker.rank import main  # noqa: E402 - imports torch

main()
