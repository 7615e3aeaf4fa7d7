"""Which of several ways to compute passes is fastest, where only trying tells.

Now and then a few passes are computed another way, and the fastest way goes on. Trials may lengthen the work by about a
hundredth; when passes become slower, one follows at once. Ways are numbers here: of threads, or of parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

FIRST_TRIAL = 4  # passes before it
TRIAL_PASSES = 3
REMEMBERED = 8  # passes that a mean is of, about
PASSES_PER_TRIAL = 100  # times the seconds that a trial has cost, until the next one
BETTER, WORSE = 0.95, 1.5  # times the seconds so far: from here on a number is taken, a trial is ended
SLOWER = 1.3  # times the seconds since the last trial: from here on there is another one


class Trials:
    """What passes that are alike took with different numbers of something.

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
        tried, found = self.next, fmean(self._tried)
        self._wait = PASSES_PER_TRIAL * abs(sum(self._tried) - len(self._tried) * self._mean)
        if found < BETTER * self._mean:
            self.best, self._mean = tried, found
        self.next, self._settled = self.best, self._mean
        self._passes, self._tried = 0, []
        self._first_trial = FIRST_TRIAL
