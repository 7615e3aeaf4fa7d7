"""How many threads compute a pass: as many as make it fastest beside whatever else the machine does now.

Threads that share a product end it together, so that a process which takes one of their cores holds up all of them:
beside one busy process two threads on two cores were seen to be slower than one. Nothing says beforehand what pays, so
it is tried: now and then a few passes have another number, and the fastest goes on. Trials may lengthen the work by
about a hundredth; when passes become slower, one follows at once. Passes of about equally many tokens are compared with
each other; the first of a size have the number that the pass before them had, and a trial soon.

Numbers of threads do not change what is computed, but may change its last bits, as the number of texts in a pass does.
That is for PyTorch's own operations; threads of the kernels (runtime/kernels) never wait so, and where these compute
all that takes long, PyTorch has one thread: on several, each of its operations, short as it is, would wait until a
process that has the core of one gives it back; with no such process passes take as long either way.

OMP_DYNAMIC=false in the environment, OpenMP's own word for it, keeps the number as it is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean

import torch

from surgeon.runtime.batching.windows import power_of_two

FIRST_TRIAL = 4  # passes before it
TRIAL_PASSES = 3
REMEMBERED = 8  # passes that a mean is of, about
PASSES_PER_TRIAL = 100  # times the seconds that a trial has cost, until the next one
BETTER, WORSE = 0.95, 1.5  # times the seconds so far: from here on a number is taken, a trial is ended
SLOWER = 1.3  # times the seconds since the last trial: from here on there is another one


class Trials:
    """What passes that are alike took with different numbers of threads.

    Attributes:
        best: the number that is thought best.
        next: of the next pass.
    """

    def __init__(self, counts: Sequence[int], start: int) -> None:
        """Begin with one of the numbers."""
        self._counts = counts
        self.best = self.next = start
        self._turn = 0  # which of the others is tried next
        self._first_trial = FIRST_TRIAL if start == counts[0] else 1
        self._mean = self._settled = 0.0  # seconds of a pass: lately, and after the last trial
        self._passes = 0  # since then
        self._wait = 0.0  # seconds of passes until the next trial
        self._tried: list[float] = []

    def record(self, seconds: float) -> None:
        """Take in what a pass took, and decide about the next one."""
        if self.next != self.best:
            self._tried.append(seconds)
            if len(self._tried) == TRIAL_PASSES or seconds > WORSE * self._mean:
                self._judge()
            return
        self._passes += 1
        self._mean += (seconds - self._mean) / min(self._passes if not self._settled else REMEMBERED, REMEMBERED)
        self._wait -= seconds
        slower = self._settled and self._mean > SLOWER * self._settled
        if self._passes >= self._first_trial and (self._wait <= 0 or slower):
            self._begin()

    def _begin(self) -> None:
        others = [count for count in self._counts if count != self.best]
        self.next = others[self._turn % len(others)]
        self._turn += 1

    def _judge(self) -> None:
        tried = self.next
        found = fmean(self._tried)
        self._wait = PASSES_PER_TRIAL * abs(sum(self._tried) - len(self._tried) * self._mean)
        if found < BETTER * self._mean:
            self.best = tried
            self._mean = found
        self.next = self.best
        self._settled = self._mean
        self._passes = 0
        self._tried = []
        self._first_trial = FIRST_TRIAL


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
