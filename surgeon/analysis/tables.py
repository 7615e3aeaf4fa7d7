"""The tables of a scan: a row for each cell, a row for each random permutation, and counts of what ran."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from surgeon.analysis.cells import Cell
from surgeon.operations import permutation
from surgeon.program import Program
from surgeon.quality.summary import CONFIDENCE, interval, mean_divergence, perplexity

COLUMNS = [
    "operation",
    "first",
    "last",
    "perplexity",
    "perplexity_low",
    "perplexity_high",
    "divergence",
    "divergence_low",
    "divergence_high",
    "tokens",
    "sublayers_run",
]
PERMUTATION_COLUMNS = ["operation", "first", "last", "seed", "order", "perplexity", "divergence", "tokens"]

Values = NDArray[np.float64]  # (windows,)
Lookup = Callable[[Program, Sequence[int]], tuple[Values, Values]]  # nll and divergence of a program on some windows


@dataclass(frozen=True)
class Base:
    """The unedited model's negative log-likelihood on every window, and how many tokens a window predicts."""

    nll: Values
    tokens: int

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% interval of the perplexity, if it can be told."""
        low, high = interval(self.nll)
        return (math.exp(low), _exp(high)) if math.isfinite(high) else None


@dataclass(frozen=True)
class Outcome:
    """A cell with the windows its numbers rest on, and the sublayers that ran for it and not for one before it."""

    cell: Cell
    windows: Sequence[int]
    sublayers_run: float


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


def estimate(nll: Values, divergence: Values, base: Values, windows: Sequence[int]) -> Estimate:
    """What is known of a program from its values on some windows, each (windows,).

    On all windows perplexity is exp of the mean nll, and its interval exp of that of the mean (Student's t over
    windows). On fewer it is the base perplexity on all windows times exp of the mean difference of nll to the base on
    these: texts differ in difficulty by far more than programs do, and this way cells that rest on different windows
    can be compared. With b the base's nll, d the difference, n of N windows, the variance of that estimate is
    Var(b + d)/N + Var(d)(1/n - 1/N), which on all windows is Var(nll)/N. Divergence is the mean over the windows.

    Args:
        base: the unedited model's nll on all windows.
        windows: which ones the values belong to.
    """
    low, high = _interval_of_mean_nll(nll, base, windows)
    value = perplexity(nll) if len(nll) == len(base) else perplexity(base.mean() + (nll - base[list(windows)]))
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


def _interval_of_mean_nll(nll: Values, base: Values, windows: Sequence[int]) -> tuple[float, float]:
    count, of_all = len(nll), len(base)
    if count == of_all or count < 2 or not np.isfinite(nll).all():
        return interval(nll)
    difference = nll - base[list(windows)]
    variance = np.var(nll, ddof=1) / of_all + np.var(difference, ddof=1) * (1 / count - 1 / of_all)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)) * math.sqrt(variance)
    mean = float(base.mean() + difference.mean())
    return mean - half, mean + half


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def cell_values(cell: Cell, windows: Sequence[int], lookup: Lookup) -> tuple[Values, Values]:
    """Negative log-likelihood and divergence of a cell, (windows,) each: the means over its permutations."""
    nll, divergence = zip(*(lookup(program, windows) for program in cell.programs), strict=True)
    return np.mean(nll, axis=0), np.mean(divergence, axis=0)


def cells_table(outcomes: Iterable[Outcome], base: Base, lookup: Lookup) -> pd.DataFrame:
    """One row per cell, with the columns of `cells.csv`."""
    rows = []
    for one in outcomes:
        cell, windows = one.cell, one.windows
        nll, divergence = cell_values(cell, windows, lookup)
        numbers = estimate(nll, divergence, base.nll, windows).numbers
        tokens = len(windows) * base.tokens
        rows.append((cell.operation, cell.first, cell.last, *numbers, tokens, one.sublayers_run))
    return pd.DataFrame(rows, columns=COLUMNS)


def permutations_table(outcomes: Iterable[Outcome], base: Base, lookup: Lookup) -> pd.DataFrame:
    """One row per random permutation of a cell, with the columns of `permutations.csv`."""
    rows = []
    for one in outcomes:
        cell, windows = one.cell, one.windows
        for seed, program in zip(cell.seeds, cell.programs, strict=False):
            found = estimate(*lookup(program, windows), base.nll, windows)
            order = " ".join(map(str, permutation(cell.layers, seed)))
            numbers = (found.perplexity, found.divergence, len(windows) * base.tokens)
            rows.append((cell.operation, cell.first, cell.last, seed, order, *numbers))
    return pd.DataFrame(rows, columns=PERMUTATION_COLUMNS)
