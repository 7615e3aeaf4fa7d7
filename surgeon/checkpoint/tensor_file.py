"""Tensors that are read whole or in part when asked for, those of safetensors files above all: `Store`s of such.

A file begins with what it holds:

    8 bytes   length of the header, little-endian
    header    {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, ..., "__metadata__": {...}}
    data      the tensors one after the other, without gaps
"""

from __future__ import annotations

import json
import math
import stat
import struct
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from surgeon.errors import first_line

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


# Bytes that are read or written at a time, as cp does: they stay in the processor's cache.
BLOCK = 1 << 18


class StoredTensor(ABC):
    """A tensor that is read on demand.

    Attributes:
        paths: of the files that it lies in.
    """

    paths: tuple[Path, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size in the files."""
        return math.prod(self.shape) * self.dtype.itemsize

    @abstractmethod
    def read(self) -> Tensor:
        """Read the whole tensor."""

    def part(self, dim: int, first: int, end: int) -> Tensor:
        """Read elements first..end-1 along one dimension."""
        return self.read().narrow(dim, first, end - first).clone()

    def rows(self, count: int | None = None) -> Iterator[Tensor]:
        """Yield all rows in order, `count` at a time, or the whole tensor."""
        if count is None or not self.shape:
            yield self.read()
            return
        end = self.shape[0]
        for first in range(0, end, count):
            yield self.part(0, first, min(first + count, end))

    def blocks(self) -> Iterator[memoryview]:
        """Yield its bytes, a block at a time; each is valid until the next one is asked for."""
        yield memoryview(self.read().contiguous().view(torch.uint8).numpy().tobytes())


@dataclass(eq=False)
class FileTensor(StoredTensor):
    """A tensor in bytes begin..end-1 of a safetensors file.

    The file is opened anew for every reading: one that stays open keeps all that was ever read of it in memory.

    Attributes:
        name: in the file.
    """

    path: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    def __post_init__(self) -> None:
        self.paths = (self.path,)

    def read(self) -> Tensor:
        if 0 < self.num_bytes <= BLOCK:  # in less time than the header of a large file is parsed again
            return torch.frombuffer(bytearray(b"".join(self.blocks())), dtype=self.dtype).view(
                self.shape
            )
        with safe_open(self.path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(self.name)
        return tensor

    def part(self, dim: int, first: int, end: int) -> Tensor:
        with safe_open(self.path, framework="pt") as file:
            part: Tensor = file.get_slice(self.name)[(*[slice(None)] * dim, slice(first, end))]
        return part

    def blocks(self) -> Iterator[memoryview]:
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.begin)
            yield from blocks_of(file, self.end - self.begin, self.path)


class Derived(StoredTensor):
    """A tensor computed from stored ones, in the dtype of the first."""

    def __init__(
        self, sources: list[StoredTensor], shape: tuple[int, ...], make: Callable[[list[Tensor]], Tensor]
    ) -> None:
        self.sources = sources
        self.shape = shape
        self.make = make
        self.dtype = sources[0].dtype
        self.paths = tuple(path for one in sources for path in one.paths)

    def read(self) -> Tensor:
        return self.make([one.read() for one in self.sources])


class TensorFiles:
    """Tensors by name: those of some files, or those that a subclass finds.

    Attributes:
        where: the name in error messages.
        tensors: all of them, file by file.
    """

    needed_by = "its architecture"  # what a missing tensor is missing for

    def __init__(self, *paths: Path) -> None:
        self.where = str(paths[0]) if paths else ""
        self.tensors: dict[str, StoredTensor] = {}
        for path in paths:
            self._add(path)

    def _add(self, path: Path, expected: Collection[str] = ()) -> None:
        """Add one file's tensors, unexpected ones too: whatever loads the file, loads them."""
        held = read_header(path)
        for name in sorted(set(expected) - held.keys()):
            raise ValueError(f"tensor {name!r} is not in {path.name}, where the index says it is")
        for name in held:
            if name in self.tensors:
                raise ValueError(
                    f"tensor {name!r} is in {self.tensors[name].paths[0].name} and in {path.name} of {self.where}; "
                    "which of them is meant cannot be known"
                )
        self.tensors |= held

    def copy(self) -> TensorFiles:
        """Return the same tensors as a plain store."""
        same = TensorFiles()
        same.where = self.where
        same.tensors = dict(self.tensors)
        return same

    @property
    def paths(self) -> set[Path]:
        """The files that hold them."""
        return {path for one in self.tensors.values() for path in one.paths}

    def names(self) -> list[str]:
        return list(self.tensors)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def __getitem__(self, name: str) -> StoredTensor:
        if name not in self.tensors:
            raise ValueError(f"{self.where} has no tensor {name!r}, which {self.needed_by} asks for")
        return self.tensors[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self[name].dtype

    def tensor(self, name: str) -> Tensor:
        return self[name].read()

    def part(self, name: str, dim: int, first: int, end: int) -> Tensor:
        return self[name].part(dim, first, end)


def read_header(path: Path) -> dict[str, FileTensor]:
    """Read the tensors of a safetensors file by name, but not their values."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path} is not a regular file; weights are read from *.safetensors files only")
    try:
        # The library checks the header's numbers.
        with safe_open(path, framework="pt"), path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            entries = parse_json(file.read(length).decode())
    except (SafetensorError, ValueError) as error:
        raise ValueError(
            f"{path} is truncated or not a safetensors file ({first_line(error)}); fetch or copy it again"
        ) from error
    entries.pop("__metadata__", None)
    found = {}
    for name, entry in entries.items():
        if entry["dtype"] not in DTYPES:
            raise ValueError(
                f"tensor {name!r} in {path} has dtype {entry['dtype']}, which is not supported "
                f"(known: {', '.join(DTYPES)})"
            )
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        found[name] = FileTensor(path, name, DTYPES[entry["dtype"]], tuple(entry["shape"]), begin, end)
    return found


def parse_json(text: str) -> Any:
    """Parse JSON that is not nested too deeply, refusing an object with a key twice."""

    def without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            ((double, _),) = Counter(key for key, _ in pairs).most_common(1)
            raise ValueError(f"it has the key {double[:80]!r} twice")
        return found

    try:
        return json.loads(text, object_pairs_hook=without_doubles)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def blocks_of(file: FileIO, size: int, path: Path) -> Iterator[memoryview]:
    """Yield the next bytes of an unbuffered file, a block at a time, all in one buffer."""
    buffer = memoryview(bytearray(min(size, BLOCK)))
    while size:
        count = file.readinto(buffer[: min(size, BLOCK)])
        if not count:
            raise OSError(f"{path} became shorter while it was read")
        yield buffer[:count]
        size -= count
