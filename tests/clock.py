"""Time that passes only when somebody says so, so that what depends on it is the same however busy the machine is."""

from __future__ import annotations


class HandClock:
    """A clock of links (`surgeon.runtime.comm.collectives.SystemClock`), which stands for the module `time`, too."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def now(self) -> float:
        return self.seconds

    monotonic = perf_counter = now

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        assert seconds >= 0
        self.seconds += seconds

    def wait_until(self, when: float) -> None:
        """Let time pass until then, if that is later."""
        self.seconds = max(self.seconds, when)
