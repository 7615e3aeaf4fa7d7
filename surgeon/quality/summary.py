"""From per-window values to the numbers that are reported."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy import stats

CONFIDENCE = 0.95


def perplexity(nll: NDArray[np.float64]) -> float:
    """Exp of the mean negative log-likelihood; infinity where that is beyond any number, or is none itself."""
    mean = float(np.mean(nll))
    return math.exp(mean) if mean < 700 else math.inf


def mean_divergence(divergence: NDArray[np.float64]) -> float:
    """The mean over windows, nats per token; infinity where it is no number. Rounding alone can make it less than 0."""
    mean = float(np.mean(divergence))
    return max(0.0, mean) if math.isfinite(mean) else math.inf


def interval(values: NDArray[np.float64]) -> tuple[float, float]:
    """The 95% interval of the mean of per-window values (Student's t); without bounds where it cannot be told."""
    if len(values) < 2 or not np.isfinite(values).all():
        return -math.inf, math.inf
    error = float(stats.sem(values))
    if error == 0:
        return float(values[0]), float(values[0])
    low, high = stats.t.interval(CONFIDENCE, len(values) - 1, loc=float(np.mean(values)), scale=error)
    return float(low), float(high)
