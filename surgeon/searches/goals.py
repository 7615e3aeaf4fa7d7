"""What a search is asked, of which spaces, limits and objectives; and the goals that follow."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from surgeon.cost.drafts import DraftedPrediction
from surgeon.language.program import Program
from surgeon.searches.drafting import drafted, promised, valued
from surgeon.searches.front import FrontPoint, pareto_front
from surgeon.searches.limits import Limit, SearchBudget
from surgeon.searches.mixture import Mixture
from surgeon.searches.quantities import Aspect
from surgeon.searches.question import Question
from surgeon.searches.reach import NEAR, least_cost, levels_of
from surgeon.searches.spaces import Space
from surgeon.searches.trial import MeasuredProgram, Proposal, Trial

_BETWEEN_EQUALS = 1e-6  # weight of what decides between programs that cost the same


@dataclass(frozen=True)
class PricedQuestion:
    """A search's question, and what follows from it: goals, what trials cost, and which of them win.

    Attributes:
        budget: of the settings' limits; its pricing knows `settings.aspects`.
        original: the unedited model's quality on the text.
        whole: the question of all spaces, of whose levels this one's are those that its own edits come to.
    """

    settings: Question
    mixture: Mixture
    budget: SearchBudget
    original: MeasuredProgram
    whole: PricedQuestion | None = None

    def of(self, spaces: Sequence[Space]) -> PricedQuestion:
        """The same question of some of the spaces, along the same levels."""
        return replace(self, mixture=replace(self.mixture, spaces=tuple(spaces)), whole=self)

    def promised(self, program: Program, divergence: float) -> float:
        """As `searches.drafting.promised`, in a search for drafts."""
        draft = self.settings.draft
        assert draft is not None, "nothing is asked of drafts"
        return promised(self.budget.pricing, draft, program, divergence)

    def drafted(self, program: Program, *measured: MeasuredProgram) -> list[DraftedPrediction]:
        """Drafting by a program as it was measured on each of several texts, where drafts are asked for."""
        settings = self.settings
        pricing = self.budget.pricing
        if settings.draft is None:
            return []
        found = (drafted(pricing, settings.draft, program, one, settings.acceptance) for one in measured)
        return [one for one in found if one is not None]

    @cached_property
    def levels(self) -> dict[Aspect, tuple[float, ...]]:
        """Those of each cost that is looked along."""
        if self.whole is None:
            every = {cost: levels_of(cost, self.budget, self.mixture) for cost in self.settings.along}
            return {cost: levels for cost, levels in every.items() if levels}
        least = {cost: least_cost(cost, self.budget, self.mixture) for cost in self.along}
        return {
            cost: tuple(level for level in levels if level >= least[cost] - NEAR * abs(least[cost]))
            for cost, levels in self.whole.levels.items()
        }

    @property
    def along(self) -> tuple[Aspect, ...]:
        """The costs that are looked along: of `Question.along`, those that edits lessen."""
        return tuple(self.levels if self.whole is None else self.whole.levels)

    @property
    def is_for_the_cheapest(self) -> bool:
        """Whether quality is limited, and the winner is the cheapest that has it."""
        return bool(self.along and self.budget.of_quality) and not self.settings.is_between_limits

    @property
    def has_one_best(self) -> bool:
        """Whether trials of all levels compare, and the best of all of them wins."""
        return not self.along or bool(self.budget.of_quality) or self.settings.draft is not None

    @property
    def objectives(self) -> tuple[Aspect, ...]:
        return self.settings.objectives

    def valued(self, program: Program, measured: MeasuredProgram) -> MeasuredProgram:
        """A program as it was measured, with what it is worth as a draft where that is asked for."""
        settings = self.settings
        if settings.draft is None:
            return measured
        return valued(self.budget.pricing, settings.draft, program, measured, settings.acceptance)

    @property
    def traded(self) -> tuple[Aspect, ...]:
        """What a front is of: the objectives, and the costs that are looked along, but for one that drafts settle."""
        if self.settings.draft is not None:
            return self.objectives
        return tuple(dict.fromkeys([*self.objectives, *self.along]))

    def front(self, trials: Sequence[Trial]) -> list[FrontPoint]:
        """The trials that no other is better than in all objectives; by the first one, least first.

        Where costs are looked along that are no objectives: in the objectives and one of these, for each of them.
        """
        pricing = self.budget.pricing
        others = [cost for cost in self.along if cost not in self.objectives]
        trades = [(*self.objectives, cost) for cost in others] or [self.objectives]
        best = {point.trial.number: point.trial for one in trades for point in pareto_front(trials, one, pricing)}
        points = [FrontPoint(trial, pricing.costs(self.traded, trial)) for trial in best.values()]
        return sorted(points, key=lambda point: point.costs)

    @cached_property
    def goals(self) -> tuple[Goal, ...]:
        """One for the budget, or one for each level of each cost that is looked along, the dearest first."""
        most = tuple(self.budget.most(limit) for limit in self._kept)
        if not self.along:
            return (Goal(most),)
        return tuple(
            Goal((*most, *(level if other == cost else ANY for other in self.along)), level)
            for cost, levels in self.levels.items()
            for level in levels
        )

    def level(self, program: Program) -> float | None:
        """Of the first cost that is looked along and that a program lessens, the last level that it comes down to."""
        for cost, levels in self.levels.items():
            price = self.budget.pricing.price(cost, program)
            met = [level for level in levels if price <= level * (1 + 1e-9)]
            if met:
                return min(met)
        return None

    @property
    def prices(self) -> Prices:
        """What programs cost, in the order of the goals' limits."""
        aspects = [*(limit.aspect for limit in self._kept), *self.along]
        return lambda program: tuple(self.budget.pricing.price(aspect, program) for aspect in aspects)

    @property
    def _kept(self) -> list[Limit]:
        """The limits on programs that every goal keeps."""
        between = self.along if self.settings.is_between_limits else ()
        return [limit for limit in self.budget.of_programs if limit.aspect not in between]

    @cached_property
    def _wanted(self) -> float | None:
        """Of the cost that is looked along between limits, the level that is the limit."""
        limits = [limit for limit in self.budget.of_programs if limit not in self._kept]
        if limits:
            return self.budget.most(limits[0])
        return None

    def shared_out(self, goals: Sequence[Goal], trials: Sequence[Trial], total: int) -> list[int]:
        """How many of a round's trials each goal gets: evenly along a cost, or where quality ends if it is limited.

        Where the cost is limited, too, half of them are of programs at its limit. Of drafts, where the best ones are.
        """
        if self.settings.draft is not None:
            best: dict[float | None, float] = {}
            for trial in trials:
                level = trial.proposal.level
                best[level] = min(best.get(level, math.inf), self.cost(trial))
            return near_the_best(goals, best, total)
        if not self.along or not self.budget.of_quality:
            return evenly(goals, trials, total)
        good = {trial.proposal.level for trial in trials if not any(self.lacks_of_quality(trial.measured))}
        wanted = [place for place, goal in enumerate(goals) if goal.level == self._wanted]
        half = (total + len(trials) % 2) // 2 if wanted else 0
        counts = at_the_edge(goals, good, total - half)
        for place in wanted:
            counts[place] += half
        return counts

    def cost(self, trial: Trial) -> float:
        """What a single winner is chosen by, less is better; infinite for a trial that breaks the budget.

        By the first objective; where only quality is limited, by the cost that is looked along. Of equally dear ones
        by their divergence.
        """
        if not trial.measured.whole or not self.is_met(trial):
            return math.inf
        if not self.is_for_the_cheapest:
            return self.costs(trial)[0]
        dense = self.budget.pricing.price(self.along[0], self.mixture.model.program)
        divergence = trial.measured.divergence
        return self.price(self.along[0], trial) / dense + _BETWEEN_EQUALS * divergence / (1 + divergence)

    def costs(self, trial: Trial) -> tuple[float, ...]:
        """The objectives of a trial, less is better."""
        return self.budget.pricing.costs(self.objectives, trial)

    def recorded_costs(self, proposal: Proposal, measured: MeasuredProgram) -> tuple[float, ...]:
        """What a study has of a proposal, in the order of `settings.recorded`."""
        return self.budget.pricing.costs(self.settings.recorded, Trial(0, proposal, measured))

    def price(self, aspect: Aspect, trial: Trial) -> float:
        """What a trial's program costs of one quantity."""
        return self.budget.pricing.price(aspect, trial.program)

    def lacks_of_quality(self, measured: MeasuredProgram) -> tuple[float, ...]:
        return self.budget.quality_shortfalls(measured, self.original)

    def is_met(self, trial: Trial) -> bool:
        """Whether a trial is within all limits."""
        return not any(self.budget.shortfalls(trial.program)) and not any(self.lacks_of_quality(trial.measured))

    def best_in_words(self, trials: Collection[Trial]) -> str:
        """The best trial in a few words, or where there is no single one, how many are on the front."""
        if not self.has_one_best:
            return f"{len(self.front([*trials]))} on the front"
        best = min(trials, key=lambda trial: (self.cost(trial), trial.number), default=None)
        if best is None or math.isinf(self.cost(best)):
            return ""
        if self.is_for_the_cheapest:
            return f"best {self.along[0].show(self.price(self.along[0], best))}"
        if self.settings.draft is not None:
            return f"best {self.settings.draft.show(self.cost(best))}"
        return f"best {self.cost(best):.4g}"


