"""Singular values of a matrix, plain or whitened, and its truncation to a lower rank.

Both kinds of truncation are one formula: with U_r the leading r left singular vectors, of W or of W S, the truncated
matrix is U_r (U_r' W), two factors of (out, r) and (r, in). For whitening this equals U_r diag(s_r) V_r' inv(S), as
W S = U diag(s) V', but it needs no inverse of S, which may have none, or one of few digits (COALA, Parkina et al. 2025,
does without it in the same way).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from surgeon.analysis.whitening import Whitening

# X'X has 16 digits, so that its factor S has 8: smaller singular values of W S, next to the largest, are rounding.
_ROUNDING = torch.finfo(torch.float64).eps ** 0.5


@dataclass(frozen=True)
class Decomposition:
    """What a matrix is truncated by.

    Attributes:
        values: singular values, largest first, (min(out, in),), float64.
        left: orthonormal columns, (out, at most min(out, in)), float64, that together span those of the matrix.
    """

    values: NDArray[np.float64]
    left: Tensor


def decompose(matrix: Tensor, whitening: Whitening | None = None) -> Decomposition:
    """Singular values and left singular vectors of W, or with a whitening of W S.

    Where inputs do not reach all of the matrix (fewer tokens than features), W S has fewer directions than W. The
    inputs do not say in which order the rest matters, so that it follows in the order of its plain singular values;
    at full rank the matrix is whole again, for inputs of every kind.

    Args:
        matrix: W, (out, in).
    """
    matrix = matrix.double()
    full_rank = min(matrix.shape)
    left, values, _ = torch.linalg.svd(matrix if whitening is None else matrix @ whitening.factor, full_matrices=False)
    if whitening is not None:
        left = _completed(matrix, left[:, : _above_rounding(values)], full_rank)
    padded = np.zeros(full_rank)
    padded[: len(values)] = values[:full_rank].cpu().numpy()
    return Decomposition(padded, left[:, :full_rank])


def truncate(matrix: Tensor, left: Tensor, rank: int) -> Tensor:
    """The matrix of at most this rank that is left of W: U_r (U_r' W), (out, in), float64.

    Args:
        left: as in `Decomposition`.
    """
    leading = left[:, :rank]
    return leading @ (leading.T @ matrix.to(leading))


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


def _above_rounding(values: Tensor) -> int:
    return int((values > _ROUNDING * values[0]).sum()) if len(values) else 0


def _completed(matrix: Tensor, left: Tensor, full_rank: int) -> Tensor:
    """Further orthonormal columns for what of the matrix the given ones do not span."""
    if left.shape[1] == full_rank:
        return left
    rest = matrix - left @ (left.T @ matrix)
    more, values, _ = torch.linalg.svd(rest, full_matrices=False)
    beyond = values > _ROUNDING * torch.linalg.matrix_norm(matrix)
    orthonormal: Tensor = torch.linalg.qr(torch.cat([left, more[:, beyond]], dim=1)).Q
    return orthonormal
