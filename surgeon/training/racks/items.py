"""What racks hand each other: tensors under a key, as safetensors with a checksum, on disk as on the wire."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import BinaryIO, NamedTuple

from safetensors.torch import load, save
from torch import Tensor

KEY = struct.Struct("<qBI")  # step, kind, place
_HEAD = struct.Struct("<qBIQI")  # the key, bytes, checksum of both
_NAME = "numbers"


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
        data: the tensor as safetensors.
        checksum: of key and data.
    """

    key: ItemKey
    data: bytes
    checksum: int

    @classmethod
    def of(cls, key: ItemKey, tensor: Tensor) -> Item:
        """An item with a copy of a tensor, of any shape."""
        data = save({_NAME: tensor.detach().cpu().contiguous()})
        return cls(key, data, _checksum(key, data))

    @property
    def nbytes(self) -> int:
        """What `write` writes."""
        return _HEAD.size + len(self.data)

    def write(self, file: BinaryIO) -> None:
        """Write it to a file, or to a socket's."""
        file.write(_HEAD.pack(*self.key, len(self.data), self.checksum))
        file.write(self.data)

    @classmethod
    def read(cls, file: BinaryIO) -> Item:
        """What `write` has written.

        Raises:
            EOFError: if the file ends before.
            ValueError: if this is no item.
        """
        key, size, checksum = read_head(file)
        return cls(key, read_exactly(file, size), checksum)

    def tensor(self) -> Tensor:
        """The tensor, whose numbers are its own.

        Raises:
            ValueError: if they are not what was sent.
        """
        if _checksum(self.key, self.data) != self.checksum:
            raise ValueError(f"{self.key} is damaged: it does not have the checksum that it was given")
        return load(self.data)[_NAME]


def read_head(file: BinaryIO) -> tuple[ItemKey, int, int]:
    """The key, bytes and checksum of the item whose data follow; errors as of `Item.read`."""
    step, kind, place, size, checksum = _HEAD.unpack(read_exactly(file, _HEAD.size))
    return ItemKey(step, ItemKind(kind), place), size, checksum


def read_exactly(file: BinaryIO, count: int) -> bytes:
    """So many bytes.

    Raises:
        EOFError: if there are fewer.
    """
    found = file.read(count)
    if len(found) < count:
        raise EOFError("what is read ends too early")
    return found


def _checksum(key: ItemKey, data: bytes) -> int:
    return zlib.crc32(data, zlib.crc32(KEY.pack(*key)))
