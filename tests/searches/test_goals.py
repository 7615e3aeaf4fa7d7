"""How a round's trials are shared out among the levels of a cost."""

from __future__ import annotations

from surgeon.searches.goals import Goal, at_the_edge, evenly
from surgeon.searches.trial import MeasuredProgram, Proposal, Trial

GOALS = [Goal((float(depth),), float(depth)) for depth in (15, 14, 13, 12)]


def trial(level: float, divergence: float) -> Trial:
    return Trial(0, Proposal("key", "additive", (), level), MeasuredProgram(1, divergence, 0, 1, 10))


def test_limits_are_kept_up_to_rounding() -> None:
    assert Goal((0.3,)).is_met((0.1 + 0.2,))
    assert not Goal((0.3, 1)).is_met((0.3, 1.001))


def test_all_levels_get_as_many_trials_in_the_end() -> None:
    assert evenly(GOALS, [], 6) == [2, 2, 1, 1]
    assert evenly(GOALS, [trial(15, 0.1), trial(15, 0.2), trial(13, 0.1)], 5) == [0, 2, 1, 2]


def test_trials_go_where_what_is_good_enough_ends() -> None:
    assert at_the_edge(GOALS, {15, 14}, 4) == [0, 1, 2, 1]
    assert at_the_edge(GOALS, {}, 4) == [1, 2, 1, 0]
    assert at_the_edge(GOALS, {12}, 3) == [0, 0, 0, 3], "the cheapest level is met: better there, at least"
