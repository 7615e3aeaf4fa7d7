"""Winners on held-out text: against scipy's paired test, and that nothing is called better by chance."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

import surgeon
from surgeon.language.operations.applied import Edit
from surgeon.language.program import Program
from surgeon.quality.summary import Quality
from surgeon.searches.mixture import Mixture, Trial
from surgeon.searches.results import QualityCurve
from surgeon.searches.spaces import parse_spaces
from surgeon.searches.winners import (
    Finalist,
    HeldOutComparison,
    Measured,
    against_most_salient,
    choose,
    compare,
    rank_trials,
)
from surgeon.testing.spaces import small_model
from tests.searches.made_up_search import search, try_programs
from tests.tiny_models import save_checkpoint

DENSE = Program.dense(4)
TEXTS = ["A0 F0 [A1 A2] [F1 F2] A3 F3", "[A0 A1] [F0 F1] A2 F2 A3 F3", "A0 F0 A1 F1 [A2 A3] [F2 F3]"]


def measured(divergences: Sequence[float], nll: Sequence[float] = (), whole: bool = True) -> Quality:
    mean = float(np.mean(divergences))
    likelihoods = tuple(nll) or tuple(2.0 for _ in divergences)
    perplexity = math.exp(float(np.mean(likelihoods)))
    windows = {"nll": likelihoods, "divergence": tuple(map(float, divergences))}
    return Quality(perplexity, divergence=mean, tokens=100, windows=windows, whole=whole)


def trial(number: int, mean: float, text: str | None = None, whole: bool = True) -> Trial:
    key = TEXTS[number] if text is None else text
    return Trial(key, "window", (), number=number, measured=measured([mean, mean], whole=whole))


def on_held_out(*by_trial: Sequence[float]) -> Mapping[Program, Quality]:
    known = {
        Program.parse(text): measured(values) for text, values in zip(TEXTS, by_trial, strict=False)
    }
    return known | {DENSE: measured([0.0] * len(by_trial[0]))}


def remeasure(
    winner: Trial,
    runners_up: Sequence[Trial],
    known: Mapping[Program, Quality],
    by: Measured = "divergence",
) -> HeldOutComparison:
    first, *others = (Finalist(one, known[one.program]) for one in (winner, *runners_up))
    return compare(first, others, known[DENSE], by)


def compared(*by_trial: Sequence[float]) -> HeldOutComparison:
    trials = [trial(number, 0.1 + number / 100) for number in range(len(by_trial))]
    return remeasure(trials[0], trials[1:], on_held_out(*by_trial))


def test_the_difference_is_that_of_pairs() -> None:
    """Windows differ by far more than programs do, and the interval is that of scipy's paired test."""
    draw = np.random.default_rng(0)
    hard = draw.uniform(0.05, 3.0, 16)
    first, second = hard + draw.normal(0, 0.01, 16), hard + 0.02 + draw.normal(0, 0.01, 16)
    (one,) = compared(list(first), list(second)).runners_up
    known = stats.ttest_rel(first, second).confidence_interval(0.95)
    assert (one.low, one.high) == pytest.approx((known.low, known.high))
    assert one.difference == pytest.approx(np.mean(first) - np.mean(second))
    assert one.verdict == "better"
    assert stats.ttest_ind(first, second).pvalue > 0.5


def test_several_runners_up_widen_each_interval() -> None:
    draw = np.random.default_rng(1)
    values = draw.normal(1.0, 0.1, (3, 12))
    found = compared(*map(list, values))
    for other, one in zip(values[1:], found.runners_up, strict=True):
        known = stats.ttest_rel(values[0], other).confidence_interval(1 - 0.05 / 2)
        assert (one.low, one.high) == pytest.approx((known.low, known.high))


def test_better_is_rarely_said_of_equals() -> None:
    """Of programs that differ by chance only, any of four runners-up is told apart in about 1 of 20 searches."""
    draw = np.random.default_rng(2)
    texts = [*TEXTS, "A0 F0 A1 F1 A2 F2", "A1 F1 A2 F2 A3 F3"]
    trials = [trial(number, 0.1, text) for number, text in enumerate(texts)]
    wrong = 0
    for _ in range(200):
        known = {Program.parse(text): measured(list(draw.normal(1, 0.1, 8))) for text in texts}
        known[DENSE] = measured([0.0] * 8)
        found = remeasure(trials[0], trials[1:], known)
        wrong += any(one.verdict != "not told apart" for one in found.runners_up)
    assert 0 < wrong < 0.05 * 200 + 2 * math.sqrt(0.05 * 0.95 * 200)


