"""Homes of a model's tensors, and one matrix of a sublayer in them: of a layer, or the average of several layers'.

Modules in memory are such a home; a checkpoint's folder (`Checkpoint`) is another. Shapes are known without reading;
values come whole or by rows, as (out_features, in_features). A matrix of rank r may also be the product of two factors:
W = second @ first, (out, r) and (r, in).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from surgeon.language.sublayer import Sublayer

Tensors = dict[str, Tensor]


class Store(Protocol):
    """Tensors by the names they are stored under."""

    where: str  # what error messages call it

    def names(self) -> Iterable[str]:
        """All of them."""

    def __contains__(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, without reading it where that takes time."""
        return tuple(self.tensor(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor, likewise."""
        return self.tensor(name).dtype

    def tensor(self, name: str) -> Tensor:
        """One whole tensor."""

    def part(self, name: str, dim: int, first: int, end: int) -> Tensor:
        """Elements first..end-1 along one dimension of a tensor."""
        return self.tensor(name).narrow(dim, first, end - first)


def dense(tensor: Any) -> Tensor:
    """Return a tensor whose numbers are in memory, also of a `PackedTensor`."""
    found: Tensor = tensor
    if hasattr(tensor, "numbers"):
        found = tensor.numbers()
    return found


@dataclass(eq=False)
class NamedTensors(Store):
    """Tensors that are given, by their names."""

    where = "the state dict"
    tensors: Tensors

    def names(self) -> Iterable[str]:
        return self.tensors

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def tensor(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise ValueError(f"the state dict has no {name!r}, which its architecture asks for")
        return self.tensors[name]


@dataclass(eq=False)
class ModuleStore(Store):
    """The parameters of a module in memory, or wherever `accelerate` has put them.

    Attributes:
        prefix: of all names, before the module's own.
    """

    where = "the model"
    module: nn.Module
    prefix: str = ""

    def names(self) -> Iterable[str]:
        return [
            f"{self.prefix}{name}" for name, _ in self.module.named_parameters(remove_duplicate=False)
        ]

    def __contains__(self, name: str) -> bool:
        return self._find(name) is not None

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._of(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._of(name).dtype

    def tensor(self, name: str) -> Tensor:
        """Return a parameter's values, without a copy where they are in memory; fetched where they are offloaded."""
        from accelerate.utils import align_module_device

        parameter = self._of(name)
        owner = self._owner(name)
        if owner is None or not hasattr(owner, "_hf_hook"):
            return dense(parameter.detach())
        with align_module_device(owner):
            fetched: Tensor = getattr(owner, name.rpartition(".")[2]).detach().clone()
        return fetched

    def _of(self, name: str) -> Tensor:
        parameter = self._find(name)
        if parameter is None:
            raise ValueError(
                f"the model has no parameter {name!r}, which its architecture asks for; if it has adapters, merge "
                "adapters into the model first"
            )
        return parameter

    def _find(self, name: str) -> Tensor | None:
        """Find a parameter, or a buffer that is stored as one is."""
        owner = self._owner(name)
        last = name.rpartition(".")[2]
        if owner is None:
            return None
        stored = last not in owner._non_persistent_buffers_set
        return owner._parameters.get(last, owner._buffers.get(last) if stored else None)

    def _owner(self, name: str) -> nn.Module | None:
        """Find the module that has a parameter of its own, anew each time: parameters can be replaced."""
        if not name.startswith(self.prefix):
            return None
        owner: nn.Module | None = self.module
        for step in name.removeprefix(self.prefix).split(".")[:-1]:
            if owner is not None:
                owner = owner._modules.get(step)
        return owner


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
            summed = torch.promote_types(dtype, torch.float32)
            total = total.to(summed) + part.to(total.device, dtype).to(summed)
    if count == 1:
        return total
    return total.div_(count).to(dtype)


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
