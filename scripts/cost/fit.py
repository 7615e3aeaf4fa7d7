"""Choosing the constants: least squares of printed speedups, in logarithms, pulled towards what the files ship."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from scripts.cost.cases import Case, Run
from scripts.cost.constants import CONSTANTS, Constant

Values = Mapping[str, float]
Seconds = Callable[[Run, Values], float]
Array = NDArray[np.float64]
NOISE = 0.03  # of a printed speedup, in logarithms: what a pull of one spread is worth
PARTS = 0.2  # of a printed part of a layer's time, which is no speed
ABSOLUTE = 0.3  # of a printed time: a paper's own software adds to it what the model does not know
STEP = 0.02  # in logarithms, for differences
FARTHEST = 3.0  # spreads that a constant may go from its start


def starts() -> dict[str, float]:
    """The constants as the files ship them."""
    return {constant.name: constant.start for constant in CONSTANTS}


def fit(
    cases: Sequence[Case], seconds: Seconds, rounds: int, left_out: Sequence[str] = ()
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """The constants that agree best with the cases (of use "fit") and with what is shipped, which 0 rounds keep.

    Every round takes the residuals as straight lines through where it is and goes to their best place, but no further
    than a spread. The last round's lines also say where the constants would be without the cases of a paper.

    Args:
        left_out: papers.

    Returns: the constants, and by paper those without it.
    """
    used = [case for case in cases if case.use == "fit"]
    problem = _Problem(used, seconds)
    place = np.zeros(len(CONSTANTS))
    everything = np.ones(len(used) + len(CONSTANTS), dtype=bool)
    without = {paper: problem.values(place) for paper in left_out}
    for _ in range(rounds):
        residuals = problem.residuals(place)
        jacobian = problem.jacobian(place)
        for paper in left_out:
            others = np.array([case.paper != paper for case in used] + [True] * len(CONSTANTS))
            without[paper] = problem.values(_best(residuals, jacobian, place, others, FARTHEST))
        place = _best(residuals, jacobian, place, everything, 1.0)
    return problem.values(place), without


def _best(
    residuals: Array, jacobian: Array, place: Array, chosen: NDArray[np.bool_], reach: float
) -> Array:
    """Where lines through a place are smallest together, large residuals counting less than their squares."""
    low = np.maximum(place - reach, -FARTHEST - 1e-9)
    high = np.minimum(place + reach, FARTHEST + 1e-9)
    found = least_squares(
        lambda at: (residuals + jacobian @ (at - place))[chosen],
        place,
        bounds=(low, high),
        loss="soft_l1",
    )
    return np.asarray(found.x)


class _Problem:
    """Residuals by how far constants are from their starts, in spreads."""

    def __init__(self, cases: Sequence[Case], seconds: Seconds) -> None:
        self.cases = cases
        self.seconds = seconds

    def values(self, place: Array) -> dict[str, float]:
        """The constants at a place."""
        return {
            constant.name: constant.start * constant.spread**moved
            for constant, moved in zip(CONSTANTS, place, strict=True)
        }

    def residuals(self, place: Array) -> Array:
        """Of every case, and of every constant its own pull."""
        values = self.values(place)
        return np.array([self._residual(case, values) for case in self.cases] + list(place))

    def jacobian(self, place: Array) -> Array:
        """By differences; a case is asked again for the constants only that concern it."""
        values = self.values(place)
        table = np.zeros((len(self.cases) + len(CONSTANTS), len(CONSTANTS)))
        for column, constant in enumerate(CONSTANTS):
            step = STEP / math.log(constant.spread)
            moved = {**values, constant.name: values[constant.name] * math.exp(STEP)}
            for row, case in enumerate(self.cases):
                if _concerned(case, constant):
                    table[row, column] = (
                        self._residual(case, moved) - self._residual(case, values)
                    ) / step
            table[len(self.cases) + column, column] = 1
        return table

    def _residual(self, case: Case, values: Values) -> float:
        if case.baseline is None or case.speedup is None:
            if case.seconds is None:
                return 0.0
            return math.log(self.seconds(case.run, values) / case.seconds) / ABSOLUTE
        noise = PARTS if case.run.per_layers else NOISE
        return math.log(speedup(case, self.seconds, values) / case.speedup) / noise


def speedup(case: Case, seconds: Seconds, values: Values) -> float:
    """What the model says of a case that has a baseline."""
    assert case.baseline is not None
    return seconds(case.baseline, values) / seconds(case.run, values)


def _concerned(case: Case, constant: Constant) -> bool:
    return constant.concerns(case.run) or (
        case.baseline is not None and constant.concerns(case.baseline)
    )
