"""What forward passes should take, given what their steps took to compute and what a link costs.

The program is run on clocks instead of tensors (`surgeon.cost.clocks`), so that what a ladder hides, what a pair saves
and where tracks meet follow from the same rules as when it is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from torch import Tensor

from surgeon.benchmarks.timing import PassTiming, RankRun
from surgeon.cost.clocks import Burst, Costs, RankClock, Transfer, meet, pass_seconds
from surgeon.language.program import Fork, Program, Step
from surgeon.runtime.plan.placement import Group

ENDS = 2  # the embedding's reduction and the gathering of the head's best tokens hide behind nothing


def expected_decode(
    program: Program, runs: Sequence[RankRun], delay: float, line: float = 0.0, parts: int = 1
) -> float:
    """Seconds per decoding pass, the mean, if nothing but computation and the link took time.

    Args:
        runs: what each rank measured; what is taken from it is how long each rank computed, step by step.
        delay: seconds that a collective takes from being started, if the others have started theirs by then.
        line: seconds before that in which its bytes keep a rank's line busy; those of the next one wait.
        parts: of the batch that take turns.
    """
    by_rank = [[one for one in timed.passes if one.decode] for timed in runs]
    return fmean(
        expected_seconds(
            program,
            [_with_exchanges(one, line + delay) for one in ranks],
            [_rest(one) for one in ranks],
            delay,
            [one.starting for one in ranks],
            line,
            parts,
        )
        for ranks in zip(*by_rank, strict=True)
    )


def _with_exchanges(one: PassTiming, delay: float) -> list[float]:
    """Seconds of each step, with those that it waits for what ranks exchange inside it."""
    inside = one.inside or [0] * len(one.steps)
    return [seconds + count * (delay + one.starting) for seconds, count in zip(one.steps, inside, strict=True)]


def _rest(one: PassTiming) -> float:
    """What a pass computed outside the program's steps."""
    return one.seconds - (one.waiting or 0.0) - sum(one.steps)


def expected_seconds(
    program: Program,
    steps: Sequence[Sequence[float]],
    rest: Sequence[float],
    delay: float,
    starting: Sequence[float] | None = None,
    line: float = 0.0,
    parts: int = 1,
) -> float:
    """Seconds of one pass.

    Args:
        steps: of each rank, seconds of computation of each step of its work.
        rest: of each rank, seconds of computation of everything else: embedding, head, choosing tokens.
        delay: as above.
        starting: of each rank, what starting one collective keeps it from computing.
        line, parts: as above.
    """
    clocks = [RankClock(now=seconds) for seconds in rest]
    costs = _Measured([iter(each) for each in steps], Transfer(line=line, delay=delay), starting or [0.0] * len(clocks))
    costs.reduce_all(clocks)
    pass_seconds(program, clocks, *[costs] * parts)
    costs.reduce_all(clocks)
    return max(clock.now for clock in clocks)


@dataclass(frozen=True)
class _Measured(Costs):
    """Steps that took some time, and collectives that all take the same."""

    steps: Sequence[Iterator[float]]
    transfer: Transfer
    starting: Sequence[float]

    def items(self, rank: int, step: Step) -> Sequence[Burst]:  # noqa: ARG002 - they come in the order of the steps
        return (Burst(next(self.steps[rank])),)

    def part(self, node: Step | Fork, group: Group) -> Tensor:  # noqa: ARG002 - whatever it has in it
        return torch.zeros(1)

    def finish(self, step: Step, group: Group) -> None:
        """Nothing that is not among the steps' seconds."""

    def transfers(self, part: Tensor, group: Group) -> Sequence[Transfer]:  # noqa: ARG002 - as above
        return [replace(self.transfer, starting=self.starting[rank]) for rank in group]

    def reduce_all(self, clocks: Sequence[RankClock]) -> None:
        """Have all ranks wait for a collective."""
        if len(clocks) > 1:
            transfers = self.transfers(torch.zeros(1), tuple(range(len(clocks))))
            meet(clocks, transfers)
