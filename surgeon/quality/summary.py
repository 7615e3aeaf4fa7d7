"""From per-window values to the numbers that are reported."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray
from scipy import stats

CONFIDENCE = 0.95

Values = NDArray[np.float64]  # (windows,)


def perplexity(nll: Values) -> float:
    """Exp of the mean negative log-likelihood; infinity where that is beyond any number, or is none itself."""
    mean = float(np.mean(nll))
    return math.exp(mean) if mean < 700 else math.inf


def pooled(values: Values, counts: Values) -> Values:
    """Means of windows in which not as much was counted, for use as if as much had been.

    Their mean is that over all that was counted, m, and they scatter as it does (the ratio estimator's linearisation):
    m + c (x - m), with c what a window counted over what one counts on average.
    """
    shares = counts / counts.mean()
    mean = (shares * values).mean()
    return np.asarray(mean + shares * (values - mean), np.float64)


def mean_divergence(divergence: Values) -> float:
    """The mean over windows, nats per token; infinity where it is no number. Rounding alone can make it less than 0."""
    mean = float(np.mean(divergence))
    return max(0.0, mean) if math.isfinite(mean) else math.inf


def interval(values: Values, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The interval of the mean of per-window values (Student's t); without bounds where it cannot be told."""
    if len(values) < 2 or not np.isfinite(values).all():
        return -math.inf, math.inf
    error = float(stats.sem(values))
    if error == 0:
        return float(values[0]), float(values[0])
    low, high = stats.t.interval(confidence, len(values) - 1, loc=float(np.mean(values)), scale=error)
    return float(low), float(high)


def known_interval(values: Values, least: float = -math.inf, most: float = math.inf) -> tuple[float, float] | None:
    """The same of what is between `least` and `most`, or None where it cannot be told."""
    low, high = interval(values)
    return (max(least, low), min(most, high)) if math.isfinite(high) else None


def perplexity_interval(nll: Values) -> tuple[float, float] | None:
    """The 95% interval of the perplexity, which is at least 1, if it can be told."""
    ends = known_interval(nll, least=0.0)
    return None if ends is None else (_exp(ends[0]), _exp(ends[1]))


@dataclass(frozen=True)
class Estimate:
    """Perplexity and divergence with their 95% intervals; NaN where there is no interval."""

    perplexity: float
    perplexity_low: float
    perplexity_high: float
    divergence: float
    divergence_low: float
    divergence_high: float

    @property
    def numbers(self) -> tuple[float, ...]:
        """In the order of the table's columns."""
        return tuple(vars(self).values())


ESTIMATE_COLUMNS = [field.name for field in fields(Estimate)]


def estimate(
    nll: Values, divergence: Values, base: Values | None = None, windows: Sequence[int] | None = None
) -> Estimate:
    """What is known of a program from its values on all windows, or on some, each (windows,).

    On all windows perplexity is exp of the mean nll, and its interval exp of that of the mean (Student's t over
    windows). On fewer it is the base perplexity on all windows times exp of the mean difference of nll to the base on
    these: texts differ in difficulty by far more than programs do, and this way cells that rest on different windows
    can be compared. With b the base's nll, d the difference, n of N windows, the variance of that estimate is
    Var(b + d)/N + Var(d)(1/n - 1/N), which on all windows is Var(nll)/N. Divergence is the mean over the windows.

    Args:
        base: the unedited model's nll on all windows; not needed if the values are on all of them.
        windows: which ones the values belong to.
    """
    if base is None or windows is None or len(nll) == len(base):
        value, (low, high) = perplexity(nll), interval(nll)
    else:
        difference = nll - base[list(windows)]
        value, (low, high) = perplexity(base.mean() + difference), _interval_on_some(nll, difference, base)
    divergence_low, divergence_high = interval(divergence)
    known = math.isfinite(divergence_high)
    return Estimate(
        value,
        _exp(low) if math.isfinite(low) else math.nan,
        _exp(high) if math.isfinite(high) else math.nan,
        mean_divergence(divergence),
        max(0.0, divergence_low) if known else math.nan,
        max(0.0, divergence_high) if known else math.nan,
    )


def estimate_beside(nll: Values, divergence: Values, other_nll: Values, other_divergence: Values) -> Estimate:
    """What is known of a program from its values on the first windows, beside another's on all of them.

    Both perplexity and divergence are the other's on all windows, and the mean difference to it on these; intervals as
    in `estimate`.

    Args:
        nll, divergence: of the program, (windows run,).
        other_nll, other_divergence: (all windows,).
    """
    count = len(nll)
    found = estimate(nll, divergence, other_nll, range(count))
    difference = divergence - other_divergence[:count]
    low, high = _interval_on_some(divergence, difference, other_divergence)
    known = math.isfinite(high)
    return replace(
        found,
        divergence=mean_divergence(other_divergence.mean() + difference),
        divergence_low=max(0.0, low) if known else math.nan,
        divergence_high=max(0.0, high) if known else math.nan,
    )


def _interval_on_some(values: Values, difference: Values, base: Values) -> tuple[float, float]:
    count, of_all = len(values), len(base)
    if count < 2 or not np.isfinite(values).all():
        return interval(values)
    variance = np.var(values, ddof=1) / of_all + np.var(difference, ddof=1) * (1 / count - 1 / of_all)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)) * math.sqrt(variance)
    mean = float(base.mean() + difference.mean())
    return mean - half, mean + half


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