def test_the_searched_winner_stays_unless_another_is_better_for_sure() -> None:
    apart = compared([0.20, 0.21, 0.22, 0.20], [0.10, 0.11, 0.12, 0.101], [0.05, 0.30, 0.04, 0.02])
    assert [one.verdict for one in apart.runners_up] == ["worse", "not told apart"]
    assert apart.is_overturned
    assert apart.choice.trial.number == 1  # not trial 2, whose mean is lower but cannot be told
    assert apart.lines()[-1].startswith(
        "HELD-OUT TEXT OVERTURNS THE SEARCH: trial 1 is the winner, not trial 0"
    )
    close = compared([0.20, 0.21, 0.22, 0.20], [0.19, 0.22, 0.20, 0.21])
    assert not close.is_overturned
    assert close.choice is close.searched


def test_sentences_say_better_only_where_it_is() -> None:
    found = compared([0.1, 0.11, 0.12, 0.1], [0.2, 0.21, 0.22, 0.2001], [0.1, 0.12, 0.11, 0.1])
    lines = found.lines()
    assert (
        lines[0]
        == "trial 0: divergence 0.1 on the text of the search, 0.1075 on 100 held-out tokens (4 windows)"
    )
    assert lines[1].startswith(
        "trial 0 is better than trial 1 (divergence 0.11 and 0.2075): difference -0.1 nats"
    )
    assert "95% for all 2 intervals at once" in lines[1]
    assert "better" not in lines[2]
    assert lines[2] == "trial 0 is not told apart from trial 2"


def test_perplexity_compares_likelihoods() -> None:
    first, second = [2.0, 2.2, 1.9], [2.1, 2.31, 2.0]
    known = {
        Program.parse(TEXTS[0]): measured([0.5] * 3, first),
        Program.parse(TEXTS[1]): measured([0.1] * 3, second),
        DENSE: measured([0.0] * 3),
    }
    found = remeasure(trial(0, 0.1), [trial(1, 0.2)], known, by="perplexity")
    (one,) = found.runners_up
    assert one.difference == pytest.approx(-0.31 / 3)
    assert one.verdict == "better"
    assert f"perplexity {math.exp(2):.4g} and {math.exp(np.mean(second)):.4g}" in found.lines()[1]


def test_what_predicts_nothing_is_not_told_apart() -> None:
    (one,) = compared([0.1, 0.1, 0.2], [0.2, math.inf, 0.3]).runners_up
    assert one.verdict == "not told apart"
    alike = compared([0.1, 0.1, 0.2], [0.2, math.inf, 0.3], [0.2, math.inf, 0.3])
    assert alike.lines()[1:] == ["trial 0 is not told apart from trials 1 and 2"]


def test_a_record_is_plain_json() -> None:
    record = compared([0.1, 0.2, 0.1], [0.2, math.inf, 0.3]).to_json()
    read = json.loads(json.dumps(record, allow_nan=False))
    assert read["winner"] == 0
    assert read["overturned"] is False
    assert read["runners_up"][0]["low"] is None
    assert read["runners_up"][0]["seen"]["divergence"] == 0.11


MIXTURE = Mixture(parse_spaces("experts:2,drop"), small_model("qwen3_moe", layers=3)).by_saliency(
    {1: [3, 1, 0, 2]}
)
SALIENT = "A0 F0 A1 F1!e1,e3 A2"


def of_windows(*divergences: float) -> Quality:
    return Quality(
        1.0, divergence=sum(divergences) / len(divergences), windows={"divergence": divergences}
    )


def said(texts: list[str], **programs: Quality) -> str | None:
    choice = tuple(sorted(map(Edit.parse, texts)))
    found = {Program.parse(name): one for name, one in programs.items()}
    return against_most_salient(MIXTURE, choice, found, "held-out text")


def test_window_by_window() -> None:
    texts = ["experts 1:2 0,3", "drop 2:3 mlp"]
    ours = {"A0 F0 A1 F1!e0,e3 A2": of_windows(1.0, 2.0, 3.0)}
    worse, alike = of_windows(1.2, 2.21, 3.19), of_windows(0.5, 2.5, 3.01)
    assert said(texts, **ours, **{SALIENT: worse}) == (
        "divergence 2, 2.2 of the most salient ones (REAP), on held-out text: difference -0.2 (95% interval -0.22 to "
        "-0.18), better"
    )
    assert str(said(texts, **ours, **{SALIENT: alike})).endswith("not told apart")
    assert said(["experts 1:2 1,3"]) == (
        "the most salient ones of their layers (REAP): no other choice that was tried is better"
    )
    assert said(["drop 2:3 mlp"]) is None


