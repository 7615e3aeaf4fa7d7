"""What was noted of forward passes on a rank: every computation and exchange, and when each began and ended.

Times are the machine's monotonic clock in seconds, so that those of its ranks can be compared.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import torch

from surgeon.language.program import Step
from surgeon.runtime.comm.collectives import Counts
from surgeon.runtime.model.engine import Figures

# Spans of passes that are recorded.
COMPUTING = "computing"
STARTING = "starting"
WAITING = "waiting"

now = time.perf_counter  # one clock for all processes of a machine on Linux

Mark = Any  # what a clock's `read` takes
UNKNOWN = math.nan  # seconds of what nobody has marked


class HostClock:
    """Marks moments of the process's own time.

    Attributes:
        deferred: whether marks can be read only when a pass is over.
        launched: when this process made the last mark; NaN where nothing is launched.
    """

    deferred = False
    launched = UNKNOWN

    def begin(self) -> None:
        """Before a pass, when the device has nothing to do."""

    def mark(self) -> Mark:
        """This moment of the work."""
        return now()

    def end(self) -> None:
        """After a pass: from here on its marks can be read."""

    def read(self, mark: Mark) -> float:
        """Seconds, on the process's monotonic clock."""
        return float(mark)


class DeviceClock(HostClock):
    """Events on a GPU's current stream, which it notes when it comes to them, in replays of recorded passes, too.

    A GPU goes on while its process waits or launches more, so events are read when the pass is over.

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
        return cls(lambda: torch.cuda.Event(enable_timing=True, external=True), lambda: torch.cuda.synchronize(device))

    def begin(self) -> None:
        self._first = self._make()
        self._first.record()
        self._began = now()

    def mark(self) -> Mark:
        event = self._make()
        event.record()
        self.launched = now()
        return event

    def end(self) -> None:
        self._wait()

    def read(self, mark: Mark) -> float:
        return self._began + float(self._first.elapsed_time(mark)) / 1e3


@dataclass(slots=True)
class Computation:
    """One step on one rank.

    Attributes:
        inside: how many exchanges it had to wait for, of factors that ranks share.
        waited: seconds of them.
        first: which of the pass's exchanges is the first of these.
    """

    began: float
    ended: float
    inside: int = 0
    waited: float = 0.0
    first: int = 0

    @property
    def seconds(self) -> float:
        return self.ended - self.began - self.waited


@dataclass(slots=True)
class Exchange:
    """One collective on one rank.

    Attributes:
        began: when it was started.
        started: when starting it was done, and the rank could go on.
        waited: when the rank came back for its result.
        ended: when it had it.
    """

    began: float
    started: float
    waited: float = 0.0
    ended: float = 0.0

    @property
    def seconds(self) -> float:
        return self.started - self.began + self.ended - self.waited

    def read(self, read: Callable[[Mark], float]) -> Exchange:
        """The same with seconds in place of marks."""
        return Exchange(*map(read, (self.began, self.started, self.waited, self.ended)))


@dataclass(slots=True)
class PassTiming:
    """One forward pass on one rank.

    Attributes:
        decode: whether it added one token to each text.
        tokens: that went through it.
        began: when the rank turned to it; on rank 0 this is the end of the pass before.
        waiting: seconds in collectives, starting them included; None where that cannot be told.
        steps: seconds of each step's computation, in the order of the rank's work; none where that cannot be told.
        layers: collectives of the program's steps and forks.
        vocabulary: collectives of the embedding and the output head.
        starting: of waiting, what it took to start a collective, the mean.
        inside: how many collectives each step waited for before it had computed its part.
        launching: seconds until all of it was launched on a GPU; NaN elsewhere, and where it was not marked.
    """

    decode: bool
    tokens: int
    began: float
    ended: float
    waiting: float | None
    steps: list[float]
    layers: Counts
    vocabulary: Counts
    starting: float = 0.0
    inside: list[int] = field(default_factory=list)
    launching: float = UNKNOWN

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass
class RankRun:
    """What one rank measured while some texts were continued.

    Attributes:
        began: when the rank was asked to.
    """

    began: float
    passes: list[PassTiming]


@dataclass
class PassRecorder:
    """Collects what happens in a pass.

    Attributes:
        figures: of the engine, which tell collectives of the vocabulary from others.
        clock: that marks the beginning and the end of steps and exchanges; what they are is read at the pass's end.
        marking: whether it does.
        what: being computed.
        profiled: whether steps have names in a profile.
    """

    figures: Figures
    clock: HostClock = field(default_factory=HostClock)
    marking: bool = True
    what: Step | str = ""
    profiled: bool = False
    computations: list[Computation] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    passes: list[PassTiming] = field(default_factory=list)

    def close(self, decode: bool, tokens: int, began: float, ended: float, sent: Sequence[Counts]) -> None:
        """End a pass.

        Args:
            sent: the collectives of the program's steps, and those of the vocabulary. A pass that is replayed from a
                recording starts no exchange that could be seen here.
        """
        self._read()
        self.passes.append(
            PassTiming(
                decode=decode,
                tokens=tokens,
                began=began,
                ended=ended,
                waiting=sum(exchange.seconds for exchange in self.exchanges) if self.marking else None,
                steps=[one.seconds for one in self.computations],
                layers=sent[0],
                vocabulary=sent[1],
                starting=fmean(one.started - one.began for one in self.exchanges) if self.exchanges else 0.0,
                inside=[one.inside for one in self.computations],
                launching=self.clock.launched - began if self.marking else UNKNOWN,
            )
        )
        self.drop()

    def _read(self) -> None:
        if self.marking and self.clock.deferred:
            self.clock.end()
            read = self.clock.read
            self.computations = [
                replace(one, began=read(one.began), ended=read(one.ended)) for one in self.computations
            ]
            self.exchanges = [one.read(read) for one in self.exchanges]
        for one in self.computations:
            one.waited = sum(exchange.seconds for exchange in self.exchanges[one.first : one.first + one.inside])

    def drop(self) -> None:
        """Begin another pass."""
        self.computations = []
        self.exchanges = []

    def replayed(self, spans: Sequence[tuple[Any, float, float]]) -> None:
        """Note the steps and exchanges of a pass that is computed from a recording, in which spans were noted."""
        found: dict[int, Exchange] = {}
        for (kind, span), began, ended in spans:
            if kind == COMPUTING:
                self.computations.append(Computation(began, ended))
            elif kind == STARTING and span:
                found[id(span)] = Exchange(began, ended)
                self.exchanges.append(found[id(span)])
            elif span:
                found[id(span)].waited = began
                found[id(span)].ended = ended
