"""What a forward pass should take, given what its steps take to compute and what the link costs.

The program is run by the one executor on a clock instead of tensors, so that what a ladder hides, what a pair saves and
where tracks meet follow from the same rules as when it is computed. With c seconds of computation per step and d per
reduction, a dense program costs c + d per step, and a ladder's period is max(c, (c + d) / 2).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surgeon.execute import Branch, Machine, Pending, run
from surgeon.program import Fork, Program, Step
from surgeon.runtime.placement import Group, fork_share

ENDS = 2  # the embedding's reduction and the gathering of the head's best tokens hide behind nothing


def expected_seconds(
    program: Program, ranks: int, rank: int, steps: Sequence[float], rest: float, delay: float
) -> float:
    """Seconds of one pass on one rank, if all ranks come to each collective at the same time.

    Args:
        steps: seconds of computation of each step of the rank's work.
        rest: seconds of computation of everything else: embedding, head, choosing tokens.
        delay: seconds that a collective takes from being started.
    """
    clock = _Clock()
    run(program, torch.zeros(1), _SimulatedRank(clock, iter(steps), rank, tuple(range(ranks)), delay))
    return clock.seconds + rest + (ENDS * delay if ranks > 1 else 0.0)


@dataclass
class _Clock:
    seconds: float = 0.0


class _SimulatedRank(Machine):
    """A rank on which time passes and nothing else happens."""

    def __init__(self, clock: _Clock, steps: Iterator[float], rank: int, group: Group, delay: float) -> None:
        self.clock = clock
        self.steps = steps
        self.rank = rank
        self.group = group
        self.delay = delay

    def compute(self, step: Step, stream: Tensor) -> Tensor:  # noqa: ARG002 - only its time matters
        self.clock.seconds += next(self.steps)
        return stream

    def reduce(self, output: Tensor) -> Pending:
        there = self.clock.seconds + (self.delay if len(self.group) > 1 else 0.0)

        def wait() -> Tensor:
            self.clock.seconds = max(self.clock.seconds, there)
            return output

        return wait

    def assign(self, fork: Fork) -> Iterable[tuple[Branch, Machine]]:
        branches, group = fork_share(fork, self.rank, self.group)
        return [(branch, _SimulatedRank(self.clock, self.steps, self.rank, group, self.delay)) for branch in branches]
