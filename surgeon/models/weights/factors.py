"""Matrices as the product of two factors: stored so, or made of a whole matrix when they are asked for.

A matrix W, (out, in), of rank r is first, (r, in), and second, (out, r): W = second @ first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from surgeon.language.sublayer import Sublayer
from surgeon.models.weights.store import Dense, WeightMatrix


class Factors(NamedTuple):
    """The values of two factors.

    Attributes:
        first: (rank, in_features).
        second: (out_features, rank).
    """

    first: Tensor
    second: Tensor

    def product(self) -> Tensor:
        """Multiply them, (out_features, in_features)."""
        return self.second @ self.first


class FactorSource(Protocol):
    """Makes factors of whole matrices, or has them."""

    def factors(self, sublayer: Sublayer, role: str, matrix: WeightMatrix) -> Factors:
        """Return factors in place of a matrix.

        Args:
            sublayer: not a slice; its rank of the role is that of the factors.
            matrix: not read yet.

        Raises:
            ValueError: if there are none for it, or the matrix holds numbers that are not finite.
        """


@dataclass(frozen=True)
class Factored:
    """A matrix of which two factors are stored."""

    first: Dense
    second: Dense

    @property
    def rank(self) -> int:
        return self.first.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return self.second.shape[0], self.first.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.first.dtype

    def factors(self) -> Factors:
        return Factors(self.first.whole(), self.second.whole())

    def whole(self, dtype: torch.dtype | None = None) -> Tensor:
        """Multiply in float32 or wider."""
        return _product(self.factors(), dtype or self.dtype)

    def rows(self, first: int, end: int) -> Tensor:
        return _product(Factors(self.first.whole(), self.second.rows(first, end)), self.dtype)


@dataclass(frozen=True)
class Factorised:
    """A matrix that a source puts two factors in place of, when they are asked for.

    Attributes:
        of: the whole matrix of the sublayer before it is sliced.
        features: of the slice, the indices along the dimension that is divided; None for all.
        writes: whether inputs are divided among slices, not outputs.
    """

    source: FactorSource
    sublayer: Sublayer
    role: str
    of: WeightMatrix
    features: Tensor | None = None
    writes: bool = False

    @property
    def rank(self) -> int:
        rank = self.sublayer.rank(self.role)
        assert rank is not None
        return rank

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        outputs, inputs = self.of.shape
        if self.features is None:
            return outputs, inputs
        if self.writes:
            return (outputs, len(self.features))
        return (len(self.features), inputs)

    @property
    def dtype(self) -> torch.dtype:
        return self.of.dtype

    def factors(self) -> Factors:
        """Ask the source, in the dtype that it computed in.

        Raises:
            ValueError: as the source does, if the rank is above the matrix's, or factors of the source do not fit it.
        """
        if self.rank > min(self.of.shape):
            outputs, inputs = self.of.shape
            raise ValueError(
                f"{self.sublayer}: rank {self.rank} of {self.role} is above that of a matrix of {outputs} x {inputs}"
            )
        made = self.source.factors(replace(self.sublayer, piece=None), self.role, self.of)
        outputs, inputs = self.of.shape
        if tuple(made.first.shape) != (self.rank, inputs) or tuple(made.second.shape) != (
            outputs,
            self.rank,
        ):
            raise ValueError(
                f"the factors of {self.role} of {self.sublayer} have the shapes {tuple(made.first.shape)} and "
                f"{tuple(made.second.shape)}, and should have {(self.rank, inputs)} and {(outputs, self.rank)}"
            )
        if self.features is None:
            return made
        features = self.features.to(made.first.device)
        if self.writes:
            return Factors(made.first.index_select(1, features), made.second)
        return Factors(made.first, made.second.index_select(0, features))

    def whole(self, dtype: torch.dtype | None = None) -> Tensor:
        return _product(self.factors(), dtype or self.dtype)

    def rows(self, first: int, end: int) -> Tensor:
        return self.whole()[first:end]


def _product(factors: Factors, dtype: torch.dtype) -> Tensor:
    wide = torch.promote_types(factors.first.dtype, torch.float32)
    return Factors(factors.first.to(wide), factors.second.to(wide)).product().to(dtype)
