"""A matrix that several stored tensors hold in few bits: codes, scales, zero points.

A scheme declares these tensors, their shapes, types and some values (`PartSpec`), which are checked here for all
schemes before anything is made of them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from surgeon.models.weights.store import Store, Tensors

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INDICES = (torch.int32, torch.int64)


class Along(NamedTuple):
    """A dimension of a matrix in one of its tensors.

    Attributes:
        dim: of the tensor.
        per_element: elements of the tensor along it for one of the matrix: 1/128 for a scale of 128 columns.
    """

    dim: int
    per_element: Fraction = Fraction(1)

    def bounds(self, first: int, end: int) -> tuple[int, int]:
        """Return the tensor's elements for those of the matrix from first to end-1."""
        # A product with a fraction takes ten times as long.
        part, of = self.per_element.as_integer_ratio()
        return first * part // of, -(-end * part // of)


class PartSpec(NamedTuple):
    """One of the tensors that hold a matrix.

    Attributes:
        dtypes: that it may have; nothing is asked of a tensor without any.
        along: each of the matrix's dimensions in it; None where it has the same for all of that dimension.
        sizes: of its dimensions that are none of the matrix's, (dimension, size).
        ones_follow: whether dimensions of one element may follow these.
        below: its values are whole numbers from 0 on, and less than this; None for any.
        meaning: of such values, for people.
    """

    dtypes: tuple[torch.dtype, ...] = ()
    along: tuple[Along | None, ...] = ()
    sizes: tuple[tuple[int, int], ...] = ()
    ones_follow: bool = False
    below: int | None = None
    meaning: str = ""

    def shape(self, of: tuple[int, ...]) -> tuple[int, ...]:
        sizes = dict(self.sizes)
        for size, place in zip(of, self.along, strict=False):  # `along` may be empty
            if place is not None:
                sizes[place.dim] = place.bounds(0, size)[1]
        return tuple(sizes[dim] for dim in range(len(sizes)))


@dataclass(frozen=True)
class Arrangement:
    """Tensors that hold a matrix.

    Attributes:
        shape: of the matrix.
        by: the ending of the tensor that says so.
        parts: every tensor that holds it, by its ending.
        whole: dimensions along which no part can be told from the others.
    """

    shape: tuple[int, ...]
    by: str
    parts: Mapping[str, PartSpec]
    whole: tuple[int, ...] = ()

    def place(self, ending: str, dim: int) -> Along | None:
        along = self.parts[ending].along
        if along:
            return along[dim]
        return None

    def unit(self, dim: int) -> int:
        """Count the elements along a dimension that begin and end with an element of every tensor."""
        places = (self.place(ending, dim) for ending in self.parts)
        return math.lcm(*(place.per_element.denominator for place in places if place is not None))


class Scheme(ABC):
    """One way to store matrices in several tensors, as config.json describes it.

    Attributes:
        needed: endings of the tensors that hold every matrix, behind the name of its module.
        optional: endings of further ones; a matrix's arrangement says which it has.
        stands_for: the matrix's name behind that of its module.
        writes_biases: whether modules have zeros for a bias where their architecture has none.
    """

    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()
    stands_for = ".weight"
    writes_biases = False

    @property
    @abstractmethod
    def description(self) -> str:
        """Name it for people: "FP8 in blocks of 128 x 128"."""

    @abstractmethod
    def arrangement(self, matrix: Quantised) -> Arrangement:
        """Arrange a matrix's tensors; all that are needed are there.

        Raises:
            ValueError: if they do not say what shape it has.
        """

    def derive_tensor(self, ending: str, shape: tuple[int, ...]) -> Tensor | None:  # noqa: ARG002
        """Return a tensor of a whole matrix that follows from the matrix's shape; else None."""
        return None

    @abstractmethod
    def values(self, tensors: Tensors, shape: tuple[int, ...]) -> Tensor:
        """Compute a matrix, or a part that begins and ends with an element of every tensor, in float32."""


