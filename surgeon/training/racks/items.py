"""What racks hand each other: tensors under a key, as raw bytes behind a head of fixed form. Nothing is pickled."""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

KEY = struct.Struct("<qBI")  # step, kind, place
_HEAD = struct.Struct("<qBIBB")  # the key, dtype, dimensions; the shape and the checksum follow
_CHECKSUM = struct.Struct("<I")
_MOST_DIMENSIONS = 8
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_TOO_SHORT = "what is read ends too early"


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

    @classmethod
    def unpack(cls, data: bytes) -> ItemKey:
        """A key as `KEY` packs it.

        Raises:
            ValueError: if it is none.
        """
        step, kind, place = KEY.unpack(data)
        return cls(step, ItemKind(kind), place)


BEGINNING = ItemKey(-1, ItemKind.TRAINING)  # before all others


@dataclass(frozen=True)
class Item:
    """A tensor as it lies on disk and goes over the wire.

    Attributes:
        head: all else that there is to know of it: key, dtype, shape, and a checksum of these and the numbers.
        data: the numbers, as the machine has them (little-endian on all that PyTorch runs on).
    """

    key: ItemKey
    head: bytes
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
        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        head = _HEAD.pack(*key, _DTYPES.index(tensor.dtype), tensor.dim())
        head += struct.pack(f"<{tensor.dim()}Q", *tensor.shape)
        return cls(key, head + _CHECKSUM.pack(zlib.crc32(data, zlib.crc32(head))), data)

    @property
    def nbytes(self) -> int:
        """What `write` writes."""
        return len(self.head) + len(self.data)

    def write(self, file: BinaryIO) -> None:
        """Write it to a file, or to a socket's."""
        file.write(self.head)
        file.write(self.data)

    @classmethod
    def read(cls, file: BinaryIO) -> Item:
        """What `write` has written.

        Raises:
            EOFError: if the file ends before.
            ValueError: if this is no item.
        """
        key, head, size = read_head(file)
        data = bytearray(size)
        if file.readinto(data) < size:  # type: ignore[attr-defined]  # files and sockets have it
            raise EOFError(_TOO_SHORT)
        return cls(key, head, data)

    def tensor(self) -> Tensor:
        """The tensor, whose numbers are its own.

        Raises:
            ValueError: if they are not what was sent.
        """
        rest = self.head[: -_CHECKSUM.size]
        if _CHECKSUM.pack(zlib.crc32(self.data, zlib.crc32(rest))) != self.head[-_CHECKSUM.size :]:
            raise ValueError(f"{self.key} is damaged: its numbers do not have the checksum that they were given")
        dtype, dimensions = _HEAD.unpack_from(rest)[-2:]
        shape = struct.unpack_from(f"<{dimensions}Q", rest, _HEAD.size)
        if not self.data:
            return torch.empty(shape, dtype=_DTYPES[dtype])
        data = self.data if isinstance(self.data, bytearray) else bytearray(self.data)
        return torch.frombuffer(data, dtype=_DTYPES[dtype]).reshape(shape)


def read_head(file: BinaryIO) -> tuple[ItemKey, bytes, int]:
    """The key and the head of an item, and how many bytes of numbers follow; errors as of `Item.read`."""
    head = read_exactly(file, _HEAD.size)
    step, kind, place, dtype, dimensions = _HEAD.unpack(head)
    if dtype >= len(_DTYPES) or dimensions > _MOST_DIMENSIONS:
        raise ValueError("this is no item of a rack")
    key = ItemKey(step, ItemKind(kind), place)
    lengths = read_exactly(file, 8 * dimensions)
    size = math.prod(struct.unpack(f"<{dimensions}Q", lengths)) * _DTYPES[dtype].itemsize
    return key, head + lengths + read_exactly(file, _CHECKSUM.size), size


def read_exactly(file: BinaryIO, count: int) -> bytes:
    """So many bytes.

    Raises:
        EOFError: if there are fewer.
    """
    found = file.read(count)
    if len(found) < count:
        raise EOFError(_TOO_SHORT)
    return found
