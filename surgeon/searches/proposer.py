"""Proposals: by the papers' choices, by predictions from single edits, and by the trials so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from surgeon.findings.trials import (
    ADDITIVE,
    MOST_DIVERGENCE,
    NEIGHBOUR,
    REGRESSION,
    SECOND_ORDER,
    WINDOW,
)
from surgeon.language.operations.applied import Choice, Edit, as_choice
from surgeon.language.program import Program
from surgeon.searches.evaluate import Terms
from surgeon.searches.mixture import Mixture, Proposal, Trial
from surgeon.searches.optimise import (
    BEAM,
    Counts,
    Damage,
    Flags,
    Numbers,
    Savings,
    Surrogate,
    best_choices,
    useful_edits,
)

Value = Callable[[Trial], float]
# Rates a program with a predicted divergence; less is better.
Promise = Callable[[Program, float], float]

_POOL = 60  # candidates of each kind for a goal
_COMPLETED = 12  # of the best choices, where what edits save together is less than the sum
_ADDED = 8  # edits at most that such a choice is given more
_LEAST_HARM = 1e-9
_TOP = 3  # trials whose neighbours are looked at
_HOPELESS = 10.0  # times the best: what is worse teaches nothing about where the best is
# How many standard deviations below its prediction a candidate is taken for: from trusting the prediction to curiosity.
_CURIOSITY = (0.0, 0.5, 1.0, 2.0)
_UNSURE = 8  # trials of a goal, before which none is ruled out
# Largest error granted to a prediction; with more, choices that break the model would look interesting.
_TRUSTED = 0.3


# Costs of a program in each limited quantity; less is better.
Prices = Callable[[Program], tuple[float, ...]]

ANY = 1e300  # of a price that a goal does not limit
_SLACK = 1e-9


@dataclass(frozen=True)
class Goal:
    """Limits that a program is to keep.

    Attributes:
        most: of each of the prices.
        level: of a cost, if this is one of several goals.
    """

    most: tuple[float, ...]
    level: float | None = None

    @property
    def limited(self) -> tuple[bool, ...]:
        return tuple(most < ANY for most in self.most)

    def is_met(self, prices: Sequence[float]) -> bool:
        return all(
            price <= most + _SLACK * abs(most) for price, most in zip(prices, self.most, strict=True)
        )


def evenly(goals: Sequence[Goal], trials: Sequence[Trial], total: int) -> list[int]:
    """Share out trials among goals: the same in the end, those with the fewest so far first."""
    had = [sum(trial.level == goal.level for trial in trials) for goal in goals]
    counts = [0] * len(goals)
    for _ in range(total):
        fewest = min(range(len(goals)), key=lambda place: (had[place] + counts[place], place))
        counts[fewest] += 1
    return counts


def near_the_best(goals: Sequence[Goal], best: Mapping[float | None, float], total: int) -> list[int]:
    """Share out most trials to the level of the best trial and those next best, once every level has one."""
    order = sorted(range(len(goals)), key=lambda place: (best.get(goals[place].level, -math.inf), place))
    new = [place for place in order if goals[place].level not in best]
    places = [*new, *(order[min(rank, len(order) - 1)] for rank in (0, 0, 1, 2))]
    turns: list[int] = np.bincount(np.resize(places, total), minlength=len(goals)).tolist()
    return turns


def at_the_edge(goals: Sequence[Goal], good: Collection[float | None], total: int) -> list[int]:
    """Share out most trials to the cheapest good level, and the next cheaper ones; goals are the dearest first."""
    edge = max((place for place, goal in enumerate(goals) if goal.level in good), default=0)
    # A cheaper level is worth more: to do better on one that is met already wins nothing.
    places = [place for place in (edge + 1, edge + 1, edge + 2, edge) if place < len(goals)]
    turns: list[int] = np.bincount(np.resize(places, total), minlength=len(goals)).tolist()
    return turns


@dataclass(frozen=True)
class Proposer:
    """Proposes programs for goals, from the terms of single edits and the trials so far; nothing in it is random.

    Attributes:
        prices: of a program; a goal has a limit for each.
        value: orders trials; less is better.
        known: the divergence of choices that were measured before the search.
        sure: how many standard deviations a choice has to be predicted above the best trial's divergence not to be
            tried, once there are some trials; None: all are tried.
    """

    mixture: Mixture
    terms: Terms
    prices: Prices
    goals: tuple[Goal, ...]
    value: Value = field(default=lambda trial: trial.measured.divergence)
    known: Mapping[Choice, float] = field(default_factory=dict)
    sure: float | None = None
    # What was worked out before.
    _known_prices: dict[Choice, tuple[float, ...] | None] = field(
        default_factory=dict, init=False, repr=False
    )
    _known_programs: dict[Choice, Program | None] = field(default_factory=dict, init=False, repr=False)
    _known_windows: dict[Goal, list[Choice]] = field(default_factory=dict, init=False, repr=False)

    def first_round(self, count: int) -> list[Proposal]:
        """Before there are trials: for each goal at most so many choices, the most promising kind first."""
        surrogate = self.surrogate([])
        found: dict[str, Proposal] = {}
        for goal in self.goals:
            kinds = {
                ADDITIVE: self._additive[goal],
                WINDOW: self._by_damage(self._windows(goal), surrogate.corrected_damage),
                SECOND_ORDER: self._optima(surrogate.corrected_damage, goal, _POOL),
            }
            waiting = {source: iter(choices) for source, choices in kinds.items()}
            enough = len(found) + count
            # The first of each kind that is not known yet, then the second, ...
            while waiting and len(found) < enough:
                for source, choices in [*waiting.items()]:
                    choice = next((each for each in choices if self._key(each) not in found), None)
                    if choice is None:
                        del waiting[source]
                    elif len(found) < enough:
                        found[self._key(choice)] = Proposal(
                            self._key(choice), source, choice, goal.level
                        )
        return [*found.values()]

    def next_round(
        self, trials: Sequence[Trial], counts: Sequence[int], running: Iterable[str] = ()
    ) -> list[Proposal]:
        """After some trials: for every goal so many choices that were not tried; fewer if there are no more."""
        surrogate = self.surrogate(trials)
        tried = {trial.key for trial in trials}.union(running)
        found: dict[str, Proposal] = {}
        for goal, count in zip(self.goals, counts, strict=True):
            if not count:
                continue
            # Candidates of all kinds, by prediction, with more and more curiosity.
            sources: dict[Choice, str] = dict.fromkeys(
                self._optima(surrogate.corrected_damage, goal, _POOL), REGRESSION
            )
            for choice in self._windows(goal):
                sources.setdefault(choice, WINDOW)
            for choice in self._near_the_best(goal, trials, surrogate.corrected_damage):
                sources.setdefault(choice, NEIGHBOUR)
            fresh = [choice for choice in sources if self._key(choice) not in tried]
            if not fresh:  # a small space, most of which has been tried
                every = self._optima(surrogate.corrected_damage, goal, 20 * _POOL, beam=20 * _POOL)
                sources = dict.fromkeys(every, REGRESSION)
                fresh = [choice for choice in every if self._key(choice) not in tried]
            numbers = [self._numbers(choice) for choice in fresh]
            mean = np.array([surrogate.corrected_damage.total(one) for one in numbers])
            deviation = surrogate.uncertainty(numbers)
            own = [trial.measured for trial in trials if self.meets(trial.choice, goal)]
            if self.sure is not None and len(own) >= _UNSURE:
                least = min(
                    (measured.divergence for measured in own if measured.whole), default=math.inf
                )
                possible = np.flatnonzero(mean - self.sure * deviation <= least)
                fresh = [fresh[place] for place in possible]
                mean = mean[possible]
                deviation = deviation[possible]
            deviation = np.minimum(deviation, _TRUSTED * np.abs(mean))
            for turn in range(count):
                curiosity = _CURIOSITY[turn % len(_CURIOSITY)]
                order = np.argsort(mean - curiosity * deviation, kind="stable")
                new = (fresh[place] for place in order if self._key(fresh[place]) not in tried)
                best = next(new, None)
                if best is not None:
                    key = self._key(best)
                    tried.add(key)
                    found[key] = Proposal(key, sources[best], best, goal.level)
        return [*found.values()]

    def surrogate(self, trials: Sequence[Trial]) -> Surrogate:
        in_space = [trial for trial in trials if self.knows(trial.choice)]
        finite = [trial for trial in in_space if math.isfinite(trial.measured.divergence)]
        by_level: dict[float | None, float] = {}
        for trial in finite:
            level = trial.level
            divergence = trial.measured.divergence
            by_level[level] = min(by_level.get(level, math.inf), divergence)
        useful = {
            trial.choice: trial.measured.divergence
            for trial in finite
            if trial.measured.divergence <= _HOPELESS * max(by_level[trial.level], 1e-6)
        }
        values = self._taught | useful
        return Surrogate.fit(self.terms.damage, [*map(self._numbers, values)], [*values.values()])

    def price(self, choice: Choice) -> tuple[float, ...] | None:
        """The prices of a choice; None if its edits do not go together."""
        if choice not in self._known_prices:
            program = self.program(choice)
            self._known_prices[choice] = None if program is None else self.prices(program)
        return self._known_prices[choice]

    def program(self, choice: Choice) -> Program | None:
        if choice not in self._known_programs:
            try:
                self._known_programs[choice] = self.mixture.program(choice)
            except ValueError:
                self._known_programs[choice] = None
        return self._known_programs[choice]

    def meets(self, choice: Choice, goal: Goal) -> bool:
        prices = self.price(choice)
        return prices is not None and goal.is_met(prices)

    def _optima(self, damage: Damage, goal: Goal, count: int, beam: int = BEAM) -> list[Choice]:
        """Choices of least predicted damage that meet a goal, at most `count`."""
        need = np.array(self._dense) - np.array(goal.most)
        limited = need > 1e-9 * np.abs(self._dense)
        if not limited.any():
            return []
        # Savings of edits need not add up.
        for tighter in (1.0, 1.1, 1.25, 1.5):
            savings = Savings(self._savings[:, limited], tighter * need[limited])
            keeping = self._lost_attentions, self.mixture.most_lost
            best = best_choices(damage, savings, self.mixture.exclusions, count, keeping, beam)
            found = [as_choice(self.mixture.edits[number] for number in one) for one in best]
            whole = found[:_COMPLETED] + [
                choice for choice in found[_COMPLETED:] if self.meets(choice, goal)
            ]
            completed = [self._complete(choice, goal, damage) for choice in whole]
            fitting = dict.fromkeys(
                self._trim(choice, goal, damage) for choice in completed if choice is not None
            )
            if fitting:
                return self._by_damage(fitting, damage)
        return []

    def _complete(self, choice: Choice, goal: Goal, damage: Damage) -> Choice | None:
        """The choice with the edits that save what it lacks at the least damage; None if none do."""
        need = np.array(self._dense) - np.array(goal.most)
        scale = np.where(need > 0, need, np.abs(goal.most))
        for _ in range(_ADDED + 1):
            prices = self.price(choice)
            if prices is None or not np.isfinite(prices).all():
                return None
            if goal.is_met(prices):
                return choice
            short = np.maximum((np.array(prices) - goal.most) / scale, 0.0)
            numbers = self._numbers(choice)
            free = self._are_free(numbers)
            gain = np.where(free, np.clip(self._savings / scale, 0.0, short).sum(axis=1), 0.0)
            harm = np.maximum(damage.alone + damage.cross[:, numbers].sum(axis=1), _LEAST_HARM)
            best = int(np.argmax(gain / harm))
            if gain[best] <= 0:
                return None
            choice = as_choice((*choice, self.mixture.edits[best]))
        return None

    def _trim(self, choice: Choice, goal: Goal, damage: Damage) -> Choice:
        """The choice without edits that the goal does not need, the most damaging ones given up first."""
        if not self.meets(choice, goal):
            return choice
        for edit in sorted(choice, key=lambda edit: -damage.alone[self._number[edit]]):
            rest = tuple(other for other in choice if other != edit)
            if (
                rest
                and self.meets(rest, goal)
                and damage.total(self._numbers(rest)) <= damage.total(self._numbers(choice))
            ):
                choice = rest
        return choice

    def _windows(self, goal: Goal) -> list[Choice]:
        if goal not in self._known_windows:
            found = []
            for stretch in self.mixture.stretches():
                # What a stretch costs goes down with its length but for roundings of a step, so that halving finds it.
                low = 1
                high = len(stretch)
                while low < high:
                    middle = (low + high) // 2
                    if self.meets(as_choice(stretch[:middle]), goal):
                        high = middle
                    else:
                        low = middle + 1
                choice = as_choice(stretch[:high])
                if choice and self.meets(choice, goal):
                    found.append(choice)
            self._known_windows[goal] = list(dict.fromkeys(found))
        return self._known_windows[goal]

    def _near_the_best(self, goal: Goal, trials: Sequence[Trial], damage: Damage) -> list[Choice]:
        """The best trials of a goal, each with one edit moved anywhere, or a damaging one dropped."""
        own = [t for t in trials if self.knows(t.choice) and self.meets(t.choice, goal)]
        found: list[Choice] = []
        for trial in sorted(own, key=self.value)[:_TOP]:
            choice = trial.choice
            for edit in choice:
                rest = tuple(other for other in choice if other != edit)
                if rest:
                    found.append(rest)
                for number in np.flatnonzero(self._are_free(self._numbers(rest))):
                    other = self.mixture.edits[number]
                    if other != edit:
                        found.append(as_choice((*rest, other)))
        near = self._by_damage(dict.fromkeys(found), damage)[: 4 * _POOL]
        return [choice for choice in near if self.meets(choice, goal)][:_POOL]

    def _are_free(self, numbers: Sequence[int]) -> Flags:
        """(edits,): which can be added to a choice, as by `Mixture.is_free`."""
        excluded = self.mixture.exclusions[numbers].any(axis=0)
        keeping = self._lost_attentions[numbers].sum() + self._lost_attentions <= self.mixture.most_lost
        return np.asarray(~excluded & keeping)

    def _by_damage(self, choices: Iterable[Choice], damage: Damage) -> list[Choice]:
        return sorted(choices, key=lambda choice: (damage.total(self._numbers(choice)), choice))

    def _key(self, choice: Choice) -> str:
        return str(self.program(choice))

    def _numbers(self, choice: Choice) -> list[int]:
        return [self._number[edit] for edit in choice]

    def knows(self, choice: Choice) -> bool:
        return all(edit in self._number for edit in choice)

    @property
    def goals_worth_trying(self) -> tuple[Goal, ...]:
        """Along each cost the goals up to one that takes a whole nat by the sum of single edits."""
        found = []
        ended = set[tuple[bool, ...]]()
        for goal in self.goals:
            if goal.level is None or goal.limited not in ended:
                found.append(goal)
                least = [
                    self.terms.damage.alone[self._numbers(choice)].sum()
                    for choice in self._additive[goal]
                ]
                if least and min(least) > MOST_DIVERGENCE:  # what is cheaper still is another model
                    ended.add(goal.limited)
        return tuple(found)

    def keep_promising(self, promise: Promise) -> Proposer:
        """Keep the goals for which something is promised, by the time of a token in parts of that without drafts."""
        best = {goal: few[0] for goal, few in self._additive.items() if few}
        kept = (goal for goal in self.goals if goal in best and self.rate(best[goal], promise) < 1)
        return replace(self, goals=tuple(kept))

    def rate(self, choice: Choice, promise: Promise) -> float:
        """Rate a choice by what single edits predict of it; less is better."""
        program = self.program(choice)
        assert program is not None
        return promise(program, self.terms.damage.total(self._numbers(choice)))

    @property
    def can_meet(self) -> bool:
        return any(self._additive[goal] or self._windows(goal) for goal in self.goals)

    @cached_property
    def _additive(self) -> dict[Goal, list[Choice]]:
        """By goal the choice of the least sum of single edits' damage, if there is one."""
        plain = Damage(self.terms.damage.alone, np.zeros_like(self.terms.correlation))
        return {goal: self._optima(plain, goal, 1) for goal in self.goals}

    @cached_property
    def running(self) -> list[int]:
        """Edits that may be in a good choice for one of the goals, those of least damage for their savings first."""
        found: dict[int, float] = {}
        for goal in self.goals:
            need = np.array(self._dense) - np.array(goal.most)
            limited = need > 1e-9 * np.abs(self._dense)
            if limited.any():
                savings = Savings(self._savings[:, limited], need[limited])
                for edit in useful_edits(self.terms.damage, savings, self.mixture.exclusions).tolist():
                    price = float(self.terms.damage.alone[edit] / savings.worth[edit])
                    found[edit] = min(found.get(edit, math.inf), price)
        return sorted(found, key=lambda edit: (found[edit], edit))

    @cached_property
    def _taught(self) -> dict[Choice, float]:
        """Choices known before the search, unless much worse than the expected ones."""
        expected = [
            self.terms.damage.total(self._numbers(best))
            for few in self._additive.values()
            for best in few
        ]
        most = _HOPELESS * max(expected, default=0.0)
        return {
            choice: value for choice, value in self.known.items() if self.knows(choice) and value <= most
        }

    @cached_property
    def _number(self) -> dict[Edit, int]:
        return {edit: number for number, edit in enumerate(self.mixture.edits)}

    @cached_property
    def _lost_attentions(self) -> Counts:
        """(edits,): how many layers lose their attention."""
        return np.array(
            [self.mixture.attentions_lost[edit] for edit in self.mixture.edits], dtype=np.int64
        )

    @cached_property
    def _dense(self) -> tuple[float, ...]:
        return self.prices(self.mixture.model.program)

    @cached_property
    def _savings(self) -> Numbers:
        """(edits, prices): savings of each edit by itself."""
        prices = [self.price((edit,)) for edit in self.mixture.edits]
        saved: Numbers = np.array(self._dense)[None] - np.array(
            [price or self._dense for price in prices]
        )
        return saved
