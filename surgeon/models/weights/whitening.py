"""Whitening: weighing a matrix by the inputs it really gets.

With X the inputs of a linear map over some tokens, (tokens, in), and S any factor of X'X = S S', the outputs' error
under another matrix is |X W' - X V'| = |(W - V) S| (Frobenius). So the best rank-r replacement V of W is found by the
singular values of W S, and its error is the root of the sum of the squares of those left out (SVD-LLM, Wang et al.
2025, section 3.1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


class SecondMoment:
    """X'X over batches of inputs, in float64; the inputs themselves are not kept.

    Attributes:
        matrix: (in, in).
        samples: tokens taken in so far.
        noise: how far off the inputs may be by rounding, as `noise_of` has it.
    """

    def __init__(self, features: int, device: torch.device | str = "cpu") -> None:
        self.matrix = torch.zeros(features, features, dtype=torch.float64, device=device)
        self.samples = 0
        self.noise = 0.0

    def add(self, inputs: Tensor) -> None:
        """Take in a batch, (..., in), in the dtype that it was computed in."""
        rows = inputs.detach().flatten(0, -2).to(self.matrix)
        self.matrix.addmm_(rows.T, rows)
        self.samples += len(rows)
        self.noise = max(self.noise, noise_of(inputs.dtype, len(self.matrix)))

    def zero(self, largest: Tensor, rounding: float = 0.0) -> float:
        """Up to where an eigenvalue of this moment, with features scaled to size 1, is rounding.

        Args:
            largest: of the eigenvalues.
            rounding: of other numbers than the inputs that the moment was multiplied with, as `noise`.
        """
        sums = torch.finfo(torch.float64).eps * len(self.matrix) * float(largest)
        return max(self.noise**2, rounding**2, sums)


def noise_of(dtype: torch.dtype, features: int) -> float:
    """How far off numbers of a dtype may be, in parts of their size, that are sums over so many products.

    They are rounded to the dtype, and sums are accumulated in float32 at least: the errors of these grow with the root
    of how many are added. What inputs of tiny models have beyond what they should span lies below (768 features: in
    float32 by a factor of 17, in bfloat16 of 1.4).
    """
    precision = float(torch.finfo(dtype).eps)
    return 2 * max(precision, math.sqrt(features) * min(precision, torch.finfo(torch.float32).eps))


@dataclass(frozen=True)
class Whitening:
    """A factor S of a second moment, S S' = X'X.

    Attributes:
        factor: S, (in, rank), float64.
        how: "cholesky": S is the lower Cholesky factor. "eigenvalues": X'X has no inverse (fewer tokens than features,
            or features that within rounding are combinations of others), and S is D Q diag(sqrt(l)): D the features'
            sizes, Q and l eigenvectors and eigenvalues of inv(D) X'X inv(D), those left out that are 0 within the
            rounding of the inputs. Nothing is added to the diagonal in either case.
    """

    factor: Tensor
    how: Literal["cholesky", "eigenvalues"]

    @property
    def rank(self) -> int:
        """The number of independent directions that the inputs have."""
        return self.factor.shape[1]


def whiten(moment: SecondMoment) -> Whitening:
    """A factor of the second moment: by Cholesky where features are independent, else by eigenvalues."""
    matrix = moment.matrix
    sizes = matrix.diagonal().sqrt()
    if moment.samples >= len(matrix):
        lower, failed = torch.linalg.cholesky_ex(matrix)
        # Rounding can let Cholesky pass; what of a feature those before it do not explain then shows it.
        if not failed and bool((lower.diagonal() ** 2 > moment.zero(sizes.new_ones(())) * sizes**2).all()):
            return Whitening(lower, "cholesky")
    # Scaled, so that small features are not taken for rounding of large ones.
    scale = torch.where(sizes > 0, sizes, 1)
    eigenvalues, vectors = torch.linalg.eigh(matrix / torch.outer(scale, scale))
    kept = eigenvalues > moment.zero(eigenvalues[-1])
    return Whitening(scale[:, None] * vectors[:, kept] * eigenvalues[kept].sqrt(), "eigenvalues")