@pytest.mark.thorough
def test_what_a_search_says(tmp_path: Path, tiny_text: Path) -> None:
    folder = save_checkpoint(tmp_path / "model", "qwen3_moe", 3)
    asked: dict[str, Any] = {
        "tokens": 128,
        "window": 32,
        "space": "experts:2",
        "budget": "experts=2",
        "trials": 9,
    }
    found = surgeon.search(folder, tiny_text, tmp_path / "out", **asked)
    kept = [len(one.experts or ()) for one in found.program.sublayers() if one.kind == "F"]
    assert kept == [2, 2, 0], "the last layer of this model is dense"
    assert "REAP" in found.record["experts"]
    mixture = found.question.mixture
    reap = mixture.program(mixture.with_most_salient(found.winner.trial.choice))
    assert str(reap) in set(found.trials["program"]), "it is tried"


def test_quality_that_nothing_has_says_the_nearest() -> None:
    searching, _ = search("pair", "divergence<=0.001")
    trials = [*try_programs(searching, 10)]
    least = min(trial.measured.divergence for trial in trials)
    with pytest.raises(
        ValueError, match=rf"of 10 trials none is within .*; the nearest, .* divergence {least:.3g}"
    ):
        choose(searching.question, trials, None)


def test_without_a_knee_perplexity_is_kept_or_as_little_as_can_be_is_changed() -> None:
    searching, evaluator = search("pair", None)
    question, edits = searching.question, searching.question.mixture.edits

    def chosen(*perplexities: float) -> tuple[list[int], str]:
        trials = []
        for row, times in enumerate(perplexities):
            key = str(question.mixture.program(edits[: 2 * row + 1 : 2]))
            found = replace(
                evaluator.measured(0.1 * (row + 1)), perplexity=times * question.original.perplexity
            )
            trials.append(Trial(key, "window", (), number=row, measured=found))
        curve = QualityCurve(question.along[0], "pair", (), None, math.nan, math.nan, 0.0)
        best, why = choose(question, trials, curve.knee)
        return [one.number for one in best], why

    assert chosen(1.01, 1.05, 1.2) == (
        [1], "The best at the least depth that keeps perplexity within 10% (there is no knee)"
    )  # fmt: skip
    assert chosen(1.3, 1.5) == (
        [0],
        "The least changed (there is no knee, and none keeps perplexity within 10%)",
    )


def test_two_objectives_give_the_middle_of_their_front() -> None:
    searching, _ = search("pair", None, "divergence,depth")
    trials = [*try_programs(searching, 30)]
    (winner,), why = choose(searching.question, trials, None)
    assert "nearest to the best of every objective" in why
    costs = partial(searching.question.pricing.costs, searching.question.settings.objectives)
    values = [costs(trial) for trial in trials]
    first = costs(winner)
    assert not any(
        all(a <= b for a, b in zip(one, first, strict=True)) and one != first for one in values
    )


def test_a_ranking_has_whole_trials_of_different_programs_the_best_first() -> None:
    searching, evaluator = search("pair", "depth=8")

    def trial(number: int, divergence: float, key: str, whole: bool = True) -> Trial:
        return Trial(
            key,
            "window",
            (),
            number=number,
            measured=replace(evaluator.measured(divergence), whole=whole),
        )

    first, second, *_, last = searching.question.mixture.edits
    eight, other = (str(searching.question.mixture.program((edit, last))) for edit in (first, second))
    trials = [
        trial(0, 0.3, eight),
        trial(1, 0.2, eight),
        trial(2, 0.1, other, whole=False),
        trial(3, 0.4, other),
        trial(4, math.inf, other),
    ]
    assert [each.number for each in rank_trials(searching.question, trials)] == [1, 3]
    with pytest.raises(ValueError, match="of 1 trial within the budget none has a finite divergence"):
        rank_trials(searching.question, trials[4:])


def test_of_those_that_cost_the_same_the_closest_comes_first() -> None:
    """As drafts do that do not pay, whose time of a token is the model's own."""
    searching, evaluator = search("pair", "depth=8", "perplexity")
    first, second, third, *_, last = searching.question.mixture.edits
    keys = [str(searching.question.mixture.program((edit, last))) for edit in (first, second, third)]
    trials = [
        Trial(
            key,
            "window",
            (),
            number=number,
            measured=replace(evaluator.measured(divergence), perplexity=20.0),
        )
        for number, (key, divergence) in enumerate(zip(keys, (0.3, 0.1, 0.2), strict=True))
    ]
    assert [each.number for each in rank_trials(searching.question, trials)] == [1, 2, 0]
