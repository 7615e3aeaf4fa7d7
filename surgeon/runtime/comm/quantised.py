"""Reductions that send activations as 8- or 4-bit integers, with the largest features kept exact.

The method of Dong et al. 2024 as Layer Parallelism describes it in appendix B.1: a 64th of the features, those of the
largest magnitude, travel in full precision, the others as integers. Here both are chosen for every token (row) anew:
its largest features, and a scale that takes the largest of the others to the largest integer. An integer is off by at
most half a scale, so that a sum over ranks is off by at most half the sum of their scales.

Every rank sends its packed part to all others and adds up what arrives, its own part as the others see it, so that all
ranks have the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from surgeon.runtime.comm.collectives import Around, Collectives, Counts

Compression = Literal["int8", "int4"]

LARGEST_INTEGER: dict[Compression, int] = {"int8": 127, "int4": 7}
OUTLIERS = 64  # one feature in so many is sent exactly


@dataclass(frozen=True)
class Packing:
    """How rows of floating-point numbers become bytes: exact values, scales, places of the exact values, integers.

    Attributes:
        shape: of the tensor; its last dimension are the features of a row.
        dtype: of the tensor.
    """

    kind: Compression
    shape: torch.Size
    dtype: torch.dtype

    @property
    def width(self) -> int:
        """Features of a row."""
        return self.shape[-1]

    @property
    def rows(self) -> int:
        return self.shape[:-1].numel()

    @property
    def exact(self) -> int:
        """How many features of a row are sent exactly."""
        return -(-self.width // OUTLIERS)

    @property
    def _index_dtype(self) -> torch.dtype:
        if self.width <= 1 << 15:
            return torch.int16
        return torch.int32

    @property
    def _wide(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    def _parts(self) -> list[tuple[int, torch.dtype]]:
        """Elements in a row, and their dtype, of each part of the bytes."""
        integers = self.width if self.kind == "int8" else -(-self.width // 2)
        return [
            (self.exact, self.dtype),
            (1, torch.float32),
            (self.exact, self._index_dtype),
            (integers, torch.int8 if self.kind == "int8" else torch.uint8),
        ]

    @property
    def nbytes(self) -> int:
        """How many bytes they become."""
        return self.rows * sum(elements * dtype.itemsize for elements, dtype in self._parts())

    def pack(self, tensor: Tensor) -> Tensor:
        """The bytes of a tensor of this shape and dtype, flat."""
        rows = tensor.reshape(self.rows, self.width)
        places = rows.abs().topk(self.exact, sorted=False).indices
        values = rows.gather(-1, places)
        rest = rows.to(self._wide).scatter(-1, places, 0)
        scales = (rest.abs().amax(-1, keepdim=True) / LARGEST_INTEGER[self.kind]).float()
        integers = (rest / torch.where(scales > 0, scales, 1)).round()
        # What is no number becomes one here, and none again when the scale, which is none either, multiplies it.
        integers = integers.clamp(-LARGEST_INTEGER[self.kind], LARGEST_INTEGER[self.kind]).nan_to_num().to(torch.int8)
        parts = values, scales, places.to(self._index_dtype), self._narrowed(integers)
        return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])

    def unpack(self, packed: Tensor) -> Tensor:
        """What bytes of several tensors, (tensors, bytes), stand for: (tensors, rows, features), at least float32."""
        found = []
        start = 0
        for elements, dtype in self._parts():
            end = start + self.rows * elements * dtype.itemsize
            # A copy, because a part may begin where its dtype must not.
            part = packed[:, start:end].clone(memory_format=torch.contiguous_format).view(dtype)
            found.append(part.view(len(packed), self.rows, elements))
            start = end
        values, scales, places, integers = found
        rows = self._widened(integers).to(self._wide) * scales
        return rows.scatter(-1, places.long(), values.to(self._wide))

    def _narrowed(self, integers: Tensor) -> Tensor:
        if self.kind == "int8":
            return integers
        if self.width % 2:
            integers = torch.nn.functional.pad(integers, (0, 1))
        pairs = (integers + 8).to(torch.uint8).view(self.rows, -1, 2)
        return pairs[..., 0] | pairs[..., 1] << 4

    def _widened(self, integers: Tensor) -> Tensor:
        if self.kind == "int8":
            return integers
        pairs = torch.stack([integers & 15, integers >> 4], -1).view(*integers.shape[:-1], -1)
        return pairs[..., : self.width].to(torch.int8) - 8


class Compressed(Around):
    """Other collectives, whose reductions of floating-point numbers send integers; all-gathers stay as they are.

    A reduction is counted as what it is on the wire: an all-gather of the packed bytes.
    """

    def __init__(self, inner: Collectives, kind: Compression) -> None:
        super().__init__(inner)
        self.recordable = False
        self.kind: Compression = kind

    def around(self, inner: Collectives) -> Collectives:
        return Compressed(inner, self.kind)

    @property
    def exact(self) -> Collectives:
        return self.inner

    def all_reduce(self, tensor: Tensor, counts: Counts, at_once: bool = False) -> Callable[[], Tensor]:
        """Start summing a tensor over the group, approximately; waiting on the result gives the sum."""
        if len(self.group) == 1 or not tensor.is_floating_point():
            return self.inner.all_reduce(tensor, counts, at_once)
        packing = Packing(self.kind, tensor.shape, tensor.dtype)
        wait = self.inner.start_all_gather(packing.pack(tensor), counts, at_once)
        return lambda: packing.unpack(wait()).sum(0).to(packing.dtype).view(packing.shape)

    def _all_reduce(self, tensor: Tensor, at_once: bool) -> Callable[[], Tensor]:
        return self.all_reduce(tensor, Counts(), at_once)
