"""Winners of a search, measured again on held-out text, and on this machine.

The best of many trials is best in part by luck, on the text that it was chosen on. On held-out text it is compared with
the runners-up window by window: hard windows are hard for both, so that the difference is known far better than either
number. With several runners-up the intervals hold together with 95% (Bonferroni: each is one of 1 - 0.05 / k). A
program is called better only where the interval excludes 0.

Time on this machine, `@here`, is predicted before the search and measured for the few best. The machine is calibrated
once at the model's shapes, as by `surgeon calibrate`, and programs are priced by that
hardware file. At the end the best programs are measured in turns with the unedited model, as by `surgeon bench`.
Nothing else should run meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal, get_args

import numpy as np

from surgeon.benchmarks.measure import MeasuredDrafts, Needs, RankBench, measure_drafts
from surgeon.cost.deployment import Workload
from surgeon.findings.trials import DRAFT_TIME
from surgeon.language.operations.applied import Choice
from surgeon.language.program import Program
from surgeon.opened import Model
from surgeon.processes.files import finite
from surgeon.progress import progress
from surgeon.quality.data import Windows
from surgeon.quality.summary import ACCEPTANCES, CONFIDENCE, Quality, interval
from surgeon.runtime.batching.request import Sampling
from surgeon.runtime.worker.rank import RankOptions, choose_device
from surgeon.runtime.worker.ranks import Ranks
from surgeon.searches.drafting import FoundDraft
from surgeon.searches.mixture import Mixture, Trial
from surgeon.searches.pricing import pareto_front
from surgeon.searches.quantities import DRAFT, HERE, Aspect, Limit, select_priced, show_seconds
from surgeon.searches.question import PricedQuestion, Question
from surgeon.searches.workers import say_aside
from surgeon.words import in_words, join_words, plural

Measured = Literal["divergence", "perplexity", "draft_time"]
RUNNERS_UP = 4
_UNITS = {
    "divergence": "nats per token",
    "perplexity": "nats of negative log-likelihood per token",
    DRAFT_TIME: "of the unedited model's time per token",
}


@dataclass(frozen=True)
class Finalist:
    """A trial on both texts, and of a runner-up, against the search's winner.

    Attributes:
        unseen: on held-out text.
        difference: winner's less runner-up's mean over held-out windows, below 0 where the winner is better; in nats.
        low, high: its interval; all runners-up's hold together with 95%. Infinite where it cannot be told.
    """

    trial: Trial
    unseen: Quality
    difference: float | None = None
    low: float = -math.inf
    high: float = math.inf

    @property
    def verdict(self) -> Literal["better", "not told apart", "worse"]:
        if self.high < 0:
            return "better"
        if self.low > 0:
            return "worse"
        return "not told apart"

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.difference is not None:
            names = ("difference", "low", "high", "verdict")
            found = finite({name: getattr(self, name) for name in names})
        qualities = {"seen": quality_json(self.trial.measured), "unseen": quality_json(self.unseen)}
        return found | {"trial": self.trial.number, "program": self.trial.key} | qualities


@dataclass(frozen=True)
class HeldOutComparison:
    """The search's winner and its runners-up on held-out text.

    Attributes:
        by: the number that they are compared by.
        searched: of least cost on the text of the search.
        original: the unedited model on held-out text.
    """

    by: Measured
    searched: Finalist
    runners_up: tuple[Finalist, ...]
    original: Quality

    @property
    def choice(self) -> Finalist:
        """The search's winner, unless runners-up are better on held-out text; then the best of those."""
        ahead = [one for one in self.runners_up if one.verdict == "worse"]
        return min(ahead, key=lambda one: quality_by(one.unseen, self.by), default=self.searched)

    @property
    def is_overturned(self) -> bool:
        return self.choice is not self.searched

    @property
    def finalists(self) -> tuple[Finalist, ...]:
        return (self.searched, *self.runners_up)

    def lines(self) -> list[str]:
        """Describe it in sentences; the word better only where the interval excludes 0."""
        first = self.searched
        windows = len(self.searched.unseen.by_window("divergence"))
        seen, unseen = (quality_by(each, self.by) for each in (first.trial.measured, first.unseen))
        both = (
            f"trial {first.trial.number}: {in_words(self.by)} {seen:.4g} on the text of the search, "
            f"{unseen:.4g} on {first.unseen.tokens:,} held-out tokens ({plural(windows, 'window')})"
        )
        found = [both, *self.verdicts(lambda one: (one.trial.measured, one.unseen))]
        if self.is_overturned:
            found.append(
                f"HELD-OUT TEXT OVERTURNS THE SEARCH: trial {self.choice.trial.number} is the winner, not trial "
                f"{first.trial.number}, which was best on the text of the search only"
            )
        return found

    def verdicts(self, qualities: Callable[[Finalist], Iterable[Quality]]) -> Iterator[str]:
        """Yield a sentence on each runner-up that the winner is told apart from, and one on all others."""
        winner = f"trial {self.searched.trial.number} is"
        count = len(self.runners_up)
        share = f"{CONFIDENCE:.0%}"
        if count > 1:
            share += f" for all {count} intervals at once"
        for one in self.runners_up:
            if one.verdict != "not told apart":
                numbers = " and ".join(f"{quality_by(each, self.by):.4g}" for each in qualities(one))
                yield (
                    f"{winner} {one.verdict} than trial {one.trial.number} ({in_words(self.by)} {numbers}): difference "
                    f"{one.difference:+.3g} {_UNITS[self.by]} (interval {one.low:+.3g} to {one.high:+.3g}, {share})"
                )
        alike = [str(one.trial.number) for one in self.runners_up if one.verdict == "not told apart"]
        if alike:
            yield f"{winner} not told apart from trial{'s' * (len(alike) > 1)} {join_words(alike)}"

    def to_json(self) -> dict[str, Any]:
        return {
            "by": self.by,
            "confidence_of_all_intervals": CONFIDENCE,
            "original": quality_json(self.original),
            "searched": self.searched.to_json(),
            "runners_up": [one.to_json() for one in self.runners_up],
            "winner": self.choice.trial.number,
            "overturned": self.is_overturned,
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
        first = self.before.choice.trial.number
        chosen = self.after.choice.trial.number
        finalists = len(self.before.finalists)
        found = [f"{plural(finalists, 'finalist')} {'was' if finalists == 1 else 'were'} {self.how}"]
        found += [
            f"healed, {said}"
            for said in self.after.verdicts(lambda one: (self.after.searched.unseen, one.unseen))
        ]
        if chosen != first:
            found.append(f"HEALING CHANGES THE CHOICE: trial {chosen} is the winner, not trial {first}")
        elif finalists > 1:
            found.append(f"healing does not change the choice: trial {first} is the winner")
        return found

    def to_json(self) -> dict[str, Any]:
        healed = {one.trial.number: one.unseen for one in self.after.finalists}
        candidates = [
            {
                "trial": one.trial.number,
                "program": one.trial.key,
                "before": quality_json(one.unseen),
                "after": quality_json(healed[one.trial.number]),
            }
            for one in self.before.finalists
        ]
        return {
            "by": self.after.by,
            "candidates": candidates,
            "winner_before": self.before.choice.trial.number,
            "winner": self.after.choice.trial.number,
            "changed": self.after.choice.trial != self.before.choice.trial,
            "sentences": self.lines(),
        }


@dataclass(frozen=True)
class Winner:
    """The trial that a search ends with.

    Attributes:
        why: a few words on how it was chosen.
        comparison: with its runners-up on held-out text; None if none was held out.
        text: the record of the held-out text (`Windows.record`).
        healing: of both; None if none was healed.
        draft: its value as a draft, where that was asked for.
    """

    trial: Trial
    why: str
    comparison: HeldOutComparison | None = None
    text: Mapping[str, Any] = field(default_factory=dict)
    healing: HealedFinalists | None = None
    draft: FoundDraft | None = None

    def missed_unseen(self, of_quality: Sequence[Limit]) -> list[str]:
        """Name limits that the winner keeps on the text of the search, but not on held-out text."""
        stages = {
            "": self.comparison,
            " once it is healed": self.healing.after if self.healing else None,
        }
        missed = []
        for when, comparison in stages.items():
            if comparison is not None:
                unseen = next(
                    one.unseen for one in comparison.finalists if one.trial.number == self.trial.number
                )
                missed += [
                    f"{limit} is not kept on held-out text{when}: {limit.aspect.show(limit.aspect.read_cost(unseen))}"
                    for limit in of_quality
                    if limit.lack(unseen, comparison.original)
                ]
        return missed


def compare(
    first: Finalist, others: Sequence[Finalist], original: Quality, by: Measured = "divergence"
) -> HeldOutComparison:
    """Compare a winner with others, window by window of the same held-out text."""
    confidence = 1 - (1 - CONFIDENCE) / max(1, len(others))
    name = "nll" if by == "perplexity" else by
    runners_up = []
    for other in others:
        assert other.unseen.whole, "finalists are measured on all of the held-out text"
        difference = first.unseen.by_window(name) - other.unseen.by_window(name)
        low, high = interval(difference, confidence)
        runners_up.append(replace(other, difference=float(np.mean(difference)), low=low, high=high))
    return HeldOutComparison(by, first, tuple(runners_up), original)


def quality_by(measured: Quality, by: Measured) -> float:
    """Read the number that programs are compared by."""
    if by == DRAFT_TIME:
        return measured.more.get(by, math.nan)
    value: float = getattr(measured, by)
    return value


def quality_json(measured: Quality) -> dict[str, float | None]:
    """Write a quality's numbers as JSON values; None for what is not finite."""
    names = ("perplexity", "divergence", "divergence_low", "divergence_high", "tokens")
    accepted = (name for name in ACCEPTANCES if measured.knows(name))
    values = {name: getattr(measured, name) for name in (*names, *accepted)}
    if DRAFT_TIME in measured.more:
        values[DRAFT_TIME] = measured.more[DRAFT_TIME]
    found: dict[str, float | None] = finite(values)
    return found


def against_most_salient(
    mixture: Mixture, choice: Choice, measured: Mapping[Program, Quality], text: str
) -> str | None:
    """Compare a choice of experts with the most salient ones in a sentence; None where it has none to choose."""
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
    question: PricedQuestion, trials: Sequence[Trial], knee: float | None
) -> tuple[list[Trial], str]:
    """Choose the winner and its runners-up, the best first, with a description of the choice.

    Runners-up cost the same where a cost has levels: it is no news that a dearer program is closer.

    Args:
        knee: of the first cost along which levels are searched.

    Raises:
        ValueError: if no trial is within the budget; it says the nearest.
    """
    within = [trial for trial in trials if trial.measured.whole and question.is_met(trial)]
    if not within:
        raise ValueError(_nearest(question, trials))
    if question.has_one_best:
        if question.settings.limits:
            words = f"The best within {','.join(map(str, question.settings.limits))}"
        else:
            words = "The best"
        if not question.is_for_the_cheapest:
            return rank_trials(question, within), words
    elif len(question.settings.objectives) > 1:
        front = pareto_front(within, question.settings.objectives, question.pricing)
        costs = np.array(
            [question.pricing.costs(question.settings.objectives, trial) for trial in front]
        )
        width = np.ptp(costs, axis=0)  # each objective is scaled to its range on the front
        distance = np.linalg.norm((costs - costs.min(axis=0)) / np.where(width > 0, width, 1), axis=1)
        words = "The point of the front nearest to the best of every objective"
        return [front[int(distance.argmin())]], words
    else:
        # The limit is the knee of the first cost; without one, the cheapest trial that keeps perplexity.
        along = question.along[0]
        costs_of = {one.number: question.pricing.price(along, one.program) for one in within}
        most = KEPT * question.original.perplexity
        if knee is not None:
            words = f"The best at the knee, {along.show(knee)}"
        elif kept := [costs_of[one.number] for one in within if one.measured.perplexity <= most]:
            knee = min(kept)
            words = f"The best at the least {along} that keeps perplexity within 10% (there is no knee)"
        else:
            knee = math.inf
            words = "The least changed (there is no knee, and none keeps perplexity within 10%)"
        within = [one for one in within if costs_of[one.number] <= knee + 1e-9 * abs(knee)]
    best = rank_trials(question, within)
    prices = [question.pricing.price(question.along[0], one.program) for one in best]
    same = [one for one, price in zip(best, prices, strict=True) if math.isclose(price, prices[0])]
    return same, words


