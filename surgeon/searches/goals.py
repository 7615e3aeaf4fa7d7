"""What choices have to come down to: a goal for a budget, or one for each level of a cost that is looked along."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from surgeon.language.program import Program
from surgeon.searches.trial import Trial

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
