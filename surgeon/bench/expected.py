"""What forward passes should take, given what their steps took to compute and what a link costs.

The program is run by the one executor on clocks instead of tensors, one clock for each rank, so that what a ladder
hides, what a pair saves and where tracks meet follow from the same rules as when it is computed. With c seconds of
computation per step and d per reduction, a dense program costs c + d per step, and a ladder's period is
max(c, (c + d) / 2).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean

import torch
from torch import Tensor

from surgeon.bench.timing import PassTiming, RankRun
from surgeon.execute import Branch, Machine, Partial, Pending, run
from surgeon.program import Fork, Program, Step
from surgeon.runtime.plan.placement import Group, assigned_branches

ENDS = 2  # the embedding's reduction and the gathering of the head's best tokens hide behind nothing


def expected_decode(program: Program, runs: Sequence[RankRun], delay: float) -> float:
    """Seconds per decoding pass, the mean, if nothing but computation and the link took time.

    Args:
        runs: what each rank measured; what is taken from it is how long each rank computed, step by step.
        delay: seconds that a collective takes from being started, if the others have started theirs by then.
    """
    by_rank = [[one for one in timed.passes if one.decode] for timed in runs]
    return fmean(
        expected_seconds(
            program,
            [_with_exchanges(one, delay) for one in ranks],
            [_rest(one) for one in ranks],
            delay,
            [one.starting for one in ranks],
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
) -> float:
    """Seconds of one pass.

    Args:
        steps: of each rank, seconds of computation of each step of its work.
        rest: of each rank, seconds of computation of everything else: embedding, head, choosing tokens.
        delay: as above.
        starting: of each rank, what starting one collective keeps it from computing.
    """
    clocks = list(rest)
    starting = starting or [0.0] * len(clocks)
    machine = _SimulatedRanks(clocks, [iter(each) for each in steps], tuple(range(len(clocks))), delay, starting)
    stream = torch.zeros(1)
    machine.reduce(Partial(stream))()
    run(program, stream, machine)
    machine.reduce(Partial(stream))()
    return max(clocks)


class _SimulatedRanks(Machine):
    """A group of ranks on which time passes and nothing else happens."""

    def __init__(
        self,
        clocks: list[float],
        steps: list[Iterator[float]],
        group: Group,
        delay: float,
        starting: Sequence[float],
    ) -> None:
        self.clocks = clocks
        self.steps = steps
        self.group = group
        self.delay = delay
        self.starting = starting

    def compute(self, step: Step, stream: Tensor) -> Partial:  # noqa: ARG002 - only its time matters
        for rank in self.group:
            self.clocks[rank] += next(self.steps[rank])
        return Partial(stream)

    def reduce(self, partial: Partial) -> Pending:
        if len(self.group) == 1:
            return lambda: partial.part
        started = [self.clocks[rank] for rank in self.group]
        there = [max(*started, own + self.delay) for own in started]
        for rank in self.group:
            self.clocks[rank] += self.starting[rank]

        def wait() -> Tensor:
            for rank, when in zip(self.group, there, strict=True):
                self.clocks[rank] = max(self.clocks[rank], when)
            return partial.part

        return wait

    def assign(self, fork: Fork) -> Iterable[tuple[Branch, Machine]]:
        assigned = dict.fromkeys(assigned_branches(fork, rank, self.group) for rank in self.group)
        for branches, group in assigned:
            machine = _SimulatedRanks(self.clocks, self.steps, group, self.delay, self.starting)
            for branch in branches:
                yield branch, machine