def compared_by(objectives: Sequence[Aspect]) -> Measured:
    """Choose the number to compare finalists by: of divergence and perplexity the first; of drafts their time."""
    if any(objective.name == DRAFT for objective in objectives):
        return DRAFT_TIME
    names = [str(objective) for objective in objectives if str(objective) in get_args(Measured)]
    if names[:1] == ["perplexity"]:
        return "perplexity"
    return "divergence"


def rank_trials(question: PricedQuestion, trials: Sequence[Trial]) -> list[Trial]:
    """Rank trials of finite cost, the best first, one of each program; of equal costs the least divergence is first."""
    finite = [trial for trial in trials if math.isfinite(question.cost(trial))]
    if not finite:
        names = ", ".join(map(str, question.settings.objectives))
        raise ValueError(
            f"of {plural(len(trials), 'trial')} within the budget none has a finite {names}; run more of them, or "
            "look at another objective"
        )
    best: dict[str, Trial] = {}
    for trial in sorted(
        finite, key=lambda trial: (question.cost(trial), trial.measured.divergence, trial.number)
    ):
        best.setdefault(trial.key, trial)
    return [*best.values()]


def _nearest(question: PricedQuestion, trials: Sequence[Trial]) -> str:
    limits = question.settings.limits
    budget = ",".join(map(str, limits))
    whole = [trial for trial in trials if trial.measured.whole]
    if not whole:
        return f"no trial was measured to its end within {budget}; run more of them"
    distances = {one.number: sum(question.lacks_of_quality(one.measured)) for one in whole}
    best = min(whole, key=lambda trial: (distances[trial.number], trial.number))
    had = ", ".join(
        limit.aspect.show(limit.aspect.read_cost(best.measured))
        for limit in question.settings.of_quality
    )
    if not math.isfinite(distances[best.number]):
        had = "none that predicts anything"
    if question.settings.is_between_limits:
        aspects = (limit.aspect for limit in select_priced(limits))
        had += f" and {', '.join(aspect.show(question.pricing.price(aspect, best.program)) for aspect in aspects)}"
    return (
        f"of {plural(len(trials), 'trial')} none is within {budget}; the nearest, trial {best.number}, has {had}; "
        "allow more, or run more trials"
    )


