"""Numbers that sum up the singular values of a matrix."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def energy_rank(values: NDArray[np.float64], share: float) -> int:
    """How many leading singular values hold this share of the sum of all squares; 0 for a matrix of zeros."""
    energy = np.cumsum(values**2)
    if not len(energy) or energy[-1] == 0:
        return 0
    # A share that is reached exactly must not be missed by the last digit of a running sum.
    return int(np.searchsorted(energy, share * energy[-1] * (1 - 1e-12))) + 1


def effective_rank(values: NDArray[np.float64]) -> float:
    """Exp of the entropy of the singular values as shares of their sum (Roy and Vetterli 2007, "The effective rank").

    Between 1 and the number of values; 0 for a matrix of zeros.
    """
    total = values.sum()
    if total == 0:
        return 0.0
    shares = values[values > 0] / total
    return float(np.exp(-(shares * np.log(shares)).sum()))


def kept_parameters(out_features: int, in_features: int, rank: int) -> float:
    """Parameters of two factors of this rank, (out + in) r, as a share of the matrix's own; above 1 they are more."""
    return (out_features + in_features) * rank / (out_features * in_features)
