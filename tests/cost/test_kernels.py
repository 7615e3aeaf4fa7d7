"""Rooflines of kernels, and bursts of them with their launches, against sums made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from surgeon.cost.deployment import plan_on_paper
from surgeon.cost.hardware import Figure, Host, Shares, parse_hardware
from surgeon.cost.kernels import Kernel, RankSpeed, burst
from surgeon.cost.work import RankWork
from surgeon.language.program import Program
from tests.cost.examples import ROUND, shapes

GPU = Host(launch=3.0, graph=0.5, collective=0.0, forward=Figure.constant(0.0), asynchronous=True)
SPEED = RankSpeed(1000.0, 10.0, Shares(Figure(((1, 0.1), (100, 1.0))), Figure.constant(0.5)), GPU)
COPY = Kernel("copy", "copy", 0.0, 10.0)  # 2 s at half of 10 bytes/s


def work(dtype: str) -> RankWork:
    plan = plan_on_paper(shapes(), Program.dense(4), 1, 8, dtype, "auto", "full")
    return RankWork(plan, shapes(), lambda _: False)


def test_a_product_takes_what_it_moves_or_what_it_computes() -> None:
    narrow = work("bfloat16").product("narrow", 1, 30, 20)
    assert (narrow.flops, narrow.moved) == (1200, 2 * (600 + 50))
    assert SPEED.seconds(narrow) == 1300 / 5
    wide = work("bfloat16").product("wide", 1000, 3000, 2000)
    assert SPEED.seconds(wide) == 12e9 / 1000 > wide.moved / 5


def test_attention_has_shares_of_its_own_where_there_are_such() -> None:
    kernel = Kernel("attention", "attention", 1e6, 10.0)
    assert SPEED.seconds(kernel) == 1e6 / 100
    shares = Shares(
        SPEED.shares.flops, SPEED.shares.bandwidth, Figure.constant(0.5), Figure.constant(1.0)
    )
    assert RankSpeed(1000.0, 10.0, shares, GPU).seconds(kernel) == 1e6 / 500
    assert RankSpeed(1e9, 10.0, shares, GPU).seconds(kernel) == 1.0


def test_launches_hide_behind_what_runs_and_run_out_where_that_is_short() -> None:
    captured = burst([COPY] * 4, SPEED, graphs=True)
    assert (captured.seconds, captured.gaps, captured.host) == (8, 2, 0)
    eager = burst([COPY] * 4, SPEED, graphs=False)
    # The last of four kernels of 2 s is launched after 12 s.
    assert (eager.seconds, eager.host, eager.lag) == (8, 12, 14)
    long = burst([COPY, Kernel("long", "copy", 0.0, 100.0), COPY], SPEED, graphs=False)
    assert (long.seconds, long.lag) == (24, 6 + 20 + 2)
    waiting = replace(SPEED, host=replace(GPU, asynchronous=False))
    one_by_one = burst([COPY] * 4, waiting, graphs=False)
    assert (one_by_one.seconds, one_by_one.gaps, one_by_one.host) == (8, 12, 0)


def test_ranks_share_a_device_that_is_shared() -> None:
    host = "{launch: 2e-6, graph: 0, collective: 0, forward: 0, asynchronous: false}"
    half = f"sharing: {{2: {{shares: {{flops: 0.5, bandwidth: 0.5}}, host: {host}}}}}\n"
    shared = parse_hardware(ROUND.replace("devices: 8", "devices: 2") + half)
    alone, two, four = (RankSpeed.of(shared, "float32", ranks) for ranks in (2, 4, 8))
    kernel = work("float32").product("wide", 1000, 1000, 1000)
    assert (
        alone.seconds(kernel)
        == pytest.approx(two.seconds(kernel) / 2)
        == pytest.approx(four.seconds(kernel) / 4)
    )
    assert (alone.host.launch, two.host.launch, four.host.launch) == (0, 2e-6, 4e-6)
    with pytest.raises(ValueError, match="round has 8 devices in a node, not 9"):
        RankSpeed.of(parse_hardware(ROUND), "float32", 9)
