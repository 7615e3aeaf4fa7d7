"""Formats in which ranks send what they add up: each names, packs and prices itself.

A further one is a class here, listed in WIRES: options, their help, collectives and predictions read that list. PyTorch
is imported where numbers are packed, because the help has to come fast.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor

OUTLIERS = 64  # one feature in so many is sent exactly


class Price(NamedTuple):
    """An estimate: how often each number is read or written, by kernels that do all of it at once, and how many."""

    accesses: float
    launches: int


class Wire(ABC):
    """A format of rows of floating-point numbers as bytes.

    Attributes:
        name: by which users ask for it.
        packing, unpacking: of each number that a rank packs, and of all ranks' numbers that it unpacks.
    """

    name: str
    packing = Price(6.0, 2)
    unpacking = Price(3.0, 1)

    @abstractmethod
    def parts(self, width: int, dtype: torch.dtype) -> list[tuple[int, torch.dtype]]:
        """Elements in each row of each part of the bytes, and their dtype, of rows of `width` numbers."""

    @abstractmethod
    def encode(self, rows: Tensor) -> Sequence[Tensor]:
        """Encode (rows, width) as parts, (rows, elements) each."""

    @abstractmethod
    def decode(self, parts: Sequence[Tensor], width: int, dtype: torch.dtype) -> Tensor:
        """Decode parts of several tensors, (tensors, rows, elements) each, to (tensors, rows, width)."""

    def count_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        width = shape[-1]
        return shape[:-1].numel() * sum(
            elements * one.itemsize for elements, one in self.parts(width, dtype)
        )

    def pack(self, tensor: Tensor) -> Tensor:
        """The bytes of a tensor, flat; each vector of its last dimension is a row."""
        import torch

        parts = self.encode(tensor.reshape(-1, tensor.shape[-1]))
        return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])

    def unpack(self, packed: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Unpack bytes of several tensors, (tensors, bytes), to (tensors, *shape) in float32 at least."""
        import torch

        rows = shape[:-1].numel()
        found: list[Tensor] = []
        start = 0
        for elements, one in self.parts(shape[-1], dtype):
            end = start + rows * elements * one.itemsize
            # A copy, because a part may begin where its dtype must not.
            part = packed[:, start:end].clone(memory_format=torch.contiguous_format).view(one)
            found.append(part.view(len(packed), rows, elements))
            start = end
        return self.decode(found, shape[-1], dtype).view(len(packed), *shape)


class Integers(Wire):
    """Integers of 8 or 4 bits, with the largest features kept exact.

    The method of Dong et al. 2024 as Layer Parallelism describes it in appendix B.1: a 64th of the features, those of
    the largest magnitude, travel in full precision. Here they are chosen for every row anew, as is a scale that takes
    the largest of the others to the largest integer. An integer is off by at most half a scale, so that a sum over
    ranks is off by at most half the sum of their scales.
    """

    def __init__(self, bits: int) -> None:
        self.name = f"int{bits}"
        self._paired = bits == 4  # two integers in a byte
        self._largest = (1 << bits - 1) - 1

    def parts(self, width: int, dtype: torch.dtype) -> list[tuple[int, torch.dtype]]:
        """Exact values, scale, places of the exact values, integers."""
        import torch

        exact = -(-width // OUTLIERS)
        integers = (-(-width // 2), torch.uint8) if self._paired else (width, torch.int8)
        return [(exact, dtype), (1, torch.float32), (exact, _place_dtype(width)), integers]

    def encode(self, rows: Tensor) -> Sequence[Tensor]:
        import torch

        width = rows.shape[1]
        places = rows.abs().topk(-(-width // OUTLIERS), sorted=False).indices
        values = rows.gather(-1, places)
        rest = rows.to(torch.promote_types(rows.dtype, torch.float32)).scatter(-1, places, 0)
        scales = (rest.abs().amax(-1, keepdim=True) / self._largest).float()
        rounded = (rest / torch.where(scales > 0, scales, 1)).round()
        # What is no number becomes one here, and none again when the scale, which is none either, multiplies it.
        integers = rounded.clamp(-self._largest, self._largest).nan_to_num().to(torch.int8)
        if self._paired:
            padded = torch.nn.functional.pad(integers, (0, width % 2))
            pairs = (padded + 8).to(torch.uint8).view(len(rows), -1, 2)
            integers = pairs[..., 0] | pairs[..., 1] << 4
        return values, scales, places.to(_place_dtype(width)), integers

    def decode(self, parts: Sequence[Tensor], width: int, dtype: torch.dtype) -> Tensor:
        import torch

        values, scales, places, integers = parts
        if self._paired:
            pairs = torch.stack([integers & 15, integers >> 4], -1).view(*integers.shape[:-1], -1)
            integers = pairs[..., :width].to(torch.int8) - 8
        wide = torch.promote_types(dtype, torch.float32)
        return (integers.to(wide) * scales).scatter(-1, places.long(), values.to(wide))


def _place_dtype(width: int) -> torch.dtype:
    import torch

    if width <= 1 << 15:
        return torch.int16
    return torch.int32


WIRES: dict[str, Wire] = {wire.name: wire for wire in (Integers(8), Integers(4))}
