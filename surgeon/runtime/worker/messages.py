"""What rank 0, the other ranks and the starting process tell each other about the work on requests."""

from __future__ import annotations

from typing import NamedTuple

from surgeon.runtime.batching.scheduler import Output, Scheduler
from surgeon.runtime.model.engine import Figures


class Cancel(NamedTuple):
    """To rank 0: end a request."""

    request: int


class Report(NamedTuple):
    """To every rank: send an `Account`."""

    ticket: int


class Recorded(NamedTuple):
    """From rank 0, before it works on requests: how many passes have been recorded, and of how many."""

    done: int
    all: int


class Progress(NamedTuple):
    """From rank 0, at the start and after every pass and cancellation.

    Attributes:
        stats: the fields of `Stats`, in their order.
    """

    outputs: list[Output]
    stats: tuple[int, ...]

    @classmethod
    def of(cls, outputs: list[Output], scheduler: Scheduler, figures: Figures) -> Progress:
        """What the starting process is told."""
        phases = figures.prefill, figures.decode, figures.drafting
        counts = [count for phase in phases for count in (phase.layers, phase.vocabulary)]
        stats = (  # the fields of `Stats`, in their order; to make one would take as long as all of this
            *vars(scheduler.tally).values(),
            len(scheduler.running),
            len(scheduler.waiting),
            scheduler.pool.blocks,
            scheduler.pool.free,
            sum(phase.passes for phase in phases),
            figures.drafting.passes,
            sum(phase.halved for phase in phases),
            sum(count.all_reduces for count in counts),
            sum(count.all_gathers for count in counts),
            sum(count.bytes for count in counts),
        )
        return cls(outputs, stats)


class Account(NamedTuple):
    """From a rank: what its passes have cost."""

    ticket: int
    rank: int
    figures: Figures
