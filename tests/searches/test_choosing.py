"""Which trial a search ends with, and in which order the others follow."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from surgeon.searches.choosing import choose, ranked
from surgeon.searches.front import Knee, QualityCurve
from surgeon.searches.trial import Proposal, Trial
from tests.searches.made_up_search import search, try_programs


def test_quality_that_nothing_has_says_the_nearest() -> None:
    searching, _ = search("pair", "divergence<=0.001")
    trials = [*try_programs(searching, 10)]
    least = min(trial.measured.divergence for trial in trials)
    with pytest.raises(ValueError, match=rf"of 10 trials none is within .*; the nearest, .* divergence {least:.3g}"):
        choose(searching.question, trials, [])


def test_without_a_knee_perplexity_is_kept_or_as_little_as_can_be_is_changed() -> None:
    searching, evaluator = search("pair", None)
    question, edits = searching.question, searching.question.mixture.edits

    def chosen(*perplexities: float) -> tuple[list[int], str]:
        trials = [
            Trial(row, Proposal(str(question.mixture.program(edits[: 2 * row + 1 : 2])), "window", ()),
                  replace(evaluator.measured(0.1 * (row + 1)), perplexity=times * question.original.perplexity))
            for row, times in enumerate(perplexities)
        ]  # fmt: skip
        curve = QualityCurve(question.along[0], "pair", (), Knee(None, math.nan, math.nan, 0.0))
        best, why = choose(question, trials, [curve])
        return [one.number for one in best], why

    assert chosen(1.01, 1.05, 1.2) == (
        [1], "The best at the least depth that keeps perplexity within 10% (there is no knee)"
    )  # fmt: skip
    assert chosen(1.3, 1.5) == ([0], "The least changed (there is no knee, and none keeps perplexity within 10%)")


def test_two_objectives_give_the_middle_of_their_front() -> None:
    searching, _ = search("pair", None, "divergence,depth")
    trials = [*try_programs(searching, 30)]
    (winner,), why = choose(searching.question, trials, [])
    assert "nearest to the best of every objective" in why
    values = [searching.question.costs(trial) for trial in trials]
    first = searching.question.costs(winner)
    assert not any(all(a <= b for a, b in zip(one, first, strict=True)) and one != first for one in values)


def test_a_ranking_has_whole_trials_of_different_programs_the_best_first() -> None:
    searching, evaluator = search("pair", "depth=8")

    def trial(number: int, divergence: float, key: str, whole: bool = True) -> Trial:
        return Trial(number, Proposal(key, "window", ()), replace(evaluator.measured(divergence), whole=whole))

    first, second, *_, last = searching.question.mixture.edits
    eight, other = (str(searching.question.mixture.program((edit, last))) for edit in (first, second))
    trials = [
        trial(0, 0.3, eight),
        trial(1, 0.2, eight),
        trial(2, 0.1, other, whole=False),
        trial(3, 0.4, other),
        trial(4, math.inf, other),
    ]
    assert [each.number for each in ranked(searching.question, trials)] == [1, 3]
    with pytest.raises(ValueError, match="of 1 trials within the budget none has a finite divergence"):
        ranked(searching.question, trials[4:])


def test_of_those_that_cost_the_same_the_closest_comes_first() -> None:
    """As drafts do that do not pay, whose time of a token is the model's own."""
    searching, evaluator = search("pair", "depth=8", "perplexity")
    first, second, third, *_, last = searching.question.mixture.edits
    keys = [str(searching.question.mixture.program((edit, last))) for edit in (first, second, third)]
    trials = [
        Trial(number, Proposal(key, "window", ()), replace(evaluator.measured(divergence), perplexity=20.0, nll=()))
        for number, (key, divergence) in enumerate(zip(keys, (0.3, 0.1, 0.2), strict=True))
    ]
    assert [each.number for each in ranked(searching.question, trials)] == [1, 2, 0]
