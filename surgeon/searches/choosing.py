"""Which trial a search ends with: under a budget the best, along a cost the one at the knee, of a front the middle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import get_args

import numpy as np

from surgeon.findings.trials import DRAFT_TIME
from surgeon.searches.front import QualityCurve, pareto_front
from surgeon.searches.goals import PricedQuestion
from surgeon.searches.quantities import DRAFT, Aspect
from surgeon.searches.trial import Trial
from surgeon.searches.winners import Measured

KEPT = 1.10  # of the unedited model's perplexity, where no knee says what is enough


def choose(
    question: PricedQuestion, trials: Sequence[Trial], curves: Sequence[QualityCurve]
) -> tuple[list[Trial], str]:
    """The winner and its runners-up, the best first, with what it is the best of.

    Runners-up cost the same where a cost is looked along: of a dearer program it is no news that it is closer.

    Args:
        curves: of quality against what is looked along.

    Raises:
        ValueError: if no trial is within the budget; it says the nearest.
    """
    within = [trial for trial in trials if trial.measured.whole and question.is_met(trial)]
    if not within:
        raise ValueError(_nearest(question, trials))
    if question.has_one_best:
        if question.budget.limits:
            words = f"The best within {question.budget}"
        else:
            words = "The best"
        return _as_dear(question, ranked(question, within)), words
    if len(question.objectives) > 1:
        front = pareto_front(within, question.objectives, question.budget.pricing)
        costs = np.array([point.costs for point in front])
        width = np.ptp(costs, axis=0)  # each objective is scaled to its range on the front
        distance = np.linalg.norm((costs - costs.min(axis=0)) / np.where(width > 0, width, 1), axis=1)
        words = "The point of the front nearest to the best of every objective"
        return [front[int(distance.argmin())].trial], words
    return _at_the_knee(question, within, curves)


def _as_dear(question: PricedQuestion, best: Sequence[Trial]) -> list[Trial]:
    """The first trial, and those that cost the same of what is looked along."""
    if not question.along or question.settings.is_between_limits or question.settings.draft is not None:
        return [*best]
    prices = [question.price(question.along[0], trial) for trial in best]
    return [trial for trial, price in zip(best, prices, strict=True) if math.isclose(price, prices[0])]


def compared_by(objectives: Sequence[Aspect]) -> Measured:
    """What a winner and its runners-up are compared by on held-out text: of divergence and perplexity the first one.

    Drafts are by the time of a token.
    """
    if any(objective.name == DRAFT for objective in objectives):
        return DRAFT_TIME
    names = [str(objective) for objective in objectives if str(objective) in get_args(Measured)]
    if names[:1] == ["perplexity"]:
        return "perplexity"
    return "divergence"


def ranked(question: PricedQuestion, trials: Sequence[Trial]) -> list[Trial]:
    """Trials by what a winner is chosen by, the best first, one of each program; without those of no finite cost.

    Of those that cost the same, as drafts do that do not pay, the closest to the unedited model come first.

    Raises:
        ValueError: if there is none.
    """
    finite = [trial for trial in trials if math.isfinite(question.cost(trial))]
    if not finite:
        names = ", ".join(map(str, question.objectives))
        raise ValueError(
            f"of {len(trials)} trials within the budget none has a finite {names}; run more of them, or "
            "look at another objective"
        )
    best: dict[str, Trial] = {}
    for trial in sorted(finite, key=lambda trial: (question.cost(trial), trial.measured.divergence, trial.number)):
        best.setdefault(trial.proposal.key, trial)
    return [*best.values()]


def _at_the_knee(
    question: PricedQuestion, trials: Sequence[Trial], curves: Sequence[QualityCurve]
) -> tuple[list[Trial], str]:
    """The best by quality among those that cost as little as the knee of all that was found, along the first cost.

    Where there is no knee, the cheapest that keep perplexity; if none does, the best by quality of all.
    """
    along = question.along[0]
    knee = [curve.knee.cost for curve in curves if curve.along == along][-1]
    prices = {trial.number: question.price(along, trial) for trial in trials}
    most = KEPT * question.original.perplexity
    if knee is not None:
        words = f"The best at the knee, {along.show(knee)}"
    elif kept := [prices[trial.number] for trial in trials if trial.measured.perplexity <= most]:
        knee = min(kept)
        words = f"The best at the least {along} that keeps perplexity within 10% (there is no knee)"
    else:
        knee = math.inf
        words = "The least changed (there is no knee, and none keeps perplexity within 10%)"
    cheap = [trial for trial in trials if prices[trial.number] <= knee + 1e-9 * abs(knee)]
    return _as_dear(question, ranked(question, cheap)), words


def _nearest(question: PricedQuestion, trials: Sequence[Trial]) -> str:
    """What came nearest to limits of quality."""
    budget = question.budget
    whole = [trial for trial in trials if trial.measured.whole]

    def distance(trial: Trial) -> float:
        return sum(budget.quality_shortfalls(trial.measured, question.original))

    if not whole:
        return f"no trial was measured to its end within {budget}; run more of them"
    best = min(whole, key=lambda trial: (distance(trial), trial.number))
    had = ", ".join(limit.aspect.show(limit.aspect.measured(best.measured)) for limit in budget.of_quality)
    if not math.isfinite(distance(best)):
        had = "none that predicts anything"
    if question.settings.is_between_limits:
        had += (
            f" and {', '.join(limit.aspect.show(question.price(limit.aspect, best)) for limit in budget.of_programs)}"
        )
    return (
        f"of {len(trials)} trials none is within {budget}; the nearest, trial {best.number}, has {had}; allow more, or "
        "run more trials"
    )
