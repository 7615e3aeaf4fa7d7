"""Recording what a GPU is asked for, so that it can be asked for it again without Python in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

WARM_UPS = 2  # before a recording, in which libraries choose kernels and allocate what a recording may not

T = TypeVar("T")


class GraphRecorder(Protocol):
    """Records what a function launches."""

    def __call__(self, compute: Callable[[], T]) -> Callable[[], T]:
        """What computes the same again, from what its tensors hold then; the function may be called several times."""


class CudaRecorder(GraphRecorder):
    """Records CUDA graphs, which share their memory: each is done with before another one starts."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], T]) -> Callable[[], T]:
        """Record what a function launches; it is called a few times before, which must do no harm."""
        current = torch.cuda.current_stream(self._device)
        aside = torch.cuda.Stream(self._device)
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                compute()
        current.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # Other threads, NCCL's watchdog among them, may ask for events meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = compute()

        def replay() -> T:
            graph.replay()
            return outputs

        return replay
