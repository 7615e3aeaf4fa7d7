"""Trials of which none is better in everything: the Pareto front, and the knee of quality against effective depth."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from surgeon.quality.summary import CONFIDENCE, interval
from surgeon.results.trials import MOST_DIVERGENCE
from surgeon.searches.optimise import Numbers
from surgeon.searches.pricing import Pricing
from surgeon.searches.quantities import Aspect
from surgeon.searches.trial import MeasuredProgram, Trial

RESAMPLES = 2000
SENSITIVITY = 1.0  # S of Kneedle


def non_dominated(costs: Numbers) -> NDArray[np.int64]:
    """Which rows no other row is better than: nowhere more, and somewhere less. Of equal rows the first one.

    Args:
        costs: (points, objectives), less is better; rows that are not finite are left out.
    """
    kept: list[int] = []
    for row in np.lexsort(costs.T[::-1]):  # a row can be dominated only by those before it
        if np.isfinite(costs[row]).all() and not any((costs[other] <= costs[row]).all() for other in kept):
            kept.append(int(row))
    return np.array(kept, dtype=np.int64)


@dataclass(frozen=True)
class FrontPoint:
    """A trial on the front.

    Attributes:
        costs: by each objective; less is better.
    """

    trial: Trial
    costs: tuple[float, ...]


def pareto_front(trials: Sequence[Trial], objectives: Sequence[Aspect], pricing: Pricing) -> list[FrontPoint]:
    """The trials, measured on all of the text, that no other is better than; by the first objective, least first."""
    whole = [trial for trial in trials if trial.measured.whole]
    costs = np.array([pricing.costs(objectives, trial) for trial in whole]).reshape(-1, len(objectives))
    return [FrontPoint(whole[row], tuple(map(float, costs[row]))) for row in non_dominated(costs)]


@dataclass(frozen=True)
class Knee:
    """Where less depth begins to cost more quality than before, within what was measured: deeper cuts move it.

    Attributes:
        depth: None where the curve has none: it is straight, or has too few points.
        low, high: its 95% interval, by resampling windows.
        share: of the resamples, in which part there was one.
    """

    depth: float | None
    low: float
    high: float
    share: float


@dataclass(frozen=True)
class DepthPoint:
    """The best trial at some effective depth.

    Attributes:
        low, high: the 95% interval of its divergence.
    """

    depth: float
    trial: Trial | None
    divergence: float
    low: float
    high: float


@dataclass(frozen=True)
class DepthCurve:
    """The least divergence at every effective depth, of programs of one space or of several together.

    Attributes:
        points: the deepest first; the unedited model is the first one, and each of the others is better than all that
            are as shallow.
    """

    name: str
    points: tuple[DepthPoint, ...]
    knee: Knee

    def line(self) -> str:
        """What it says, in one line."""
        first, knee = self.points[0].depth, self.knee
        last = min(point.depth for point in self.points if point.divergence <= MOST_DIVERGENCE)
        if knee.depth is None:
            return f"{self.name}: no knee between depth {first:g} and {last:g}"
        known = f"95% interval {knee.low:g} to {knee.high:g}" if knee.share else "no interval"
        unsure = f", in {knee.share:.0%} of the resamples" if knee.share < CONFIDENCE else ""
        looked = f"of what was measured down to depth {last:g} and {MOST_DIVERGENCE:g} nat"
        return f"{self.name}: the knee is at depth {knee.depth:g} of {first:g} ({known}{unsure}), {looked}"


def depth_curves(
    trials: Iterable[Trial], original: MeasuredProgram, pricing: Pricing, seed: int = 0, resamples: int = RESAMPLES
) -> list[DepthCurve]:
    """How deep the model really is: by each space whose edits alone some trials have, and by all of them together.

    Args:
        original: the unedited model on the same windows.
        seed: of the resampling.
    """
    whole = [trial for trial in trials if trial.measured.whole and trial.proposal.choice]
    spaces = dict.fromkeys(edit.space for trial in whole for edit in trial.proposal.choice)
    groups = {name: [t for t in whole if {edit.space for edit in t.proposal.choice} == {name}] for name in spaces}
    if len(spaces) > 1:
        groups["all together"] = whole
    layers, per_layer = float(pricing.model.num_layers), pricing.model.family.steps_per_layer
    curves = []
    for name, own in groups.items():
        if not own:
            continue
        depths = np.array([layers, *(trial.program.effective_depth(per_layer) for trial in own)])
        windows = np.array([np.zeros(len(original.divergences)), *(trial.measured.divergences for trial in own)])
        means = np.where(np.isfinite(windows).all(axis=1), windows.mean(axis=1), math.inf)
        points = []
        for row in non_dominated(np.stack([depths, means], axis=1))[::-1]:
            low, high = interval(windows[row])
            trial = None if row == 0 else own[row - 1]
            points.append(DepthPoint(float(depths[row]), trial, float(means[row]), max(0.0, low), high))
        curves.append(DepthCurve(name, tuple(points), bootstrapped_knee(depths, windows, seed, resamples)))
    return curves


def bootstrapped_knee(depths: Numbers, windows: Numbers, seed: int = 0, resamples: int = RESAMPLES) -> Knee:
    """The knee of the lower envelope of some programs' divergence, and how sure it is.

    For every resample of the windows (Efron 1979, with replacement) the means, the envelope and the knee are found
    anew, so that the interval holds what it does to choose the best program by the same windows.

    Args:
        depths: (programs,).
        windows: (programs, windows), the divergence of each.
    """
    finite = np.isfinite(windows).all(axis=1)
    depths, windows = depths[finite], windows[finite]
    count = windows.shape[1]
    weights = np.random.default_rng(seed).multinomial(count, [1 / count] * count, resamples) / count
    found = [knee_of(*lower_envelope(depths, means)) for means in weights @ windows.T]
    knees = np.array([one for one in found if one is not None])
    ends = [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]
    low, high = np.quantile(knees, ends) if len(knees) else (math.nan, math.nan)
    return Knee(knee_of(*lower_envelope(depths, windows.mean(axis=1))), float(low), float(high), len(knees) / resamples)


def lower_envelope(depths: Numbers, divergence: Numbers) -> tuple[Numbers, Numbers]:
    """The depths that occur, falling, and the least divergence of any program that is as shallow as each.

    Those beyond `MOST_DIVERGENCE` are left out, where there are others.
    """
    levels, place = np.unique(depths, return_inverse=True)  # ascending
    least = np.full(len(levels), math.inf)
    np.minimum.at(least, place, divergence)
    least = np.minimum.accumulate(least)
    shown = least <= MOST_DIVERGENCE
    return levels[shown][::-1], least[shown][::-1]


def knee_of(depths: Numbers, divergence: Numbers, sensitivity: float = SENSITIVITY) -> float | None:
    """The knee of a curve that rises as depth falls, by Kneedle (Satopaa et al. 2011); None if there is none.

    Both axes are scaled to the unit square, x the depth that is given up, y the divergence. The knee is where x - y is
    largest, if it falls below that largest value less S times the mean step of x before the curve ends. The curve is
    not smoothed: it is an envelope already, and what noise does to it the bootstrap says.

    Args:
        depths: (points,), falling.
        divergence: (points,), rising.
    """
    if len(depths) < 3 or divergence[-1] <= divergence[0]:
        return None
    x = (depths[0] - depths) / (depths[0] - depths[-1])
    y = (divergence - divergence[0]) / (divergence[-1] - divergence[0])
    difference = x - y
    best = int(np.argmax(difference))
    if difference[best] <= 0:  # giving up depth hurts most at first
        return None
    threshold = difference[best] - sensitivity * float(np.mean(np.diff(x)))
    return float(depths[best]) if (difference[best:] < threshold).any() else None