@dataclass(frozen=True)
class Quantised:
    """A matrix of which codes and scales are stored.

    Numbers are computed when they are asked for, in float32, which rounds none of them to fewer digits than the format
    has.

    Attributes:
        name: for its architecture.
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
        """Tensors that hold it, checked.

        Raises:
            ValueError: naming the first one that is missing, too many, or not what the scheme has there.
        """
        self._require(self.scheme.needed)
        found = self.scheme.arrangement(self)
        self._require(found.parts)
        for ending, name in self.parts.items():
            part = found.parts.get(ending)
            if part is None:
                raise self.fault(
                    ending, f"belongs to no {self.scheme.description} as quantization_config has it"
                )
            if not part.dtypes:
                continue
            dtype = self.store.dtype(name)
            if dtype not in part.dtypes:
                held, *allowed = (str(one).removeprefix("torch.") for one in (dtype, *part.dtypes))
                raise self.fault(
                    ending, f"holds {held}, and {self.scheme.description} needs {' or '.join(allowed)}"
                )
            stored = self.store.shape(name)
            wanted = part.shape(found.shape)
            rest = stored[len(wanted) :]
            if stored[: len(wanted)] != wanted or (rest and (not part.ones_follow or set(rest) != {1})):
                size = f"{' x '.join(map(str, found.shape))}, by {self.parts[found.by]}"
                needed = f"{self.scheme.description} needs {wanted} for a matrix of {size}"
                raise self.fault(ending, f"has the shape {stored}, and {needed}")
            stated = self.scheme.derive_tensor(ending, found.shape)
            if stated is not None and not torch.equal(self.tensor(ending).long(), stated.long()):
                raise self.fault(ending, f"should hold {part.meaning}")
            if part.below is not None:
                values = self.tensor(ending).double()
                outside = values[~((values >= 0) & (values < part.below))]
                if len(outside):
                    raise self.fault(
                        ending, f"holds {outside[0].item():g}, and should hold {part.meaning}"
                    )
        return found

    def size(self, ending: str, dimensions: int) -> tuple[int, ...]:
        """Return the shape of one of its tensors; refuse other numbers of dimensions, and no elements."""
        stored = self.store.shape(self.parts[ending])
        if len(stored) != dimensions or 0 in stored:
            raise self.fault(
                ending, f"has the shape {stored}, not {dimensions} dimensions with something in them"
            )
        return stored

    def tensor(self, ending: str) -> Tensor:
        return self.store.tensor(self.parts[ending])

    def fault(self, ending: str, what: str) -> ValueError:
        """Say that one of its tensors is wrong."""
        return ValueError(
            f"{self.store.where}: tensor {self.parts[ending]} {what}; is its file whole, and the quantization_config "
            "in config.json its own?"
        )

    def _require(self, endings: Mapping[str, PartSpec] | tuple[str, ...]) -> None:
        for ending in endings:
            if ending not in self.parts:
                module = self.name.removesuffix(self.scheme.stands_for)
                raise ValueError(
                    f"{self.store.where} has no tensor {module}{ending}, which {self.scheme.description} needs beside "
                    f"{next(iter(self.parts.values()))}"
                )

    def whole(self, dtype: torch.dtype | None = None) -> Tensor:
        shape = self.shape
        values = self.scheme.values({ending: self.tensor(ending) for ending in self.parts}, shape)
        if dtype is None:
            return values
        return values.to(dtype)

    def rows(self, first: int, end: int) -> Tensor:
        return self.part(0, first, end)

    def part(self, dim: int, first: int, end: int) -> Tensor:
        """Compute elements first..end-1 along one dimension; little else is read."""
        shape = list(self.shape)
        if first == end:  # of a rank that has no heads
            shape[dim] = 0
            return torch.empty(shape)
        if dim in self.arrangement.whole:
            return self.whole().narrow(dim, first, end - first)
        unit = self.arrangement.unit(dim)
        begin = first // unit * unit
        stop = min(math.ceil(end / unit) * unit, shape[dim])
        shape[dim] = stop - begin
        tensors = {}
        for ending, name in self.parts.items():
            place = self.arrangement.place(ending, dim)
            tensors[ending] = (
                self.tensor(ending)
                if place is None
                else self.store.part(name, place.dim, *place.bounds(begin, stop))
            )
        return self.scheme.values(tensors, tuple(shape)).narrow(dim, first - begin, end - first)


# Operations that leave it packed: those that turn it, that move or round it, and that hand it on.
_TURNED = (torch.ops.aten.t.default, torch.ops.aten.transpose.int)
_COPIED = torch.ops.aten._to_copy.default
_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.clone.default)
_PACKED = (*_TURNED, _COPIED, *_SAME)


class PackedTensor(Tensor):
    """A quantised matrix in the memory of what is stored: any operation on it is one on its numbers, made anew for it.

    Autograd keeps it packed for a backward pass, so that a base that is not trained has no dense copy (QLoRA, Dettmers
    et al. 2023, arXiv 2305.14314, section 3). The numbers are those of `Quantised.whole`, in this tensor's dtype.

    Args:
        parts: the tensors that hold it, by their endings.
        size: the matrix's shape.
        dtype: of its numbers.
        turned: whether this is the matrix transposed.
    """

    parts: Tensors
    scheme: Scheme
    size_stored: tuple[int, ...]
    turned: bool

    @staticmethod
    def __new__(
        cls,
        parts: Tensors,
        scheme: Scheme,
        size: Sequence[int],
        dtype: torch.dtype,
        turned: bool = False,
    ) -> PackedTensor:
        rows, columns = size
        shape, strides = ((columns, rows), (1, columns)) if turned else ((rows, columns), (columns, 1))
        device = next(iter(parts.values())).device
        made: PackedTensor = Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, dtype=dtype, device=device
        )
        made.parts = parts
        made.scheme = scheme
        made.size_stored = tuple(size)
        made.turned = turned
        return made

    @classmethod
    def of(cls, matrix: Quantised, dtype: torch.dtype = torch.float32) -> PackedTensor:
        """Read the tensors of a stored matrix."""
        parts = {ending: matrix.store.tensor(name) for ending, name in matrix.parts.items()}
        return cls(parts, matrix.scheme, matrix.shape, dtype)

    def numbers(self) -> Tensor:
        """Compute the matrix, in memory of its own."""
        values = self.scheme.values(self.parts, self.size_stored).to(self.dtype).contiguous()
        if self.turned:
            return values.T
        return values

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PackedTensor({self.scheme.description}, {tuple(self.shape)}, {self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Have PyTorch move it as one tensor, not as one that wraps others."""
        return [], self

    @staticmethod
    def __tensor_unflatten__(inner: Any, made_of: PackedTensor, *shape: Any) -> PackedTensor:
        return made_of

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run an operation on the numbers; one that hands the matrix on, turns, moves or rounds it leaves it packed."""
        first = args[0]
        kwargs = kwargs or {}
        if isinstance(first, cls):
            if function in _PACKED:
                parts = first.parts
                dtype = first.dtype
                if function is _COPIED:
                    device = kwargs.get("device") or first.device
                    parts = {ending: part.to(device) for ending, part in parts.items()}
                    dtype = kwargs.get("dtype") or dtype
                turned = first.turned != (function in _TURNED)
                return PackedTensor(parts, first.scheme, first.size_stored, dtype, turned)
            if function._schema.is_mutable:
                raise TypeError(
                    f"{first} stays as it is stored, and is not changed in place by {function}"
                )
        args, kwargs = tree_map_only(PackedTensor, PackedTensor.numbers, (args, kwargs))
        return function(*args, **kwargs)


WORD = 32  # bits that codes are packed into
# FP4 (E2M1): three bits of size, the highest one the sign.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_E2M1, *(-value for value in _E2M1))
EXPONENT_BIAS = 127  # of E8M0: a byte is the exponent of two, and nothing else


def codes_of(words: Tensor, bits: int, dim: int, places: Sequence[int] | None = None) -> Tensor:
    """Unpack unsigned codes of int32 words, the lowest bits first: 32 / bits as many along one dimension, in uint8.

    Args:
        places: of each element among a word's codes, where they are not in order.
    """
    # A byte is moved in less time.
    parts = words.contiguous().view(torch.uint8).unflatten(-1, (-1, WORD // 8, 1))
    if bits < 8:
        parts = torch.cat([(parts >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)], -1)
    codes: Tensor = parts.flatten(-2)
    if places is not None:
        codes = codes[..., list(places)]
    return codes.movedim(-1, dim + 1).flatten(dim, dim + 1)


def pairs_of(packed: Tensor, table: Tensor, high_first: bool) -> Tensor:
    """Look up the two codes of four bits in each byte, (..., n) to (..., 2 n), in float32."""
    # Both values of every byte, that of its high bits first.
    both = torch.cartesian_prod(table.float(), table.float())
    # Two numbers, looked up as one.
    one = torch.view_as_complex((both if high_first else both.flip(-1)).contiguous())
    found = torch.view_as_real(one.index_select(0, packed.flatten().int()))
    return found.view(*packed.shape[:-1], -1)


def scales_of(stored: Tensor) -> Tensor:
    """Read scales in float32; bytes are exponents of two (E8M0)."""
    if stored.dtype == torch.uint8:
        return torch.exp2(stored.float() - EXPONENT_BIAS)
    return stored.float()


def scale_values(
    values: Tensor, scales: Tensor, block: tuple[int, int], zeros: Tensor | None = None
) -> Tensor:
    """Compute (values - zeros) * scales of a matrix, in float32, with a scale and a zero point for each of its blocks.

    Args:
        block: rows and columns of one; 0 for all of them. The last ones may reach beyond the matrix.
    """
    found = values.to(torch.float32, copy=True)
    sizes = [size or count for size, count in zip(block, values.shape, strict=True)]
    whole = all(count % size == 0 for size, count in zip(sizes, values.shape, strict=True))
    if whole:
        view = found.unflatten(1, (-1, sizes[1])).unflatten(0, (-1, sizes[0]))
    else:
        view = found

    def each(grid: Tensor) -> Tensor:
        grid = (grid if grid.dim() == 2 else grid.reshape(-1, 1)).float()
        if whole:
            return grid[:, None, :, None]
        by_row = grid.repeat_interleave(sizes[0], 0)[: len(values)]
        return by_row.repeat_interleave(sizes[1], 1)[:, : values.shape[1]]

    if zeros is not None:
        view.sub_(each(zeros))
    view.mul_(each(scales))
    return found


def mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Compute microscaling FP4, (..., 32 n): blocks (..., n, 16) of 32 codes, low bits first, exponents (..., n)."""
    table = torch.tensor(E2M1, device=blocks.device)
    return (pairs_of(blocks, table, high_first=False) * scales_of(scales).unsqueeze(-1)).flatten(-2)
