"""A matrix that several stored tensors hold in few bits: codes, scales, zero points."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from surgeon.models.weights.store import Store, Tensors


class Along(NamedTuple):
    """Where a dimension of a matrix lies in one of its tensors.

    Attributes:
        dim: of the tensor.
        per_element: elements of the tensor along it for one of the matrix: 1/128 for a scale of 128 columns.
    """

    dim: int
    per_element: Fraction = Fraction(1)

    def bounds(self, first: int, end: int) -> tuple[int, int]:
        """The tensor's elements for those of the matrix from first to end-1."""
        return math.floor(first * self.per_element), math.ceil(end * self.per_element)


@dataclass(frozen=True)
class Arrangement:
    """How tensors hold a matrix.

    Attributes:
        shape: of the matrix.
        along: for each tensor (by its ending) where each of the matrix's dimensions lies in it; None where the tensor
            has the same for all of that dimension.
        whole: dimensions along which no part can be told from the others.
    """

    shape: tuple[int, ...]
    along: Mapping[str, tuple[Along | None, ...]]
    whole: tuple[int, ...] = ()

    def unit(self, dim: int) -> int:
        """How many elements along a dimension begin and end with an element of every tensor."""
        places = (along[dim] for along in self.along.values())
        return math.lcm(*(place.per_element.denominator for place in places if place is not None))


class Scheme(ABC):
    """One way to store matrices in several tensors, with what config.json says of it.

    Attributes:
        needed: endings of the tensors that hold a matrix, behind the name of its module.
        optional: endings of further ones, which belong to it where they are there.
        stands_for: what the matrix is called behind the name of its module.
        writes_biases: whether modules have zeros for a bias where their architecture has none.
    """

    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()
    stands_for = ".weight"
    writes_biases = False

    @property
    @abstractmethod
    def description(self) -> str:
        """For people: "FP8 in blocks of 128 x 128"."""

    @abstractmethod
    def holds(self, parts: Mapping[str, str], store: Store) -> bool:
        """Whether what a module has of these tensors, by ending, is a matrix in this scheme; some may be missing."""

    @abstractmethod
    def arrangement(self, parts: Mapping[str, str], store: Store) -> Arrangement:
        """How a matrix's tensors hold it.

        Raises:
            ValueError: if they cannot.
        """

    def stated(self, ending: str, shape: tuple[int, ...]) -> Tensor | None:  # noqa: ARG002
        """What a tensor of a whole matrix is, if it follows from the matrix's shape; else None."""
        return None

    @abstractmethod
    def values(self, tensors: Tensors, shape: tuple[int, ...]) -> Tensor:
        """The numbers of a matrix, or of a part that begins and ends with an element of every tensor, in float32."""


@dataclass(frozen=True)
class Quantised:
    """A matrix of which codes and scales are stored.

    Its numbers are computed when they are asked for: whole or in part, in float32, which rounds none of them to fewer
    digits than the format has.

    Attributes:
        name: that it has for its architecture.
        parts: the names of its tensors by their endings.
    """

    store: Store
    name: str
    scheme: Scheme
    parts: Mapping[str, str]

    dtype = torch.float32

    @property
    def shape(self) -> tuple[int, ...]:
        """(out_features, in_features), or as its architecture stores several stacked ones."""
        return self.arrangement.shape

    @cached_property
    def arrangement(self) -> Arrangement:
        """How its tensors hold it.

        Raises:
            ValueError: if their shapes do not fit each other.
        """
        found = self.scheme.arrangement(self.parts, self.store)
        for ending, along in found.along.items():
            stored = self.store.shape(self.parts[ending])
            for size, place in zip(found.shape, along, strict=True):
                wanted = 0 if place is None else place.bounds(0, size)[1]
                if place is not None and (place.dim >= len(stored) or stored[place.dim] != wanted):
                    raise ValueError(
                        f"{self.store.where}: tensor {self.parts[ending]} has the shape {stored}, and "
                        f"{self.scheme.description} needs {wanted} along dimension {place.dim} for a matrix of "
                        f"{' x '.join(map(str, found.shape))}; is the file whole, and the quantization_config its own?"
                    )
        return found

    def whole(self, dtype: torch.dtype | None = None) -> Tensor:
        """All values, in another dtype if one is given."""
        values = self.scheme.values({end: self.store.tensor(name) for end, name in self.parts.items()}, self.shape)
        return values if dtype is None else values.to(dtype)

    def rows(self, first: int, end: int) -> Tensor:
        """Rows first..end-1."""
        return self.part(0, first, end)

    def part(self, dim: int, first: int, end: int) -> Tensor:
        """Elements first..end-1 along one dimension; little else is read."""
        if dim in self.arrangement.whole:
            return self.whole().narrow(dim, first, end - first)
        unit, shape = self.arrangement.unit(dim), list(self.shape)
        begin, stop = first // unit * unit, min(math.ceil(end / unit) * unit, shape[dim])
        shape[dim] = stop - begin
        tensors = {}
        for ending, name in self.parts.items():
            place = self.arrangement.along.get(ending, (None,) * len(shape))[dim]
            tensors[ending] = (
                self.store.tensor(name)
                if place is None
                else self.store.part(name, place.dim, *place.bounds(begin, stop))
            )
        return self.scheme.values(tensors, tuple(shape)).narrow(dim, first - begin, end - first)