Prices = Callable[[Program], tuple[float, ...]]  # what a program costs of each limited quantity; less is better

ANY = 1e300  # of a price that a goal does not limit
_SLACK = 1e-9


@dataclass(frozen=True)
class Goal:
    """Limits that a program is to keep.

    Attributes:
        most: of each of the prices.
        level: of the cost that is looked along, if this is one of several goals.
    """

    most: tuple[float, ...]
    level: float | None = None

    @property
    def limited(self) -> tuple[bool, ...]:
        """Which of the prices have a limit."""
        return tuple(most < ANY for most in self.most)

    def is_met(self, prices: Sequence[float]) -> bool:
        """Whether a program of these prices keeps all limits."""
        return all(price <= most + _SLACK * abs(most) for price, most in zip(prices, self.most, strict=True))


def evenly(goals: Sequence[Goal], trials: Sequence[Trial], total: int) -> list[int]:
    """How many of so many trials each goal gets: the same in the end, those with the fewest so far first."""
    had = [sum(trial.proposal.level == goal.level for trial in trials) for goal in goals]
    counts = [0] * len(goals)
    for _ in range(total):
        fewest = min(range(len(goals)), key=lambda place: (had[place] + counts[place], place))
        counts[fewest] += 1
    return counts


def near_the_best(goals: Sequence[Goal], best: Mapping[float | None, float], total: int) -> list[int]:
    """The same, but most to the level of the best trial and those next best, once every level has one.

    Args:
        best: of each level, the value of its best trial; less is better.
    """
    order = sorted(range(len(goals)), key=lambda place: (best.get(goals[place].level, -math.inf), place))
    new = [place for place in order if goals[place].level not in best]
    places = [*new, *(order[min(rank, len(order) - 1)] for rank in (0, 0, 1, 2))]
    counts = [0] * len(goals)
    for turn in range(total):
        counts[places[turn % len(places)]] += 1
    return counts


def at_the_edge(goals: Sequence[Goal], good: Collection[float | None], total: int) -> list[int]:
    """The same, but most to where what is good enough ends: the cheapest level that has it, and the next cheaper ones.

    Args:
        goals: in the order of their levels, the dearest first.
        good: levels with a trial that is good enough.
    """
    edge = max((place for place, goal in enumerate(goals) if goal.level in good), default=0)
    # A cheaper level is worth more: to do better on one that is met already wins nothing.
    places = [place for place in (edge + 1, edge + 1, edge + 2, edge) if place < len(goals)]
    counts = [0] * len(goals)
    for turn in range(total):
        counts[places[turn % len(places)]] += 1
    return counts
