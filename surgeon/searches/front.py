"""The Pareto front of trials, and quality against a cost, with its knee."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from surgeon.findings.trials import MOST_DIVERGENCE
from surgeon.quality.summary import CONFIDENCE, Quality, interval
from surgeon.searches.mixture import Trial
from surgeon.searches.optimise import Numbers
from surgeon.searches.pricing import Pricing
from surgeon.searches.quantities import Aspect

RESAMPLES = 2000
SENSITIVITY = 1.0  # S of Kneedle
TOGETHER = "all together"  # the curve of all spaces


def non_dominated(costs: Numbers) -> NDArray[np.int64]:
    """Find rows that no other row dominates: nowhere more, and somewhere less. Of equal rows the first one.

    Args:
        costs: (points, objectives), less is better; rows that are not finite are left out.
    """
    kept: list[int] = []
    for row in np.lexsort(costs.T[::-1]):  # a row can be dominated only by those before it
        if np.isfinite(costs[row]).all() and not any(
            (costs[other] <= costs[row]).all() for other in kept
        ):
            kept.append(int(row))
    return np.array(kept, dtype=np.int64)


def pareto_front(trials: Sequence[Trial], objectives: Sequence[Aspect], pricing: Pricing) -> list[Trial]:
    """Non-dominated trials, measured on all of the text; by the first objective, least first."""
    whole = [trial for trial in trials if trial.measured.whole]
    costs = np.array([pricing.costs(objectives, trial) for trial in whole]).reshape(-1, len(objectives))
    return [whole[row] for row in non_dominated(costs)]


@dataclass(frozen=True)
class CurvePoint:
    """The best trial at some cost.

    Attributes:
        low, high: the 95% interval of its divergence.
    """

    cost: float
    trial: Trial | None
    divergence: float
    low: float
    high: float


@dataclass(frozen=True)
class QualityCurve:
    """The front of divergence against a cost, of programs of one space or of several together.

    Attributes:
        name: of the space, or `TOGETHER`.
        points: the unedited model, then the best of each cost, the dearest first.
        knee: its cost, within what was measured (deeper cuts move it); None where the curve has none: it is straight,
            or has too few points.
        low, high: the 95% interval of the knee, by resampling windows.
        share: of the resamples that have one.
    """

    along: Aspect
    name: str
    points: tuple[CurvePoint, ...]
    knee: float | None
    low: float
    high: float
    share: float

    def line(self) -> str:
        show = self.along.show
        first = self.along.quantity.show(self.points[0].cost)
        last = min(point.cost for point in self.points if point.divergence <= MOST_DIVERGENCE)
        if self.knee is None:
            return f"{self.name}: no knee between {self.along.name} {first} and {show(last)}"
        ends = sorted([self.low, self.high], reverse=self.along.quantity.upward)
        if self.share:
            known = f"95% interval {' to '.join(map(self.along.quantity.show, ends))}"
        else:
            known = "no interval"
        if self.share < CONFIDENCE:
            unsure = f", in {self.share:.0%} of the resamples"
        else:
            unsure = ""
        looked = f"looked for as far as {show(last)}, within a divergence of {MOST_DIVERGENCE:g} nat"
        return f"{self.name}: the knee is at {show(self.knee)} of {first} ({known}{unsure}), {looked}"


def quality_curves(
    along: Aspect,
    trials: Sequence[Trial],
    original: Quality,
    pricing: Pricing,
    resamples: int = RESAMPLES,
) -> list[QualityCurve]:
    """Curves of quality against a cost, of each space alone, and of all together, last."""
    dense = pricing.price(along, pricing.model.program)
    prices = {t.number: pricing.price(along, t.program) for t in trials}
    whole = [t for t in trials if t.measured.whole and t.choice and math.isfinite(prices[t.number])]
    spaces = dict.fromkeys(edit.space for trial in whole for edit in trial.choice)
    groups = {name: [t for t in whole if {edit.space for edit in t.choice} == {name}] for name in spaces}
    if len(spaces) > 1:
        groups[TOGETHER] = whole
    curves = []
    for name, own in groups.items():
        costs = np.array([dense, *(prices[trial.number] for trial in own)])
        if not (costs < dense).any():  # a space that does not lessen it
            continue
        windows = np.array(
            [
                np.zeros(len(original.by_window("divergence"))),
                *(one.measured.by_window("divergence") for one in own),
            ]
        )
        means = np.where(np.isfinite(windows).all(axis=1), windows.mean(axis=1), math.inf)
        points = []
        for row in non_dominated(np.stack([costs, means], axis=1))[::-1]:
            low, high = interval(windows[row])
            trial = None if row == 0 else own[row - 1]
            points.append(CurvePoint(float(costs[row]), trial, float(means[row]), max(0.0, low), high))
        curves.append(
            QualityCurve(
                along, name, tuple(points), *bootstrapped_knee(costs, windows, resamples=resamples)
            )
        )
    return curves


def bootstrapped_knee(
    costs: Numbers, windows: Numbers, resamples: int = RESAMPLES
) -> tuple[float | None, float, float, float]:
    """The knee of the lower envelope of programs' divergence, with its interval.

    For every resample of the windows (Efron 1979, with replacement) the means, the envelope and the knee are found
    anew, so that the interval covers the choice of the best program by the same windows.

    Args:
        costs: (programs,).
        windows: (programs, windows), the divergence of each.

    Returns:
        As `QualityCurve` has them, its cost, both ends of the interval, and the share of resamples that have one.
    """
    finite = np.isfinite(windows).all(axis=1)
    costs = costs[finite]
    windows = windows[finite]
    count = windows.shape[1]
    weights = np.random.default_rng(0).multinomial(count, [1 / count] * count, resamples) / count
    found = [knee_of(*lower_envelope(costs, means)) for means in weights @ windows.T]
    knees = np.array([one for one in found if one is not None])
    ends = [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]
    low, high = np.quantile(knees, ends) if len(knees) else (math.nan, math.nan)
    return (
        knee_of(*lower_envelope(costs, windows.mean(axis=1))),
        float(low),
        float(high),
        len(knees) / resamples,
    )


def lower_envelope(costs: Numbers, divergence: Numbers) -> tuple[Numbers, Numbers]:
    """The costs that occur, falling, and the least divergence of programs as cheap as each, up to `MOST_DIVERGENCE`."""
    levels, place = np.unique(costs, return_inverse=True)  # ascending
    least = np.full(len(levels), math.inf)
    np.minimum.at(least, place, divergence)
    least = np.minimum.accumulate(least)
    shown = least <= MOST_DIVERGENCE
    return levels[shown][::-1], least[shown][::-1]


def knee_of(costs: Numbers, divergence: Numbers) -> float | None:
    """The knee of a curve that rises as the cost falls, by Kneedle (Satopaa et al. 2011); None if there is none.

    Both axes are scaled to the unit square, x the cost that is given up, y the divergence. The knee is where x - y is
    largest, if it falls below that largest value less S times the mean step of x before the curve ends. The curve is
    an envelope, and not smoothed; the bootstrap covers its noise.

    Args:
        costs: (points,), falling.
        divergence: (points,), rising.
    """
    if len(costs) < 3 or divergence[-1] <= divergence[0]:
        return None
    x = (costs[0] - costs) / (costs[0] - costs[-1])
    y = (divergence - divergence[0]) / (divergence[-1] - divergence[0])
    difference = x - y
    best = int(np.argmax(difference))
    if difference[best] <= 0:  # giving it up hurts most at first
        return None
    threshold = difference[best] - SENSITIVITY * float(np.mean(np.diff(x)))
    if (difference[best:] < threshold).any():
        return float(costs[best])
    return None
