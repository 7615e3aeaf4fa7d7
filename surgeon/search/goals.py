"""What choices have to come down to: a goal for a budget, or one for each level of a cost that is looked along."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from surgeon.program import Program

Prices = Callable[[Program], tuple[float, ...]]  # what a program costs of each limited quantity; less is better

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

    def is_met(self, prices: Sequence[float]) -> bool:
        """Whether a program of these prices keeps all limits."""
        return all(price <= most + _SLACK * abs(most) for price, most in zip(prices, self.most, strict=True))
