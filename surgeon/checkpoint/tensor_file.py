"""Tensors in safetensors files, read whole or in part when asked for: a `Store` of `surgeon.models.weights`.

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
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
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


@dataclass(frozen=True)
class Entry:
    """What a header says of a tensor, which lies in bytes begin..end-1 of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file by name; nothing else of it is read.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is no regular file, is truncated, or its header does not describe what it holds.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path} is not a regular file; weights are read from *.safetensors files only")
    try:
        with safe_open(path, framework="pt"), path.open("rb") as file:  # the library checks the header's numbers
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
        found[name] = Entry(DTYPES[entry["dtype"]], tuple(entry["shape"]), begin, end)
    return found


def parse_json(text: str) -> Any:
    """JSON in which no object has a key twice, and nothing is nested without end.

    Raises:
        ValueError: saying what is wrong with it.
    """

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


# Bytes that are read or written at a time, as cp does: they stay in the processor's cache.
BLOCK = 1 << 18


@dataclass(frozen=True)
class Derived:
    """A tensor that is made of stored ones.

    Attributes:
        sources: their names, as the files have them.
        files: where each of them lies.
        shape: of what is made of them.
        make: makes it.
    """

    sources: tuple[str, ...]
    shape: tuple[int, ...]
    make: Callable[[list[Tensor]], Tensor]
    files: Mapping[str, Path] = field(default_factory=dict)


class TensorFiles:
    """Some files' tensors by name: of those that are given, or that a subclass finds.

    Files are opened anew whenever something is read: one that stays open keeps all that was ever read of it in memory.

    Attributes:
        where: what error messages call it.
        files: the file that holds each tensor, by tensor name.
    """

    needed_by = "its architecture"  # what a missing tensor is missing for

    def __init__(self, *paths: Path) -> None:
        self.where = str(paths[0]) if paths else ""
        self.files: dict[str, Path] = {}
        self._entries: dict[str, Entry] = {}
        self._stored_names: dict[str, str] = {}  # what the files call those that are renamed
        self._derived: dict[str, Derived] = {}  # those that no file has as they are
        for path in paths:
            self._add(path)

    def _add(self, path: Path, expected: Collection[str] = ()) -> None:
        """Take in one file's tensors, those too that nobody expects: whatever loads the file, loads them."""
        entries = read_header(path)
        for name in sorted(set(expected) - entries.keys()):
            raise ValueError(f"tensor {name!r} is not in {path.name}, where the index says it is")
        for name, entry in entries.items():
            if name in self.files:
                raise ValueError(
                    f"tensor {name!r} is in {self.files[name].name} and in {path.name} of {self.where}; "
                    "which of them is meant cannot be known"
                )
            self.files[name] = path
            self._entries[name] = entry

    def _keep(self, stored: Mapping[str, str]) -> None:
        """Know only some tensors, by names of their own: what their files call each of them."""
        self.files = {name: self.files[own] for name, own in stored.items()}
        self._entries = {name: self._entries[own] for name, own in stored.items()}
        self._stored_names = {name: self._stored_names.get(own, own) for name, own in stored.items()}

    def _derive(self, name: str, derived: Derived) -> None:
        """Know a tensor that is made of stored ones, which are not known by their own names any more."""
        stored = tuple(self._stored_names.get(one, one) for one in derived.sources)
        dtypes = [self._entries.pop(one).dtype for one in derived.sources]
        files = dict(zip(stored, [self.files.pop(one) for one in derived.sources], strict=True))
        size = math.prod(derived.shape) * dtypes[0].itemsize
        self.files[name], self._entries[name] = files[stored[0]], Entry(dtypes[0], derived.shape, 0, size)
        self._derived[name] = replace(derived, sources=stored, files=files)

    def as_stored(self) -> TensorFiles:
        """The same tensors without what a subclass makes of them."""
        same = TensorFiles()
        vars(same).update({name: vars(self)[name] for name in vars(same)})
        return same

    def names(self) -> list[str]:
        """All tensor names, file by file."""
        return list(self.files)

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def _entry(self, name: str) -> Entry:
        if name not in self._entries:
            raise ValueError(f"{self.where} has no tensor {name!r}, which {self.needed_by} asks for")
        return self._entries[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor, without reading it."""
        return self._entry(name).dtype

    def num_bytes(self, name: str) -> int:
        """How many bytes a tensor takes in its file."""
        entry = self._entry(name)
        return entry.end - entry.begin

    def _open(self, name: str) -> Any:
        self._entry(name)
        return safe_open(self.files[name], framework="pt")

    def tensor(self, name: str) -> Tensor:
        """One whole tensor; what is not looked at of it is not read."""
        if name in self._derived:
            return self._made(name)
        entry = self._entry(name)
        if 0 < self.num_bytes(name) <= BLOCK:  # in less time than the header of a large file is parsed again
            read = torch.frombuffer(bytearray(b"".join(self.blocks(name))), dtype=entry.dtype)
            return read.view(entry.shape)
        with self._open(name) as file:
            tensor: Tensor = file.get_tensor(self._stored_names.get(name, name))
        return tensor

    def part(self, name: str, dim: int, first: int, end: int) -> Tensor:
        """Elements first..end-1 along one dimension of a tensor; nothing else is read."""
        if name in self._derived:
            return self._made(name).narrow(dim, first, end - first).clone()
        with self._open(name) as file:
            view = file.get_slice(self._stored_names.get(name, name))
            part: Tensor = view[(*[slice(None)] * dim, slice(first, end))]
        return part

    def _made(self, name: str) -> Tensor:
        derived = self._derived[name]
        found = []
        for stored in derived.sources:
            with safe_open(derived.files[stored], framework="pt") as file:
                found.append(file.get_tensor(stored))
        return derived.make(found)

    def rows(self, name: str, count: int | None = None) -> Iterator[Tensor]:
        """All rows of a tensor in order, so many at a time, or the whole tensor; a single number has no rows."""
        if count is None or not self.shape(name):
            yield self.tensor(name)
            return
        end = self.shape(name)[0]
        for first in range(0, end, count):
            yield self.part(name, 0, first, min(first + count, end))

    def blocks(self, name: str) -> Iterator[memoryview]:
        """A tensor's bytes as they are stored, a block at a time; each is valid until the next one is asked for.

        Raises:
            OSError: if the file has become shorter.
        """
        entry = self._entry(name)
        path = self.files[name]
        if name in self._derived:
            yield memoryview(self._made(name).contiguous().view(torch.uint8).numpy().tobytes())
            return
        with path.open("rb", buffering=0) as file:
            file.seek(entry.begin)
            yield from blocks_of(file, entry.end - entry.begin, path)


def blocks_of(file: FileIO, size: int, path: Path) -> Iterator[memoryview]:
    """The next bytes of an unbuffered file, a block at a time, all in one buffer.

    Raises:
        OSError: if it has fewer.
    """
    buffer = memoryview(bytearray(min(size, BLOCK)))
    while size:
        count = file.readinto(buffer[: min(size, BLOCK)])
        if not count:
            raise OSError(f"{path} became shorter while it was read")
        yield buffer[:count]
        size -= count
