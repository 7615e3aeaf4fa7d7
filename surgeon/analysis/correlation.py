"""Rank correlation of what is cheap to compute with the damage that was measured."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import permutations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

LEAST_PAIRS = 3
MOST_EXACT = 8


@dataclass(frozen=True)
class Correlation:
    """Spearman's rank correlation.

    Attributes:
        rho: NaN where there are fewer than 3 pairs of values, or one side does not vary.
        p: two-sided, of the null hypothesis of no correlation, for independent pairs; exact for up to 8 of them.
        n: pairs of values, those with a NaN left out.
        rho_given: the partial rank correlation at equal values of a third quantity; NaN where none was given, or the
            third quantity leaves nothing to vary.
    """

    rho: float
    p: float
    n: int
    rho_given: float = math.nan


def rank_correlation(x: ArrayLike, y: ArrayLike, given: ArrayLike | None = None) -> Correlation:
    """How far x and y order the same things alike; infinite values are the largest.

    Args:
        given: a third quantity, whose share in the correlation is taken out in `rho_given`.
    """
    columns = [np.asarray(values, dtype=np.float64) for values in ((x, y) if given is None else (x, y, given))]
    kept = ~np.isnan(columns).any(0)
    ranks = [stats.rankdata(column[kept]) for column in columns]
    n = int(kept.sum())
    if n < LEAST_PAIRS or _constant(ranks[0]) or _constant(ranks[1]):
        return Correlation(math.nan, math.nan, n)
    rho, p = (float(value) for value in stats.spearmanr(ranks[0], ranks[1]))
    p = _exact_p(rho, *ranks[:2]) if n <= MOST_EXACT else max(p, 2 / math.factorial(n))
    return Correlation(rho, p, n, math.nan if given is None else _partial(rho, ranks))


def _exact_p(rho: float, x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """The share of all orders of y whose correlation with x is as far from 0."""
    orders = np.array(list(permutations(y - y.mean())))
    products = orders @ (x - x.mean())
    sizes = np.linalg.norm(x - x.mean()) * np.linalg.norm(y - y.mean())
    return float((np.abs(products / sizes) >= abs(rho) - 1e-9).mean())


def _partial(rho: float, ranks: list[NDArray[np.float64]]) -> float:
    """The first-order partial correlation of ranks, from the three correlations between them."""
    if _constant(ranks[2]):
        return rho
    x_given, y_given = (float(np.corrcoef(side, ranks[2])[0, 1]) for side in ranks[:2])
    rest = (1 - x_given**2) * (1 - y_given**2)
    # Rounding alone can leave 1e-16 where nothing is left to vary.
    if rest > 1e-12:
        return (rho - x_given * y_given) / math.sqrt(rest)
    return math.nan


def _constant(ranks: NDArray[np.float64]) -> bool:
    return bool((ranks == ranks[0]).all())