ROUNDS = 5


@dataclass(frozen=True)
class TimeHere:
    """A program's measured time here.

    Attributes:
        seconds: per token, the median over the rounds.
        low, high: the least and the most of any round.
        speedup: times as fast as the unedited model, the median of the one in each round.
    """

    seconds: float
    low: float
    high: float
    speedup: float

    @classmethod
    def of(cls, own: Sequence[float], dense: Sequence[float]) -> TimeHere:
        speedup = median(first / second for first, second in zip(dense, own, strict=True))
        return cls(median(own), min(own), max(own), speedup)

    def __str__(self) -> str:
        times = f"{show_seconds(self.low)} to {show_seconds(self.high)}"
        return f"{show_seconds(self.seconds)} per token ({times} over the rounds), speedup {self.speedup:.3g}x"


def measured_here(
    model: str | Path,
    dense: Program,
    programs: Sequence[Program],
    ranks: RankOptions,
    workload: Workload,
) -> dict[Program, TimeHere]:
    """Measure the unedited model and other programs here, in turns.

    Args:
        model: a checkpoint folder or a hub name; of programs with ranks, plain factors run, which are as fast.
        workload: of at least 2 new tokens.
    """
    if workload.new < 2:
        raise ValueError(
            f"time per token is that of tokens after the first one; ask for 2 or more, not {workload.new}"
        )
    every = list(dict.fromkeys([dense, *programs]))
    needs = Needs(ranks.ranks, workload.length, ranks.device)
    plans = {str(each): needs.plan(model, each) for each in every}
    with Ranks(ranks) as running:
        bench = RankBench.load(running, plans)
        with progress("measure here", ROUNDS * len(every), "runs") as advance:
            results = bench.measure([workload], ROUNDS, advance)
    times = [[each.per_token for each in result.rounds] for result in results]
    return {program: TimeHere.of(own, times[0]) for program, own in zip(every, times, strict=True)}


