"""Emulated links, by a clock that a test moves and by the machine's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from surgeon.language.execute import Machine, Partial, Pending, run
from surgeon.language.program import Fork, Program, Step
from surgeon.runtime.comm.collectives import (
    SPIN_SECONDS,
    Collectives,
    Counts,
    EmulatedLink,
    Link,
    SystemClock,
    parse_link,
    parse_seconds,
)
from surgeon.runtime.plan.placement import Group
from surgeon.runtime.worker.rank import RankOptions, check_sending
from surgeon.runtime.worker.ranks import Ranks
from tests.clock import HandClock
from tests.runtime.comm import on_collectives
from tests.waiting import takes_less_than


class Echo(Collectives):
    """As if every other rank had the same tensors as this one, and they had arrived already."""

    def _connect(self, group: Group) -> Collectives:
        return Echo(self.rank, group)

    def _all_reduce(self, tensor: Tensor, _: bool) -> Callable[[], Tensor]:
        return lambda: tensor * len(self.group)

    def _all_gather(self, tensor: Tensor, _: bool) -> Callable[[], Tensor]:
        return lambda: torch.stack([tensor] * len(self.group))


def linked(ranks: int, delay: float, bandwidth: float) -> tuple[EmulatedLink, HandClock]:
    clock = HandClock()
    return EmulatedLink(Echo(0, tuple(range(ranks))), Link(delay, bandwidth), clock), clock


def test_a_transfer_takes_the_delay_and_its_bytes_time() -> None:
    link, clock = linked(2, delay=3.0, bandwidth=8.0)
    counts = Counts()
    result = link.all_reduce(torch.ones(4), counts)()  # 16 bytes
    assert clock.seconds == 100 + 3 + 16 / 8
    assert torch.equal(result, torch.full((4,), 2.0))
    assert torch.equal(link.all_gather(torch.ones(2), counts), torch.ones(2, 2))
    assert clock.seconds == 105 + 3 + 8 / 8
    assert counts == Counts(all_reduces=1, all_gathers=1, bytes=24)


def test_what_is_computed_meanwhile_hides_it() -> None:
    link, clock = linked(2, delay=3.0, bandwidth=8.0)
    wait = link.all_reduce(torch.ones(4), Counts())
    clock.seconds += 4.5
    wait()
    assert clock.seconds == 105
    wait = link.all_reduce(torch.ones(4), Counts())
    clock.seconds += 50
    wait()
    assert clock.seconds == 155


def test_transfers_in_flight_share_the_bandwidth_but_not_the_delay() -> None:
    link, clock = linked(2, delay=3.0, bandwidth=8.0)
    first, second = (link.all_reduce(torch.ones(4), Counts()) for _ in range(2))
    second()
    assert clock.seconds == 100 + 2 + 2 + 3
    first()
    assert clock.seconds == 107
    # A group of the same rank sends through the same wire.
    link, clock = linked(4, delay=0.0, bandwidth=8.0)
    first, second = (part.all_reduce(torch.ones(4), Counts()) for part in (link, link.subgroup((0, 1))))
    second()
    assert clock.seconds == 100 + (2 * 3 / 4 * 16 + 16) / 8


def test_more_ranks_send_more() -> None:
    """Around a ring of 4: three quarters of an all-reduce twice, every rank's part of an all-gather three times."""
    link, clock = linked(4, delay=0.0, bandwidth=1.0)
    link.all_reduce(torch.ones(4), Counts())()
    assert clock.seconds == 100 + 24
    link.all_gather(torch.ones(4), Counts())
    assert clock.seconds == 124 + 48


class Pipeline(Machine):
    """A rank that computes for a while in each step and reduces through a link."""

    def __init__(self, link: EmulatedLink, clock: HandClock, seconds: float) -> None:
        self.link, self.clock, self.seconds = link, clock, seconds

    def compute(self, step: Step, stream: Tensor) -> Partial:  # noqa: ARG002
        self.clock.seconds += self.seconds
        return Partial(torch.zeros_like(stream))

    def reduce(self, partial: Partial) -> Pending:
        return self.link.all_reduce(partial.part, Counts())

    def assign(self, fork: Fork) -> Iterable[Any]:
        raise NotImplementedError


@pytest.mark.parametrize(("compute", "delay"), [(2.0, 1.0), (2.0, 2.0), (2.0, 5.0), (1.0, 9.0)])
def test_ladders_hide_what_dense_programs_wait_for(compute: float, delay: float) -> None:
    """A dense step takes c + d, a late one max(c, (c + d) / 2), as two reductions are in flight."""
    steps = 200

    def seconds_per_step(program: Program) -> float:
        link, clock = linked(2, delay, bandwidth=1e30)
        run(program, torch.zeros(1), Pipeline(link, clock, compute))
        return (clock.seconds - 100) / steps

    dense = Program.dense(steps // 2)
    ladder = Program(
        tuple(Step(step.sublayers, late=True) for step in dense.nodes if isinstance(step, Step))
    )
    assert seconds_per_step(dense) == pytest.approx(compute + delay)
    assert seconds_per_step(ladder) == pytest.approx(max(compute, (compute + delay) / 2), rel=0.03)


def test_waiting_costs_little_processor_time() -> None:
    clock = SystemClock()

    def used() -> float:
        began, before = clock.now(), time.thread_time()
        for number in range(1, 31):
            clock.wait_until(began + number * 0.005)
            assert clock.now() >= began + number * 0.005
        return time.thread_time() - before

    assert takes_less_than(30 * (SPIN_SECONDS + 0.0005), used)  # of 0.15 s
    clock.wait_until(clock.now() - 5)  # what is over is over


@pytest.mark.parametrize(
    ("link", "computing"),
    [
        (Link(delay=0.05), 0.0),
        (Link(delay=0.05), 0.05),  # one after the other they would take twice as long
        (Link(bandwidth=4 * 4096 / 0.05), 0.0),  # a sum of 4096 floats in 50 ms
    ],
)
def test_ranks_really_compute_while_transfers_are_under_way(link: Link, computing: float) -> None:
    with Ranks(RankOptions(2, collectives="shm", link=link)) as ranks:

        def seconds() -> float:
            """Of the slower rank."""
            taken = max(ranks.call(on_collectives.seconds_of_sums, 6, computing, 4096))
            assert taken >= 6 * 0.05
            return taken

        assert takes_less_than(1.6 * 6 * 0.05, seconds)


def test_links_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="delay of a link must be at least 0 seconds, not -1"):
        Link(delay=-1)
    with pytest.raises(ValueError, match="bandwidth of a link must be above 0 bytes per second, not 0"):
        Link(bandwidth=0)
    with pytest.raises(ValueError, match="between CPU ranks only"):
        check_sending("nccl", "cuda", Link(), None)
    with pytest.raises(ValueError, match="no compression 'in4'; did you mean 'int4'"):
        check_sending("shm", "cpu", None, "in4")
    with pytest.raises(ValueError, match="collectives none send nothing"):
        check_sending("none", "cpu", Link(), None)


def test_links_as_users_write_them() -> None:
    assert [parse_seconds(text) for text in ("1ms", "200us", "0.5s", " 2 ms ")] == [
        0.001,
        0.0002,
        0.5,
        0.002,
    ]
    assert parse_link(None, None) is None
    assert parse_link("1ms", None) == Link(0.001)
    assert parse_link(None, "2KB/s") == Link(bandwidth=2000)
    assert parse_link("200us", "1GB") == Link(0.0002, 1e9)
