"""What hides behind what, on clocks whose steps and collectives take round times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from surgeon.cost.clocks import Burst, Costs, RankClock, Transfer, pass_seconds
from surgeon.language.operations.ladder import ladder
from surgeon.language.program import Fork, Program, Step
from surgeon.runtime.plan.placement import Group


@dataclass
class Alike(Costs):
    """Every step and every reduction takes the same on every rank."""

    step: Burst
    reduction: Transfer
    inside: tuple[Burst | Transfer, ...] = ()
    second: Burst | None = None

    def items(self, rank: int, step: Step) -> Sequence[Burst | Transfer]:  # noqa: ARG002
        return (self.step, *self.inside)

    def part(self, node: Step | Fork, group: Group) -> Tensor:  # noqa: ARG002
        return torch.zeros(1)

    def finish(self, step: Step, group: Group) -> Burst | None:  # noqa: ARG002
        return self.second

    def transfers(self, part: Tensor, group: Group) -> Sequence[Transfer]:  # noqa: ARG002
        return [self.reduction] * len(group)


DENSE = Program.dense(10)
LADDER = ladder(DENSE, range(0, 10))


def clock(program: Program, costs: Costs, ranks: int = 2) -> RankClock:
    clocks = [RankClock() for _ in range(ranks)]
    pass_seconds(program, clocks, costs)
    assert all(one == clocks[0] for one in clocks)
    return clocks[0]


@pytest.mark.parametrize("seconds", [0.0, 0.5, 1.0, 3.0])
def test_a_ladder_hides_one_collective_behind_a_step(seconds: float) -> None:
    """Where collectives queue, as NCCL's of one stream do, its period is the longer of the two."""
    costs = Alike(Burst(1.0), Transfer(shared=seconds))
    dense = clock(DENSE, costs)
    assert (dense.now, dense.compute, dense.exposed) == pytest.approx(
        (20 * (1 + seconds), 20, 20 * seconds)
    )
    late = clock(LADDER, costs)
    assert late.now == pytest.approx(20 * max(1, seconds) + min(1, seconds), abs=1.0)
    assert late.communication == dense.communication == 20 * seconds


@pytest.mark.parametrize("delay", [0.0, 0.5, 1.0, 3.0, 7.0])
def test_where_two_can_be_in_flight_its_period_is_half_of_both(delay: float) -> None:
    late = clock(LADDER, Alike(Burst(1.0), Transfer(delay=delay)))
    assert late.now == pytest.approx(20 * max(1, (1 + delay) / 2), abs=delay + 1)


@pytest.mark.parametrize("delay", [0.0, 0.25, 0.5, 1.0, 3.0])
def test_of_two_halves_one_computes_while_the_other_is_reduced(delay: float) -> None:
    half, clocks = Alike(Burst(0.5), Transfer(delay=delay)), [RankClock() for _ in range(2)]
    pass_seconds(DENSE, clocks, half, half)
    assert clocks[0].compute == 20
    assert clocks[0].now == pytest.approx(19 * max(1, 0.5 + delay) + 1 + delay)


@pytest.mark.parametrize(("delay", "period"), [(0.5, 4.0), (2.0, 4.0), (3.0, 4.0), (5.0, 6.0)])
def test_a_result_is_read_while_the_emulated_link_still_has_it(delay: float, period: float) -> None:
    reduction = Transfer(delay=delay, reading=3.0)
    assert reduction.seconds == max(delay, 3.0)
    assert clock(DENSE, Alike(Burst(1.0), reduction)).now == pytest.approx(20 * period)


def test_what_takes_nothing_to_reduce_makes_a_ladder_dense() -> None:
    costs = Alike(Burst(1.0, gaps=0.25), Transfer())
    assert clock(LADDER, costs).now == clock(DENSE, costs).now == 25


def test_time_is_told_apart() -> None:
    reduction = Transfer(shared=2.0, writing=0.5, reading=0.25, before=Burst(0.125), after=Burst(0.0625))
    one = clock(Program.parse("A0 F0"), Alike(Burst(1.0, gaps=4.0), reduction, second=Burst(8.0)))
    assert one.compute == 2 * (1 + 0.125 + 0.0625 + 8)
    assert one.launches == 2 * 4
    assert one.exposed == 2 * (2 + 0.5 + 0.25)
    assert one.now == one.compute + one.launches + one.exposed


def test_a_host_that_falls_behind_is_waited_for() -> None:
    late = clock(DENSE, Alike(Burst(1.0, host=3.0, lag=3.5), Transfer()))
    assert (late.now, late.launches) == (19 * 3 + 3.5, 19 * 3 + 3.5 - 20)
    ahead = clock(DENSE, Alike(Burst(1.0, host=0.5, lag=1.0), Transfer()))
    assert (ahead.now, ahead.launches) == (20, 0)


def test_collectives_take_from_what_computes_meanwhile() -> None:
    reduction = Transfer(shared=1.0, contention=0.5)
    # From the second step on, half of every second step's first second is lost to the collective in flight.
    assert clock(Program.parse("A0 >F0"), Alike(Burst(2.0), reduction)).now == 2 + 2.5 + 1
    assert clock(Program.parse("A0 F0"), Alike(Burst(2.0), reduction)).now == 2 * 3


def test_what_ranks_exchange_inside_a_step_is_waited_for() -> None:
    inside = Transfer(shared=1.0, group=(0, 1)), Burst(0.5)
    one = clock(Program.parse("A0 F0"), Alike(Burst(2.0), Transfer(shared=0.25), inside))
    assert one.now == 2 * (2 + 1 + 0.5 + 0.25)


def test_a_group_of_ranks_waits_for_itself_only() -> None:
    program = Program.parse("{A0 F0 | A1 F1}")
    four = clock(program, Alike(Burst(1.0), Transfer(shared=0.5)), ranks=4)
    assert four.now == 2 * 1.5 + 0.5  # inside the branches two ranks reduce, at the end all four
    two = clock(program, Alike(Burst(1.0), Transfer(shared=0.5)), ranks=2)
    assert two.now == 2 + 0.5
