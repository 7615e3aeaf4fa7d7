"""What mixing spaces wins: which programs are compared at which levels, and with which interval."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from surgeon.results.edit import Edit
from surgeon.searches.front import quality_curves
from surgeon.searches.mixing import gains_in_words, mixed_levels, mixing_gains
from surgeon.searches.quantities import DEPTH
from surgeon.searches.trial import Trial
from tests.searches.test_front import ORIGINAL, PRICING, TRIALS, pairs, trial

DROP = Edit(6, 7, "drop")
FURTHER = trial(7, (*pairs(0, 2, 4), DROP), [0.7, 0.6, 0.8, 0.7])
LEVELS = {DEPTH: (7.0, 6.0, 5.5, 5.0, 4.0, 3.0)}


def levels(trials: list[Trial]) -> list[tuple[float, int, str, int | None]]:
    curves = quality_curves(DEPTH, trials, ORIGINAL, PRICING, resamples=20)
    return [
        (one.cost, one.together.number, one.space, one.alone and one.alone.number)
        for one in mixed_levels(curves, LEVELS)
    ]


def test_the_best_together_is_compared_with_the_best_of_one_space() -> None:
    """Of levels with the same programs the cheapest; where no space alone comes so far, with none; not beyond 1 nat."""
    assert levels([*TRIALS, FURTHER]) == [(7, 1, "pair", 1), (6, 6, "pair", 2), (5, 3, "pair", 3), (4, 7, "", None)]
    broken = trial(8, (*pairs(0, 2, 4), DROP), [7.0] * 4)
    assert levels([*TRIALS, broken]) == [(7, 1, "pair", 1), (6, 6, "pair", 2), (5, 3, "pair", 3)]
    of_one_space = [each for each in TRIALS if DROP not in each.proposal.choice]
    assert levels(of_one_space) == [], "there is no mixing"


def test_differences_are_of_windows_and_all_intervals_hold_together() -> None:
    other = trial(8, (Edit(0, 1, "drop"), *pairs(2, 4)), [0.4, 0.31, 0.5, 0.39])
    trials = [*TRIALS, other, FURTHER]
    curves = quality_curves(DEPTH, trials, ORIGINAL, PRICING, resamples=20)
    found = mixed_levels(curves, LEVELS)
    unseen = {one.program: one.measured for one in trials}
    for gains in (mixing_gains(found), mixing_gains(found, unseen)):
        by_cost = {gain.level.cost: gain for gain in gains}
        assert [by_cost[cost].verdict for cost in (7, 6, 5, 4)] == [
            "the same program",
            "not told apart",
            "better",
            "only together",
        ]
        for cost, together, alone in ((6, TRIALS[6], TRIALS[2]), (5, other, TRIALS[3])):
            differences = np.subtract(together.measured.divergences, alone.measured.divergences)
            # Two are compared: each interval is one of 1 - 0.05 / 2.
            low, high = stats.t.interval(0.975, 3, differences.mean(), stats.sem(differences))
            gain = by_cost[cost]
            assert (gain.difference, gain.low, gain.high) == pytest.approx((differences.mean(), low, high))
            assert gain.lower_by == pytest.approx(1 - together.measured.divergence / alone.measured.divergence)
    assert gains[0].held_out
    first, *rest = gains_in_words(gains)
    assert first == (
        "mixing spaces has less divergence than the best space alone at 2 of 4 levels of depth, most at depth 5, where "
        "it is 20% lower (held-out text; 95% for all intervals at once)"
    )
    assert [line.partition(":")[0] for line in rest] == ["at depth 5", "at depth 4", "not told apart at depth 6"]
    assert rest[1] == "at depth 4: 0.7 (trial 7); no space alone comes so far"
