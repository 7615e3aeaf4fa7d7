"""A figure that may depend on another one: a number, or a small table to read between."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Figure:
    """A number for every size, by a table in ascending order; one point stands for a constant.

    Between two sizes it is read on a straight line over the logarithm of the size, beyond the ends it stays as it is.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not sizes or sizes[0] <= 0 or any(a >= b for a, b in pairwise(sizes)):
            raise ValueError(f"a table needs one or more sizes above 0, in ascending order, not {sizes}")

    @classmethod
    def constant(cls, value: float) -> Figure:
        """The same number everywhere."""
        return cls(((1.0, value),))

    def times(self, factor: float) -> Figure:
        """The same with every number so many times as large."""
        return Figure(tuple((size, factor * number) for size, number in self.points))

    def at(self, size: float) -> float:
        """The number for this size."""
        sizes = [each for each, _ in self.points]
        place = bisect_left(sizes, size)
        if place == 0:
            return self.points[0][1]
        if place == len(sizes):
            return self.points[-1][1]
        (low, first), (high, second) = self.points[place - 1 : place + 1]
        return first + (second - first) * math.log(size / low) / math.log(high / low)
