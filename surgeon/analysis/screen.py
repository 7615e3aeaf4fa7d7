"""Screening: every cell of a scan gets only as many windows of text as it takes to place it.

Windows are taken in rounds, each about as many as all rounds before it. After a round a cell is settled, and gets no
more windows, if one of two things is known of its damage, the mean over windows of its negative log-likelihood minus
the unedited model's on the same window (the logarithm of the ratio of their perplexities):

- it is hopeless: the lower end of the damage's 95% interval lies beyond ten times the base perplexity;
- it is known well: the interval reaches no further to either side than 40% of the damage itself, which keeps cells in
  their order whether they do little damage or much, and no further than 0.2, about 20% of the perplexity.

Both are functions of the cell's own numbers alone, so that a scan that was interrupted settles the same cells.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from surgeon.quality.summary import interval

HOPELESS = 10.0  # times the base perplexity
SHARE_OF_DAMAGE = 0.4
LARGEST_ERROR = 0.2  # of the logarithm of the perplexity
FIRST_ROUND = 1 / 16  # of the windows
LEAST_WINDOWS = 4  # that an interval is told from
_LEAST_GROWTH = 1.5  # of the last round: with less to come, it comes at once


def settings() -> dict[str, float]:
    """What settles a cell, for the record of a scan."""
    return {
        "hopeless_beyond": HOPELESS,
        "share_of_damage": SHARE_OF_DAMAGE,
        "largest_error": LARGEST_ERROR,
        "first_round": FIRST_ROUND,
        "least_windows": LEAST_WINDOWS,
    }


def rounds(count: int) -> list[list[int]]:
    """The numbers of the windows that each round adds; together all of them, once each."""
    order = spread(count)
    ends = []
    end = max(LEAST_WINDOWS, round(FIRST_ROUND * count))
    while end * _LEAST_GROWTH < count:
        ends.append(end)
        end *= 2
    ends.append(count)
    return [order[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def spread(count: int) -> list[int]:
    """The numbers 0 to count - 1 in an order whose every beginning is spread over all of them (bits reversed).

    Neighbouring windows come from the same document; the first few alone would stand for one kind of text.
    """
    bits = max(1, (count - 1).bit_length())
    return sorted(range(count), key=lambda number: int(f"{number:0{bits}b}"[::-1], 2))


def is_settled(damage: NDArray[np.float64]) -> bool:
    """Whether a cell needs no more windows.

    Args:
        damage: negative log-likelihood minus the unedited model's, (windows,), nats.
    """
    mean = float(np.mean(damage))
    if not math.isfinite(mean):
        return True  # it is infinite on all the windows together too
    low, high = interval(damage)
    return low > math.log(HOPELESS) or (high - low) / 2 <= min(LARGEST_ERROR, SHARE_OF_DAMAGE * abs(mean))
