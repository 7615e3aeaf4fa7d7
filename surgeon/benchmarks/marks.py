"""Clocks that mark the moments of a pass: the process's own, and a GPU's, by events on its stream.

What a process sees is what happens on a CPU. A GPU goes on while its process waits or launches more, so there a moment
is an event, which the GPU notes when it comes to it and which can be read when the pass is over. Events stand in
recordings of passes, too, and every replay notes them anew.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch.profiler import record_function

now = time.perf_counter  # one clock for all processes of a machine on Linux

Mark = Any  # what a clock's `read` takes
UNKNOWN = math.nan  # seconds of what nobody has marked


class PassClock(Protocol):
    """Marks moments.

    Attributes:
        deferred: whether marks can be read only when a pass is over.
        launched: when this process made the last mark; NaN where nothing is launched.
    """

    deferred: bool
    launched: float

    def begin(self) -> None:
        """Before a pass, when the device has nothing to do."""

    def mark(self) -> Mark:
        """This moment of the work."""

    def end(self) -> None:
        """After a pass: from here on its marks can be read."""

    def read(self, mark: Mark) -> float:
        """Seconds, on the process's monotonic clock."""


class HostClock(PassClock):
    """The process's own time."""

    deferred = False
    launched = UNKNOWN

    def begin(self) -> None:
        """Nothing is to be done before a pass."""

    def end(self) -> None:
        """Nor after it."""

    def mark(self) -> Mark:
        """What the clock says."""
        return now()

    def read(self, mark: Mark) -> float:
        return float(mark)


class DeviceClock(PassClock):
    """Events on a GPU's current stream.

    Args:
        make: makes an event (`record`, `elapsed_time` in milliseconds), which recordings of passes may hold.
        wait: until the device has come to all of them.
    """

    deferred = True
    launched = 0.0

    def __init__(self, make: Callable[[], Any], wait: Callable[[], object]) -> None:
        self._make = make
        self._wait = wait
        self._first = make()
        self._began = 0.0

    @classmethod
    def of(cls, device: torch.device) -> DeviceClock:
        """That of a GPU; making it needs none."""
        return cls(lambda: torch.cuda.Event(enable_timing=True, external=True), lambda: torch.cuda.synchronize(device))

    def begin(self) -> None:
        self._first = self._make()
        self._first.record()
        self._began = now()

    def mark(self) -> Mark:
        """An event behind all that was launched."""
        event = self._make()
        event.record()
        self.launched = now()
        return event

    def end(self) -> None:
        """Wait for the device."""
        self._wait()

    def read(self, mark: Mark) -> float:
        """When the device came to it."""
        return self._began + float(self._first.elapsed_time(mark)) / 1e3


def in_profile(what: object, wanted: bool) -> AbstractContextManager[object]:
    """Under a name in a profile of `torch.profiler`, if that is wanted."""
    if wanted:
        return record_function(str(what))
    return nullcontext()
