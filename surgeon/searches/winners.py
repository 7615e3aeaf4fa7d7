"""Honest winners: the best trials are measured again on text that the search did not see.

The best of many trials is best in part by luck, on the text that it was chosen on. On held-out text its number is an
honest one, and it is compared with the runners-up window by window: which windows are hard is the same for both, so
that the difference is known far better than either number. With several runners-up the intervals hold together with
95% (Bonferroni: each is one of 1 - 0.05 / k). A program is called better only where the interval excludes 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from surgeon.findings.edit import Choice
from surgeon.findings.trials import DRAFT_TIME
from surgeon.language.program import Program
from surgeon.processes.files import finite
from surgeon.quality.summary import ACCEPTANCES, CONFIDENCE, Quality, interval
from surgeon.searches.front import QualityCurve, pareto_front
from surgeon.searches.mixture import Mixture, Trial
from surgeon.searches.priced import PricedQuestion
from surgeon.searches.quantities import DRAFT, Aspect
from surgeon.words import in_words, listed

Measured = Literal["divergence", "perplexity", "draft_time"]
Evaluate = Callable[[Sequence[Program]], Mapping[Program, Quality]]
RUNNERS_UP = 4
_UNITS = {
    "divergence": "nats per token",
    "perplexity": "nats of negative log-likelihood per token",
    DRAFT_TIME: "of the unedited model's time per token",
}


@dataclass(frozen=True)
class Finalist:
    """A trial and what is known of it on both texts.

    Attributes:
        unseen: on held-out text.
    """

    trial: Trial
    unseen: Quality

    def to_json(self) -> dict[str, Any]:
        qualities = {"seen": quality_json(self.trial.measured), "unseen": quality_json(self.unseen)}
        return {"trial": self.trial.number, "program": self.trial.proposal.key, **qualities}


@dataclass(frozen=True)
class RunnerUp(Finalist):
    """A finalist against the search's winner.

    Attributes:
        difference: winner's less runner-up's mean over held-out windows, below 0 where the winner is better; in nats.
        low, high: its interval; all runners-up's hold together with 95%. Infinite where it cannot be told.
    """

    difference: float
    low: float
    high: float

    @property
    def verdict(self) -> Literal["better", "not told apart", "worse"]:
        if self.high < 0:
            return "better"
        if self.low > 0:
            return "worse"
        return "not told apart"

    def to_json(self) -> dict[str, Any]:
        difference = {"difference": self.difference, "low": self.low, "high": self.high, "verdict": self.verdict}
        return {**finite(difference), **super().to_json()}


@dataclass(frozen=True)
class HeldOutComparison:
    """The search's winner and its runners-up on held-out text.

    Attributes:
        by: what they are compared by.
        searched: of least cost on the text of the search.
        original: the unedited model on held-out text.
    """

    by: Measured
    searched: Finalist
    runners_up: tuple[RunnerUp, ...]
    original: Quality

    @property
    def chosen(self) -> Finalist:
        """The winner: that of the search, unless runners-up are better on held-out text; then the best of those."""
        ahead = [one for one in self.runners_up if one.verdict == "worse"]
        return min(ahead, key=lambda one: quality_by(one.unseen, self.by), default=self.searched)

    @property
    def overturned(self) -> bool:
        return self.chosen is not self.searched

    @property
    def finalists(self) -> tuple[Finalist, ...]:
        return (self.searched, *self.runners_up)

    def lines(self) -> list[str]:
        """What was found, in sentences; the word better only where the interval excludes 0."""
        first = self.searched
        windows = len(self.searched.unseen.by_window("divergence"))
        seen, unseen = (quality_by(each, self.by) for each in (first.trial.measured, first.unseen))
        both = (
            f"trial {first.trial.number}: {in_words(self.by)} {seen:.4g} on the text of the search, "
            f"{unseen:.4g} on {first.unseen.tokens:,} held-out tokens ({windows} windows)"
        )
        found = [both, *self.verdicts(lambda one: (one.trial.measured, one.unseen))]
        if self.overturned:
            found.append(
                f"HELD-OUT TEXT OVERTURNS THE SEARCH: trial {self.chosen.trial.number} is the winner, not trial "
                f"{first.trial.number}, which was best on the text of the search only"
            )
        return found

    def verdicts(self, qualities: Callable[[RunnerUp], Iterable[Quality]]) -> Iterator[str]:
        """A sentence on each runner-up that the winner is told apart from, and one on all others.

        Args:
            qualities: whose numbers stand in a runner-up's sentence.
        """
        winner = f"trial {self.searched.trial.number} is"
        count = len(self.runners_up)
        if count == 1:
            share = f"{CONFIDENCE:.0%}"
        else:
            share = f"{CONFIDENCE:.0%} for all {count} intervals at once"
        for one in self.runners_up:
            if one.verdict != "not told apart":
                numbers = " and ".join(f"{quality_by(each, self.by):.4g}" for each in qualities(one))
                yield (
                    f"{winner} {one.verdict} than trial {one.trial.number} ({in_words(self.by)} {numbers}): difference "
                    f"{one.difference:+.3g} {_UNITS[self.by]} (interval {one.low:+.3g} to {one.high:+.3g}, {share})"
                )
        alike = [str(one.trial.number) for one in self.runners_up if one.verdict == "not told apart"]
        if alike:
            yield f"{winner} not told apart from trial{'s' * (len(alike) > 1)} {listed(alike)}"

    def to_json(self) -> dict[str, Any]:
        return {
            "by": self.by,
            "confidence_of_all_intervals": CONFIDENCE,
            "original": quality_json(self.original),
            "searched": self.searched.to_json(),
            "runners_up": [one.to_json() for one in self.runners_up],
            "winner": self.chosen.trial.number,
            "overturned": self.overturned,
            "sentences": self.lines(),
        }


@dataclass(frozen=True)
class HealedFinalists:
    """Finalists on held-out text before and after healing; the earlier winner comes first in `after`."""

    before: HeldOutComparison
    after: HeldOutComparison
    how: str

    def table(self) -> list[str]:
        rows = [f"{'trial':>5}  {'divergence':>10} {'healed':>8}  {'perplexity':>10} {'healed':>8}"]
        healed = {one.trial.number: one.unseen for one in self.after.finalists}
        for one in self.before.finalists:
            before = one.unseen
            after = healed[one.trial.number]
            rows.append(
                f"{one.trial.number:>5}  {before.divergence:>10.4g} {after.divergence:>8.4g}  "
                f"{before.perplexity:>10.4g} {after.perplexity:>8.4g}"
            )
        return rows

    def lines(self) -> list[str]:
        first = self.before.chosen.trial.number
        chosen = self.after.chosen.trial.number
        found = [f"{len(self.before.finalists)} finalists were {self.how}"]
        found += [
            f"healed, {said}" for said in self.after.verdicts(lambda one: (self.after.searched.unseen, one.unseen))
        ]
        if chosen != first:
            found.append(f"HEALING CHANGES THE CHOICE: trial {chosen} is the winner, not trial {first}")
        elif len(self.before.finalists) > 1:
            found.append(f"healing does not change the choice: trial {first} is the winner")
        return found

    def to_json(self) -> dict[str, Any]:
        healed = {one.trial.number: one.unseen for one in self.after.finalists}
        candidates = [
            {
                "trial": one.trial.number,
                "program": one.trial.proposal.key,
                "before": quality_json(one.unseen),
                "after": quality_json(healed[one.trial.number]),
            }
            for one in self.before.finalists
        ]
        return {
            "by": self.after.by,
            "candidates": candidates,
            "winner_before": self.before.chosen.trial.number,
            "winner": self.after.chosen.trial.number,
            "changed": self.after.chosen.trial != self.before.chosen.trial,
            "sentences": self.lines(),
        }


def remeasure(
    winner: Trial, runners_up: Sequence[Trial], dense: Program, evaluate: Evaluate, by: Measured = "divergence"
) -> HeldOutComparison:
    """Measure the winner and the runners-up, and the unedited model, on held-out text.

    Args:
        evaluate: measures programs on that text, all of its windows.
        by: what they are compared by: their divergences, or their negative log-likelihoods.
    """
    programs = {trial.number: trial.program for trial in (winner, *runners_up)}
    found = evaluate([dense, *programs.values()])
    first, *others = (Finalist(trial, found[programs[trial.number]]) for trial in (winner, *runners_up))
    return compare(first, others, found[dense], by)


def compare(
    first: Finalist, others: Sequence[Finalist], original: Quality, by: Measured = "divergence"
) -> HeldOutComparison:
    """Compare a winner with others, window by window of the same held-out text.

    Args:
        original: the unedited model on that text.
    """
    confidence = 1 - (1 - CONFIDENCE) / max(1, len(others))
    runners_up = []
    for other in others:
        difference = _windows(first.unseen, by) - _windows(other.unseen, by)
        low, high = interval(difference, confidence)
        runners_up.append(RunnerUp(other.trial, other.unseen, float(np.mean(difference)), low, high))
    return HeldOutComparison(by, first, tuple(runners_up), original)


def _windows(measured: Quality, by: Measured) -> NDArray[np.float64]:
    assert measured.whole, "finalists are measured on all of the held-out text"
    if by == "perplexity":
        return measured.by_window("nll")
    return measured.by_window(by)


def quality_by(measured: Quality, by: Measured) -> float:
    """Read the number that programs are compared by."""
    if by == DRAFT_TIME:
        return measured.more.get(by, math.nan)
    value: float = getattr(measured, by)
    return value


def quality_json(measured: Quality) -> dict[str, float | None]:
    """A quality's numbers as JSON values; what is not finite is None."""
    names = ("perplexity", "divergence", "divergence_low", "divergence_high", "tokens")
    accepted = (name for name in ACCEPTANCES if measured.knows(name))
    known = {name: getattr(measured, name) for name in (*names, *accepted)}
    if DRAFT_TIME in measured.more:
        known[DRAFT_TIME] = measured.more[DRAFT_TIME]
    found: dict[str, float | None] = finite(known)
    return found


