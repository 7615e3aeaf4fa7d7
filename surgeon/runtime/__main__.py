"""The process of one rank; see worker/rank.py."""

from surgeon.gpus import avoid_cudnn_attention
from surgeon.memory import use_huge_pages
from surgeon.threads import wait_asleep

wait_asleep()
use_huge_pages()
avoid_cudnn_attention()

from surgeon.runtime.worker.rank import main  # noqa: E402 - imports torch

main()