def ranks_here(settings: Question) -> RankOptions:
    """Choose the ranks to measure the best programs on."""
    return RankOptions(settings.ranks, choose_device("auto", settings.ranks), link=settings.link)


def drafts_here(model: Model, draft: Program, windows: Windows, settings: Question) -> MeasuredDrafts:
    """Measure drafts of a program here, in turns with decoding without them."""
    load = settings.workload(model.positions)
    text = windows.ids.flatten()
    starts = [
        number * load.prompt % max(1, len(text) - load.prompt)
        for number in range((ROUNDS + 1) * load.batch)
    ]
    prompts = [text[start : start + load.prompt].tolist() for start in starts]
    rounds = [prompts[first : first + load.batch] for first in range(0, len(prompts), load.batch)]
    temperature = 1.0 if settings.sampled_acceptance else 0.0
    sampling = Sampling(temperature=temperature, max_new_tokens=load.new, ignore_end=True)
    with progress("measure drafts here", 2 * len(rounds), "runs") as advance:
        return measure_drafts(model, draft, ranks_here(settings), rounds, sampling, advance)


def fast_enough_here(
    question: PricedQuestion, ranked: Sequence[Trial], model: str | Path
) -> Sequence[Trial]:
    """Keep those of the first few trials that this machine runs within its limits, if it has limits."""
    settings = question.settings
    limits = settings.limits
    dense = question.mixture.model.program
    if not any(limit.aspect.on == HERE for limit in limits):
        return ranked
    programs = [trial.program for trial in ranked[: RUNNERS_UP + 1]]
    load = settings.workload(question.mixture.model.positions)
    times = measured_here(model, dense, programs, ranks_here(settings), load)
    fast = []
    for trial, program in zip(ranked, programs, strict=False):
        missed = missed_here(limits, program, dense, times)
        say_aside(f"trial {trial.number}: {missed or f'measured {times[program]}'}")
        if not missed:
            fast.append(trial)
    if not fast:
        budget = ",".join(map(str, limits))
        raise ValueError(
            f"none of the best {len(programs)} programs keeps {budget} when it is measured here; ask for "
            "less, or leave more room to the prediction"
        )
    return fast


def missed_here(
    limits: Sequence[Limit], program: Program, dense: Program, times: Mapping[Program, TimeHere]
) -> str:
    """Name the limits on time here that a program is measured to miss."""
    own = times[program]
    original = times[dense]
    missed = []
    for limit in limits:
        if limit.aspect.on == HERE:
            cost = own.seconds if limit.aspect.name == "latency" else 1 / own.speedup
            if cost > limit.most(original.seconds if limit.aspect.name == "latency" else 1.0):
                missed.append(f"{limit} is missed: measured {own}")
    return "; ".join(missed)