def against_most_salient(
    mixture: Mixture, choice: Choice, measured: Mapping[Program, Quality], text: str
) -> str | None:
    """In a sentence, window by window of the same text; None where the choice has no experts to choose.

    Args:
        measured: the programs of both choices, on all of a text.
        text: what that is.
    """
    if not any(edit in mixture.most_salient for edit in choice):
        return None
    salient = mixture.with_most_salient(choice)
    if salient == choice:
        return "the most salient ones of their layers (REAP): no other choice that was tried is better"
    ours, theirs = (measured[mixture.program(one)] for one in (choice, salient))
    differences = ours.by_window("divergence") - theirs.by_window("divergence")
    low, high = interval(differences, CONFIDENCE)
    verdict = "better" if high < 0 else "worse" if low > 0 else "not told apart"
    return (
        f"divergence {ours.divergence:.4g}, {theirs.divergence:.4g} of the most salient ones (REAP), on {text}: "
        f"difference {differences.mean():+.2g} ({CONFIDENCE:.0%} interval {low:+.2g} to {high:+.2g}), {verdict}"
    )


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
        if question.settings.limits:
            words = f"The best within {question.budget}"
        else:
            words = "The best"
        return _as_dear(question, ranked(question, within)), words
    if len(question.objectives) > 1:
        front = pareto_front(within, question.objectives, question.pricing)
        costs = np.array([point.costs for point in front])
        width = np.ptp(costs, axis=0)  # each objective is scaled to its range on the front
        distance = np.linalg.norm((costs - costs.min(axis=0)) / np.where(width > 0, width, 1), axis=1)
        words = "The point of the front nearest to the best of every objective"
        return [front[int(distance.argmin())].trial], words
    return _at_the_knee(question, within, curves)


def _as_dear(question: PricedQuestion, best: Sequence[Trial]) -> list[Trial]:
    """The first trial, and those that cost the same of what is looked along."""
    if question.has_one_best and not question.is_for_the_cheapest:
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
    budget = question.budget
    limits = question.settings.limits
    whole = [trial for trial in trials if trial.measured.whole]

    def distance(trial: Trial) -> float:
        return sum(question.lacks_of_quality(trial.measured))

    if not whole:
        return f"no trial was measured to its end within {budget}; run more of them"
    best = min(whole, key=lambda trial: (distance(trial), trial.number))
    had = ", ".join(
        limit.aspect.show(limit.aspect.measured(best.measured)) for limit in limits if not limit.aspect.is_priced
    )
    if not math.isfinite(distance(best)):
        had = "none that predicts anything"
    if question.settings.is_between_limits:
        priced = (limit.aspect for limit in limits if limit.aspect.is_priced)
        had += f" and {', '.join(aspect.show(question.price(aspect, best)) for aspect in priced)}"
    return (
        f"of {len(trials)} trials none is within {budget}; the nearest, trial {best.number}, has {had}; allow more, or "
        "run more trials"
    )
