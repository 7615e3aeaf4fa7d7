"""scripts/bench/runtime.py: the programs it compares, and what it expects of them, from measurements made by hand."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.bench import runtime
from surgeon.benchmarks.measure import Measurement, Result, Split
from surgeon.benchmarks.timing import PassTiming, RankRun
from surgeon.cost.clocks import Transfer
from surgeon.cost.deployment import Workload
from surgeon.language.program import Program
from surgeon.runtime.comm.collectives import Counts, Link

STEP, REST, DELAY, BYTES = 0.002, 0.003, 0.001, 2048


class Plan:
    """As much of one as the script looks at."""

    ranks = 2
    family = SimpleNamespace(steps_per_layer=2)

    def __init__(self, program: Program, halves: str) -> None:
        self.program, self.halves = str(program), halves


def result(name: str, program: Program, waiting: float, other: float = 0.0) -> Result:
    """Two equal rounds of two ranks and two decoding passes, in which every step takes the same time to compute.

    Args:
        other: that makes the measured time longer than a pass computes and waits.
    """
    steps = [STEP] * len(program)
    seconds = sum(steps) + REST + waiting
    counts = Counts(len(program), 0, len(program) * BYTES)
    split = Split(0, waiting, sum(steps) + REST, counts, Counts())
    per_token = seconds + other
    one = Measurement(0.1, 0.1, 7 * per_token, per_token, 1 / per_token, split, split)
    passes = [PassTiming(True, 1, 0.0, seconds, waiting, counts, Counts()) for _ in range(2)]
    plan: Any = Plan(program, "on" if name == runtime.HALVES else "off")
    runs = [RankRun(0.0, passes), RankRun(0.0, passes)]
    return Result(name, plan, Workload(1, 4, 8), name != "upper bound", [one, one], [runs, runs])


def test_the_programs_compared() -> None:
    found = {
        name: (program.effective_depth(), program.sync_points(2))
        for name, program in runtime.programs().items()
    }
    assert found == {
        "dense": (24, 48),
        "LP to 18 layers": (18, 36),
        "attention \\|\\| MLP": (12, 24),
        "ladder": (24, 48),
        "ladder over LP": (18, 36),
        "tracks, D = 4": (24, 6),
        "halves": (24, 48),  # the dense program, in halves that take turns
        "upper bound": (24, 48),  # the dense program, on ranks that are not connected
    }


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("dense", 48 * (STEP + DELAY) + REST + 2 * DELAY),
        ("LP to 18 layers", 36 * (STEP + DELAY) + REST + 2 * DELAY),
        ("attention \\|\\| MLP", 24 * (STEP + DELAY) + REST + 2 * DELAY),
        # Every reduction hides behind the next step, but for the last one.
        ("ladder", 48 * STEP + DELAY + REST + 2 * DELAY),
        ("upper bound", 48 * STEP + REST),
    ],
)
def test_what_is_expected_of_a_known_link(name: str, seconds: float) -> None:
    programs = runtime.programs()
    dense, own = (result(one, programs[one], 0.05) for one in ("dense", name))
    way = runtime.parse_way("1ms")
    assert way.link == Link(DELAY)
    assert runtime.expected(own, dense, runtime.transfers(way, dense)) == pytest.approx(seconds)


def test_other_delays_make_the_expectation_of_dense_right() -> None:
    dense = result("dense", runtime.programs()["dense"], 0.05, other=0.01)
    delays = runtime.transfers(runtime.parse_way("shm"), dense)
    assert [one.delay for one in delays] == [pytest.approx(0.06 / 50)] * 2
    assert runtime.expected(dense, dense, delays) == pytest.approx(dense.rounds[0].per_token)


def test_ways_of_connecting_ranks() -> None:
    way = runtime.parse_way("10MB/s+int8")
    assert (way.collectives, way.link, way.compression) == ("shm", Link(bandwidth=10e6), "int8")
    dense = result("dense", runtime.programs()["dense"], 0.05)
    assert runtime.transfers(way, dense) == [Transfer(line=BYTES / 10e6)] * 2
    for text in ("tcp", "1s", "ms", "1ms+int7"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not shm, gloo"):
            runtime.parse_way(text)


def test_a_row() -> None:
    programs = runtime.programs()
    dense, ladder = (
        result("dense", programs["dense"], 0.101),
        result("ladder", programs["ladder"], 0.001, other=0.01),
    )
    cells = runtime.rows(runtime.parse_way("1ms"), [dense, ladder])[1]
    assert len(cells) == len(runtime.COLUMNS)
    assert cells == [
        1,
        "ladder",
        "24",
        48,
        "9.1",
        "1.82",
        "100.0",
        "1.00",
        "99.0",
        "1.0",
        "110.0",
        "102.0",
        "+8%",
    ]
