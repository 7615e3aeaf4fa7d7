"""What racks hand each other: tensors under a key, as raw bytes behind a header of fixed form. Nothing is pickled."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

_HEAD = struct.Struct("<4sBBBxqqQI")  # mark, kind, dtype, dimensions, step, place, bytes, checksum
_MARK = b"rack"
_MOST_DIMENSIONS = 8
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

Read = Callable[[int], bytearray]  # exactly so many bytes


class ItemKind(IntEnum):
    """What an item is, in the order in which a rack makes them after the same number of steps."""

    TRAINING = 0
    HELD_OUT = 1
    CODA = 2


class ItemKey(NamedTuple):
    """Which item; keys are ordered as a rack makes the items.

    Attributes:
        step: of training, from 1: the step that it is an input of; of others, how many steps had been made.
        place: of training, which window of the step's batch; of held-out text, which window.
    """

    step: int
    kind: ItemKind
    place: int = 0

    def __str__(self) -> str:
        what = {
            ItemKind.TRAINING: f"window {self.place} of",
            ItemKind.HELD_OUT: f"held-out window {self.place} after",
            ItemKind.CODA: "the coda after",
        }[self.kind]
        return f"{what} step {self.step}"


@dataclass(frozen=True)
class Item:
    """A tensor as it lies on disk and goes over the wire.

    Attributes:
        header: kind, step, place, dtype, shape, and a checksum of the numbers.
        data: the numbers, as the machine has them (little-endian on all that PyTorch runs on).
    """

    key: ItemKey
    header: bytes
    data: bytes | bytearray

    @classmethod
    def of(cls, key: ItemKey, tensor: Tensor) -> Item:
        """An item with a copy of a tensor, of any shape.

        Raises:
            ValueError: if its numbers are of a type that is not sent.
        """
        if tensor.dtype not in _DTYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
            raise ValueError(f"{key} has numbers of type {tensor.dtype}, and racks exchange {known}")
        flat = tensor.detach().cpu().contiguous().view(-1)
        data = flat.view(torch.uint8).numpy().tobytes()
        kind, place = int(key.kind), key.place
        head = _HEAD.pack(
            _MARK, kind, _DTYPES.index(tensor.dtype), tensor.dim(), key.step, place, len(data), zlib.crc32(data)
        )
        return cls(key, head + struct.pack(f"<{tensor.dim()}q", *tensor.shape), data)

    @property
    def nbytes(self) -> int:
        """With its header."""
        return len(self.header) + len(self.data)

    def tensor(self) -> Tensor:
        """The tensor, whose numbers are its own.

        Raises:
            ValueError: if they are not what was sent.
        """
        head = _HEAD.unpack_from(self.header)
        if zlib.crc32(self.data) != head[-1]:
            raise ValueError(f"{self.key} is damaged: its numbers do not have the checksum that they were given")
        shape = struct.unpack_from(f"<{head[3]}q", self.header, _HEAD.size)
        if not self.data:
            return torch.empty(shape, dtype=_DTYPES[head[2]])
        held = self.data if isinstance(self.data, bytearray) else bytearray(self.data)
        return torch.frombuffer(held, dtype=_DTYPES[head[2]]).reshape(shape)


def read_header(read: Read) -> tuple[ItemKey, bytes, int]:
    """An item's key, its header, and how many bytes its numbers have.

    Args:
        read: what comes next, of a file or a connection.

    Raises:
        ValueError: if this is no item.
        EOFError: as `read` raises it.
    """
    head = bytes(read(_HEAD.size))
    mark, kind, dtype, dimensions, step, place, size, _ = _HEAD.unpack(head)
    if mark != _MARK or kind not in set(ItemKind) or dtype >= len(_DTYPES) or dimensions > _MOST_DIMENSIONS:
        raise ValueError("this is no item of a rack")
    lengths = bytes(read(8 * dimensions))
    shape = struct.unpack(f"<{dimensions}q", lengths)
    if min(shape, default=0) < 0 or math.prod(shape) * _DTYPES[dtype].itemsize != size:
        raise ValueError(f"{ItemKey(step, ItemKind(kind), place)} says that {shape} has {size} bytes")
    return ItemKey(step, ItemKind(kind), place), head + lengths, size
