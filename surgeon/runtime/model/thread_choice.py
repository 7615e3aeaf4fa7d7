"""How many threads compute a pass: as many as make it fastest beside whatever else the machine does now.

Threads that share a product end it together, so that a process which takes one of their cores holds up all of them:
beside one busy process two threads on two cores were seen to be slower than one. Nothing says beforehand what pays, so
it is tried (trials.py). Passes of about equally many tokens are compared with each other; the first of a size have the
number that the pass before them had, and a trial soon.

Numbers of threads do not change what is computed, but may change its last bits, as the number of texts in a pass does.
That is for PyTorch's own operations; threads of the kernels (runtime/kernels) never wait so, and where these compute
all that takes long, PyTorch has one thread: on several, each of its operations, short as it is, would wait until a
process that has the core of one gives it back; with no such process passes take as long either way.

OMP_DYNAMIC=false in the environment, OpenMP's own word for it, keeps the number as it is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from surgeon.runtime.batching.windows import power_of_two
from surgeon.runtime.model.trials import Trials


class ThreadChoice:
    """The numbers of threads of one process's passes."""

    def __init__(
        self,
        most: int,
        clock: Callable[[], float] = time.perf_counter,
        use: Callable[[int], None] = torch.set_num_threads,
    ) -> None:
        """Begin with as many as there may be.

        Args:
            clock: seconds.
            use: has everything from now on computed by so many threads.
        """
        self.most = most
        self._clock = clock
        self._use = use
        fixed = os.environ.get("OMP_DYNAMIC", "").lower() in ("false", "0")
        self._counts = [most] if fixed else sorted({most, most - 1, most // 2, 1} - {0}, reverse=True)
        self._trials: dict[int, Trials] = {}
        self._latest = most  # thought best for the pass before

    @contextmanager
    def during_pass(self, tokens: int) -> Iterator[None]:
        """Compute a pass of so many tokens on as many threads as are thought best for it."""
        if len(self._counts) == 1:
            yield
            return
        trials = self._trials.setdefault(power_of_two(max(1, tokens)), Trials(self._counts, self._latest))
        threads = trials.next
        if threads != self.most:
            self._use(threads)
        began = self._clock()
        try:
            yield
        finally:
            seconds = self._clock() - began
            if threads != self.most:
                self._use(self.most)
        trials.record(seconds)
        self._latest = trials.best
