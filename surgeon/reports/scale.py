"""The colour scale of damage, one for PNG files and for the page: where it ends, and what lies where on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

COLOURS = "viridis"
BEYOND = "#fff6c2"  # paler than the scale's last colour, so that a capped cell is seen to be one
CAP = 3.0  # colours end at this multiple of the base perplexity, at the latest
LEAST_CAP = 1.1
MOST = 0.85  # where a few cells are beyond the cap, colours tell this share of the cells apart, with some room
_ROOM = 1.4


def largest_shown(perplexity: Sequence[float] | pd.Series[float], base: float, cap: float = CAP) -> float:
    """Where the colours of these cells end.

    At the worst cell, and at the latest at `cap` times the base; sooner where nearly all cells are far better, as when
    one layer tolerates nothing and the others nearly everything.

    Args:
        perplexity: of the cells; NaN is none.
    """
    cells = pd.Series(perplexity, dtype=float).dropna()
    worst = float(cells.max()) if len(cells) else base
    if worst > base * cap:
        worst = base * (float(cells.quantile(MOST, interpolation="lower")) / base) ** _ROOM
    return min(base * cap, max(base * LEAST_CAP, worst))


def damage(ratio: Any) -> Any:
    """How far from the base's colour a multiple of its perplexity lies, in units of the scale's own.

    The square root of the logarithm, so that +5% and +10% differ as plainly as twice and three times the base do. What
    is better than the base has its colour.

    Args:
        ratio: a number or an array of them.
    """
    with np.errstate(divide="ignore"):
        return np.sqrt(np.maximum(0.0, np.log(ratio)))


def ratio_of(distance: Any) -> Any:
    """The multiple of the base's perplexity that lies so far from its colour; the inverse of `damage` from 1 on."""
    return np.exp(np.square(distance))
