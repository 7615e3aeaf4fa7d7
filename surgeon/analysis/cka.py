"""Linear centred kernel alignment (CKA) of two sets of features, accumulated over batches of samples.

With K = X X' and L = Y Y' over n samples, CKA is HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L)) (Kornblith et al. 2019,
"Similarity of Neural Network Representations Revisited", section 3). Nothing of size n x n is made: with linear kernels
both estimates of HSIC are functions of a few sums over samples. Writing a_i = |x_i|^2, b_i = |y_i|^2, s = sum x_i and
t = sum y_i, the terms of the unbiased estimate (Song et al. 2012, "Feature Selection via Dependence Maximization",
equation 5), in which both kernels have their diagonals set to zero, are

    tr(K L)    = |X' Y|^2 - sum a_i b_i
    1' K 1     = |s|^2 - sum a_i
    1' K L 1   = s' X' Y t - s' (sum b_i x_i) - t' (sum a_i y_i) + sum a_i b_i

the last because row i of K sums to x_i . s - a_i. Neither estimate changes when every x_i is moved by the same vector,
so that the sums are taken around the first batch's mean, which keeps their digits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LEAST_SAMPLES = 4  # the unbiased estimate divides by n - 3


class LinearCKA:
    """Compares two sets of features of the same samples, given in batches.

    Attributes:
        samples: how many were given so far.
    """

    def __init__(self) -> None:
        self.samples = 0
        self._origin: tuple[Tensor, Tensor] | None = None
        self._sums = {"xy": _Sums(), "xx": _Sums(), "yy": _Sums()}

    def add(self, x: Tensor, y: Tensor) -> None:
        """Take in a batch: (samples, features of x) and (samples, features of y); sums are kept in float64."""
        x = x.double()
        y = y.double()
        if self._origin is None:
            self._origin = x.mean(0), y.mean(0)
        x = x - self._origin[0]
        y = y - self._origin[1]
        self.samples += len(x)
        self._sums["xy"].add(x, y)
        self._sums["xx"].add(x, x)
        self._sums["yy"].add(y, y)

    def biased(self) -> float:
        """CKA as it is usually given, between 0 and 1; NaN where features do not vary.

        With few samples for their number, unrelated features come out similar.
        """
        return self._ratio({name: sums.biased(self.samples) for name, sums in self._sums.items()})

    def debiased(self) -> float:
        """CKA from unbiased estimates of HSIC: around 0 for unrelated features, however few samples there are.

        NaN where features do not vary, or too little to be told from noise.

        Raises:
            ValueError: for fewer than 4 samples.
        """
        if self.samples < LEAST_SAMPLES:
            raise ValueError(f"debiased CKA needs at least {LEAST_SAMPLES} samples, not {self.samples}")
        return self._ratio({name: sums.unbiased(self.samples) for name, sums in self._sums.items()})

    @staticmethod
    def _ratio(hsic: dict[str, float]) -> float:
        if hsic["xx"] <= 0 or hsic["yy"] <= 0:
            return math.nan
        return hsic["xy"] / math.sqrt(hsic["xx"]) / math.sqrt(hsic["yy"])


class _Sums:
    """Sums over samples that both estimates of HSIC between features x and y are made of.

    Attributes:
        product: X' Y.
        x, y: sums of the features.
        a, b, ab: sums of the squared norms of x, of y, and of the product of the two.
        bx, ay: sums of the features of one, weighted by the squared norm of the other.
    """

    product: Tensor
    x: Tensor
    y: Tensor
    a: Tensor
    b: Tensor
    ab: Tensor
    bx: Tensor
    ay: Tensor

    def add(self, x: Tensor, y: Tensor) -> None:
        a = x.square().sum(1)
        b = y.square().sum(1)
        new = {"x": x.sum(0), "y": y.sum(0), "a": a.sum(), "b": b.sum(), "ab": a @ b, "bx": b @ x, "ay": a @ y}
        if not vars(self):
            vars(self).update(new, product=x.T @ y)
            return
        self.product.addmm_(x.T, y)
        for name, value in new.items():
            getattr(self, name).add_(value)

    def biased(self, samples: int) -> float:
        """HSIC without its constant factor: the squared size of the cross-covariance, summed over samples."""
        centred = self.product - torch.outer(self.x, self.y / samples)
        return float(centred.square().sum())

    def unbiased(self, samples: int) -> float:
        trace = self.product.square().sum() - self.ab
        whole = (self.x.square().sum() - self.a) * (self.y.square().sum() - self.b)
        rows = self.x @ self.product @ self.y - self.x @ self.bx - self.y @ self.ay + self.ab
        n = samples
        return float(trace + whole / ((n - 1) * (n - 2)) - 2 * rows / (n - 2)) / (n * (n - 3))
