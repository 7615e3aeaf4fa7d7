"""The time that passes should take, by how long ranks computed and what a link costs."""

from __future__ import annotations

import pytest

from scripts.bench.runtime import expected_seconds
from surgeon.cost.clocks import Transfer
from surgeon.language.operations import ladder, pair, tracks
from surgeon.language.program import Program

LAYERS = 40
DENSE = Program.dense(LAYERS)


def expected(program: Program, compute: float, transfer: Transfer, parts: int = 1) -> float:
    """Without the ends; `compute` is the seconds of a sublayer."""
    seconds = compute * len(list(program.sublayers()))
    return expected_seconds(program, [seconds] * 2, transfer, parts) - 2 * (
        transfer.delay + transfer.line
    )


@pytest.mark.parametrize(
    ("compute", "delay"), [(1.0, 0.0), (1.0, 0.5), (1.0, 1.0), (1.0, 3.0), (0.1, 7.0)]
)
def test_expected_times_are_those_of_the_formulas(compute: float, delay: float) -> None:
    late, pairs, link = ladder(DENSE, range(LAYERS)), pair(DENSE, range(LAYERS)), Transfer(delay=delay)
    assert expected(DENSE, compute, link) == pytest.approx(2 * LAYERS * (compute + delay))
    assert expected(pairs, compute, link) == pytest.approx(LAYERS * (2 * compute + delay))
    period = max(compute, (compute + delay) / 2)
    # At its ends a ladder has nothing to hide behind; that is worth one delay at most.
    assert abs(expected(late, compute, link) - 2 * LAYERS * period) <= delay + compute


@pytest.mark.parametrize(("compute", "delay"), [(1.0, 0.0), (1.0, 0.5), (1.0, 3.0)])
def test_halves_are_expected_to_hide_a_reduction_behind_each_other(compute: float, delay: float) -> None:
    found = expected(DENSE, compute, Transfer(delay=delay), parts=2)
    assert abs(found - 80 * max(compute, compute / 2 + delay)) <= delay + compute


def test_tracks_are_expected_to_wait_where_they_meet_only() -> None:
    program = tracks(Program.dense(4), range(4), count=2, depth=2)
    assert expected_seconds(program, [36.0, 36.0], Transfer(delay=0.5)) == 36.0 + (2 + 2) * 0.5


def test_ranks_are_expected_to_wait_for_the_slowest() -> None:
    program = Program.dense(2)
    assert expected_seconds(program, [8.0, 4.0], Transfer()) == 8.0
    whole = tracks(program, range(2), count=2, depth=2)  # two tracks, which meet at the end
    assert expected_seconds(whole, [4.0, 8.0], Transfer()) == 8.0


@pytest.mark.parametrize(
    ("compute", "delay", "line"), [(1.0, 0.5, 0.25), (1.0, 0.0, 4.0), (1.0, 0.5, 3.0)]
)
def test_bytes_of_two_collectives_are_expected_behind_each_other(
    compute: float, delay: float, line: float
) -> None:
    """A ladder has two on their way: they share a delay, but not the line."""
    link = Transfer(line=line, delay=delay)
    assert expected(DENSE, compute, link) == pytest.approx(2 * LAYERS * (compute + delay + line))
    period = max(compute, (compute + delay + line) / 2, line)
    found = expected(ladder(DENSE, range(LAYERS)), compute, link)
    assert abs(found - 2 * LAYERS * period) <= delay + line + compute


def test_one_rank_is_expected_to_compute_only() -> None:
    assert expected_seconds(Program.dense(4), [8.5], Transfer(delay=100.0)) == pytest.approx(8.5)
