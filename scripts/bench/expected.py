"""The time that forward passes should take, given what they took to compute and what a link costs.

The program is run on clocks instead of tensors (`surgeon.cost.clocks`), so that what a ladder hides, what a pair saves
and where tracks meet follow from the same rules as when it is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from surgeon.benchmarks.timing import PassTiming, RankRun
from surgeon.cost.clocks import Burst, Costs, RankClock, Transfer, meet, pass_seconds
from surgeon.language.program import Fork, Program, Step
from surgeon.runtime.plan.placement import Group, rank_work

ENDS = 2  # the embedding's reduction and the gathering of the head's best tokens hide behind nothing


def computing(one: PassTiming) -> float:
    """Seconds that a rank computes in a pass."""
    return one.seconds - (one.waiting or 0.0)


def expected_decode(
    program: Program, runs: Sequence[RankRun], transfer: Transfer, parts: int = 1
) -> float:
    """Seconds per decoding pass, the mean, if nothing but computation and the link took time.

    Args:
        runs: how long each rank computed; its sublayers take equal parts of that.
        parts: of the batch that take turns.
    """
    by_rank = [[computing(one) for one in run.passes if one.decode] for run in runs]
    return fmean(
        expected_seconds(program, seconds, transfer, parts) for seconds in zip(*by_rank, strict=True)
    )


def expected_seconds(
    program: Program, seconds: Sequence[float], transfer: Transfer, parts: int = 1
) -> float:
    """Seconds of one pass, of which each rank computes so many."""
    ranks = len(seconds)
    costs = _Shared(
        [
            each / parts / sum(len(work.step.sublayers) for work in rank_work(program, rank, ranks))
            for rank, each in enumerate(seconds)
        ],
        transfer,
    )
    clocks = [RankClock() for _ in range(ranks)]
    costs.reduce_all(clocks)
    pass_seconds(program, clocks, *[costs] * parts)
    costs.reduce_all(clocks)
    return max(clock.now for clock in clocks)


@dataclass(frozen=True)
class _Shared(Costs):
    """Sublayers that all take a rank the same time, and collectives that all take the same.

    Attributes:
        seconds: of a sublayer, on each rank.
    """

    seconds: Sequence[float]
    transfer: Transfer

    def items(self, rank: int, step: Step) -> Sequence[Burst]:
        return (Burst(self.seconds[rank] * len(step.sublayers)),)

    def part(self, node: Step | Fork, group: Group) -> Tensor:  # noqa: ARG002 - all are alike
        return torch.zeros(1)

    def finish(self, step: Step, group: Group) -> None:
        """Nothing that is not among the sublayers' seconds."""

    def transfers(self, part: Tensor, group: Group) -> Sequence[Transfer]:  # noqa: ARG002 - all are alike
        return [self.transfer for _ in group]

    def reduce_all(self, clocks: Sequence[RankClock]) -> None:
        """Have all ranks wait for a collective."""
        if len(clocks) > 1:
            meet(clocks, self.transfer)
