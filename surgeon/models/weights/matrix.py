"""One matrix of a sublayer: of a layer, or the average of several layers' matrices.

Shapes are known without reading; values come whole or by rows, as (out_features, in_features).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from surgeon.models.weights.store import Store


class WeightMatrix(Protocol):
    """A matrix of which nothing is read yet."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""

    @property
    def dtype(self) -> torch.dtype:
        """Stored dtype."""

    def whole(self, dtype: torch.dtype | None = None) -> Tensor:
        """All values, in another dtype if one is given."""

    def rows(self, first: int, end: int) -> Tensor:
        """Rows first..end-1."""


@dataclass(frozen=True)
class Dense:
    """A matrix that is stored whole, perhaps packed into a module with others, perhaps transposed.

    Attributes:
        dim: along which `features` lie in the stored tensor.
        features: indices of those that belong to the matrix, ascending; None for all.
        transposed: stored as (in_features, out_features).
        index: among the matrices that are stacked in the tensor, if they are.
    """

    store: Store
    name: str
    dim: int = 0
    features: Tensor | None = None
    transposed: bool = False
    index: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        sizes = list(self.store.shape(self.name)[0 if self.index is None else 1 :])
        if self.features is not None:
            sizes[self.dim] = len(self.features)
        first, second = reversed(sizes) if self.transposed else sizes
        return first, second

    @property
    def dtype(self) -> torch.dtype:
        return self.store.dtype(self.name)

    def whole(self, dtype: torch.dtype | None = None) -> Tensor:
        if self.index is not None:
            stored = self.store.part(self.name, 0, self.index, self.index + 1)[0]
            if self.features is not None:
                stored = stored.index_select(self.dim, self.features.to(stored.device))
        elif self.features is None:
            stored = self.store.tensor(self.name)
        else:
            stored = read_features(self.store, self.name, self.features, self.dim)
        matrix = stored.T if self.transposed else stored
        if dtype is None:
            return matrix
        return matrix.to(dtype)

    def rows(self, first: int, end: int) -> Tensor:
        if self.index is not None:
            return self.whole()[first:end]
        rows_dim = int(self.transposed)
        if self.features is None:
            stored = self.store.part(self.name, rows_dim, first, end)
        elif self.dim == rows_dim:
            stored = read_features(self.store, self.name, self.features[first:end], self.dim)
        else:
            part = self.store.part(self.name, rows_dim, first, end)
            stored = part.index_select(self.dim, self.features.to(part.device))
        if self.transposed:
            return stored.T
        return stored


@dataclass(frozen=True)
class Averaged:
    """The plain mean of several layers' matrices."""

    parts: tuple[WeightMatrix, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return self.parts[0].shape

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    def whole(self, dtype: torch.dtype | None = None) -> Tensor:
        """Average in a dtype, reading one matrix at a time."""
        return mean((part.whole() for part in self.parts), dtype)

    def rows(self, first: int, end: int) -> Tensor:
        return mean(part.rows(first, end) for part in self.parts)


def read_features(store: Store, name: str, indices: Tensor, dim: int) -> Tensor:
    """Read the elements of a stored tensor at ascending indices along one dimension, and those between them."""
    if not len(indices):
        return store.part(name, dim, 0, 0)
    first = int(indices[0])
    end = int(indices[-1]) + 1
    span = store.part(name, dim, first, end)
    if end - first == len(indices):
        return span
    return span.index_select(dim, (indices - first).to(span.device))


def mean(parts: Iterable[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Average tensors, summed in float32 or wider, on the first one's device; one is held at a time beside the sum.

    Args:
        dtype: that the parts are taken in, and the mean is returned in; by default the first one's.
    """
    total = torch.empty(0)
    count = 0
    for part in parts:
        count += 1
        dtype = part.dtype if dtype is None else dtype
        if count == 1:
            total = part.to(dtype)
        else:
            total = _summable(total) + _summable(part.to(total.device, dtype))
    if count == 1:
        return total
    return total.div_(count).to(dtype)


def _summable(part: Tensor) -> Tensor:
    return part.to(torch.promote_types(part.dtype, torch.float32))
