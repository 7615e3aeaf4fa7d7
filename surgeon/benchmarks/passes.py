"""What was noted of forward passes on a rank: every exchange, and when it began and ended.

Times are the machine's monotonic clock in seconds, so that those of its ranks can be compared.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from surgeon.language.program import Step
from surgeon.runtime.comm.collectives import Counts
from surgeon.runtime.model.engine import Figures

# Spans of passes that are recorded.
STARTING = "starting"
WAITING = "waiting"

now = time.perf_counter  # one clock for all processes of a machine on Linux


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


@dataclass(slots=True)
class PassTiming:
    """One forward pass on one rank.

    Attributes:
        decode: whether it added one token to each text.
        tokens: that went through it.
        began: when the rank turned to it; on rank 0 this is the end of the pass before.
        waiting: seconds in collectives, starting them included; None where that cannot be told.
        layers: collectives of the program's steps and forks.
        vocabulary: collectives of the embedding and the output head.
    """

    decode: bool
    tokens: int
    began: float
    ended: float
    waiting: float | None
    layers: Counts
    vocabulary: Counts

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
        marking: whether the beginning and the end of exchanges are noted, as the process comes to them.
        what: being computed.
        profiled: whether steps have names in a profile.
    """

    figures: Figures
    marking: bool = True
    what: Step | str = ""
    profiled: bool = False
    exchanges: list[Exchange] = field(default_factory=list)
    passes: list[PassTiming] = field(default_factory=list)

    def close(self, decode: bool, tokens: int, began: float, ended: float, sent: Sequence[Counts]) -> None:
        """End a pass.

        Args:
            sent: the collectives of the program's steps, and those of the vocabulary. A pass that is replayed from a
                recording starts no exchange that could be seen here.
        """
        self.passes.append(
            PassTiming(
                decode=decode,
                tokens=tokens,
                began=began,
                ended=ended,
                waiting=sum(exchange.seconds for exchange in self.exchanges) if self.marking else None,
                layers=sent[0],
                vocabulary=sent[1],
            )
        )
        self.drop()

    def drop(self) -> None:
        """Begin another pass."""
        self.exchanges = []

    def replayed(self, spans: Sequence[tuple[Any, float, float]]) -> None:
        """Note the exchanges of a pass that is computed from a recording, in which spans were noted."""
        found: dict[int, Exchange] = {}
        for (kind, span), began, ended in spans:
            if kind == STARTING and span:
                found[id(span)] = Exchange(began, ended)
                self.exchanges.append(found[id(span)])
            elif span:
                found[id(span)].waited = began
                found[id(span)].ended = ended
