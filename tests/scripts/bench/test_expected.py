"""What passes should take, by how long their steps computed and what a link costs."""

from __future__ import annotations

import pytest

from scripts.bench.expected import expected_seconds
from surgeon.language.operations import ladder, pair, tracks
from surgeon.language.program import Program


def expected(program: Program, compute: float, delay: float, ranks: int = 2) -> float:
    steps = sum(1 for _ in program.nodes)
    return expected_seconds(program, [[compute] * steps] * ranks, [0.0] * ranks, delay) - 2 * delay


@pytest.mark.parametrize(("compute", "delay"), [(1.0, 0.0), (1.0, 0.5), (1.0, 1.0), (1.0, 3.0), (0.1, 7.0)])
def test_expected_times_are_those_of_the_formulas(compute: float, delay: float) -> None:
    layers = 40
    dense = Program.dense(layers)
    late, pairs = ladder(dense, range(0, layers)), pair(dense, range(0, layers))
    assert expected(dense, compute, delay) == pytest.approx(2 * layers * (compute + delay))
    assert expected(pairs, compute, delay) == pytest.approx(layers * (compute + delay))
    period = max(compute, (compute + delay) / 2)
    # At its ends a ladder has nothing to hide behind; that is worth one delay at most.
    assert abs(expected(late, compute, delay) - 2 * layers * period) <= delay + compute


@pytest.mark.parametrize(("compute", "delay"), [(1.0, 0.0), (1.0, 0.5), (1.0, 3.0)])
def test_halves_are_expected_to_hide_a_reduction_behind_each_other(compute: float, delay: float) -> None:
    dense = Program.dense(40)
    steps = [compute / 2] * 2 * len(dense)  # of the halves in turn, as they are measured
    found = expected_seconds(dense, [steps, steps], [0.0, 0.0], delay, parts=2) - 2 * delay
    assert abs(found - 80 * max(compute, compute / 2 + delay)) <= delay + compute


def test_tracks_are_expected_to_wait_where_they_meet_only() -> None:
    program = tracks(Program.dense(4), range(0, 4), count=2, depth=2)
    steps = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    assert expected_seconds(program, [steps, steps], [9.0, 9.0], 0.5) == sum(steps) + 9.0 + (2 + 2) * 0.5


def test_ranks_are_expected_to_wait_for_the_slowest() -> None:
    uneven = [[1.0, 5.0, 1.0, 1.0], [4.0, 1.0, 1.0, 1.0]]
    program = Program.dense(2)
    assert expected_seconds(program, uneven, [0.0, 0.0], 0.0) == 4 + 5 + 1 + 1
    whole = tracks(program, range(0, 2), count=2, depth=2)  # two tracks, which meet at the end
    assert expected_seconds(whole, uneven, [0.0, 0.0], 0.0) == max(map(sum, uneven))
    # A rank that comes late finds the other's part there, but its own is still on its way.
    assert expected_seconds(Program.dense(1), [[1.0, 0.0], [3.0, 0.0]], [0.0, 0.0], 0.5) == 4 * 0.5 + 3


def test_starting_a_collective_is_expected_to_hide_behind_nothing() -> None:
    dense = Program.dense(4)
    late, steps = ladder(dense, range(0, 4)), [[1.0] * 8] * 2
    # Behind the link's delay there is room for it, behind the next step there is none.
    assert expected_seconds(dense, steps, [0.0, 0.0], 0.5, [0.25, 0.25]) == 8 * 1.5 + 2 * 0.5
    assert expected_seconds(late, steps, [0.0, 0.0], 0.5, [0.25, 0.25]) == 8 * 1.25 + 0.25 + 2 * 0.5


@pytest.mark.parametrize(("compute", "delay", "line"), [(1.0, 0.5, 0.25), (1.0, 0.0, 4.0), (1.0, 0.5, 3.0)])
def test_bytes_of_two_collectives_are_expected_behind_each_other(compute: float, delay: float, line: float) -> None:
    """A ladder has two on their way: they share a delay, but not the line."""
    layers, nothing = 40, [0.0, 0.0]
    dense = Program.dense(layers)
    late, steps = ladder(dense, range(0, layers)), [[compute] * 2 * layers] * 2
    ends = 2 * (delay + line)
    whole = 2 * layers * (compute + delay + line) + ends
    assert expected_seconds(dense, steps, nothing, delay, line=line) == pytest.approx(whole)
    period = max(compute, (compute + delay + line) / 2, line)
    found = expected_seconds(late, steps, nothing, delay, line=line) - ends
    assert abs(found - 2 * layers * period) <= delay + line + compute


def test_one_rank_is_expected_to_compute_only() -> None:
    assert expected_seconds(Program.dense(4), [[1.0] * 8], [0.5], 100.0) == 8.5
