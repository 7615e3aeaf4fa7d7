"""Tensors that are read whole or in part when asked for, those of safetensors files above all; and writing such files.

A file begins with what it holds:

    8 bytes   length of the header, little-endian
    header    {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, ..., "__metadata__": {...}}
    data      the tensors one after the other, without gaps

The header is written from shapes alone, then one tensor after the other: memory holds one at a time.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import struct
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from itertools import chain
from pathlib import Path, PurePosixPath
from threading import Event
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from surgeon.machine import Beside, Stopped
from surgeon.processes.files import name_file, sync, write_json
from surgeon.progress import Advance
from surgeon.words import first_line

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


SINGLE_FILE = "model.safetensors"


INDEX_FILE = "model.safetensors.index.json"


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path.parent} has no {path.name}; a model is a folder with config.json and *.safetensors"
        )
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} should hold a JSON object, not {type(value).__name__}")
    return value


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to be written.

    Attributes:
        dtype: to be stored in.
        rounded: whether storing it may lose digits, because it is computed, or stored more coarsely than it was.
        rows: computes its value, in float32 if it is rounded afterwards: all rows in order, some at a time.
        sources: the stored tensors that it is computed from, in the order in which they are read.
        blocks: the bytes of its only source, where it is a copy: it is never held as a whole.
        part_of: the quantised matrix that it holds a part of, by the name that this has for its architecture.
        dequantised: whether it is computed from quantised matrices, and is none any more.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rounded: bool
    rows: Callable[[], Iterator[Tensor]]
    sources: tuple[str, ...] = ()
    blocks: Callable[[], Iterator[memoryview]] | None = None
    part_of: str | None = None
    dequantised: bool = False

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class FileRecord:
    """A file's size in bytes and SHA-256."""

    size: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileRecord:
        with path.open("rb", buffering=0) as file:
            return cls(os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest())


def verify(folder: Path, report: Path) -> int:
    """Compare a checkpoint's files with their records in its report (surgeon.json).

    Returns:
        How many files there are.
    """
    if not report.exists():
        raise FileNotFoundError(
            f"{folder} has no {report.name}, so it cannot be verified; surgeon export writes one"
        )
    records = read_json(report).get("files")
    if not isinstance(records, dict) or not records:
        raise ValueError(f"{report} has no record of files, so they cannot be verified")
    changes = [
        change
        for name, record in records.items()
        if (change := change_of(folder, name, record)) is not None
    ]
    if changes:
        raise ValueError(f"{folder} is not as it was written: {'; '.join(changes)}")
    return len(records)


def change_of(folder: Path, name: str, record: Any, by_size: bool = False) -> str | None:
    """Say how a file differs from its record, `by_size` where that has no SHA-256; None if it does not."""
    path = folder / name
    parts = PurePosixPath(name).parts
    if "/".join(parts) != name or ".." in parts or path == folder or not isinstance(record, dict):
        raise ValueError(
            f"the list of files of {folder} has a record that is none of its files: {name[:80]!r}"
        )
    if not path.is_file():
        return f"{name} is missing"
    size = path.stat().st_size
    if size != record.get("size"):
        return f"{name} has {size} bytes, not the {record.get('size')} that were written"
    if by_size and "sha256" not in record:
        return None
    if FileRecord.of(path).sha256 != record.get("sha256"):
        return f"{name} has another content than was written"
    return None


DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def shard_limit(paths: Collection[Path]) -> int | None:
    """Return the size of the largest of a source's files in bytes; None where it is one file."""
    if len(paths) > 1:
        return max(path.stat().st_size for path in paths)
    return None


def split_into_shards(
    tensors: Sequence[PlannedTensor], limit: int | None
) -> dict[str, list[PlannedTensor]]:
    """Distribute tensors among files, by name; a tensor larger than the limit has a file of its own.

    Args:
        limit: bytes per file, or None for one file.
    """
    shards: list[list[PlannedTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if limit is not None and shards[-1] and size + tensor.num_bytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.num_bytes
    if len(shards) == 1:
        return {SINGLE_FILE: shards[0]}
    return {
        f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard
        for i, shard in enumerate(shards, start=1)
    }


class Writing:
    """Planned tensors on their way into files; each file is read back as soon as it is whole.

    Both go on in threads beside the block, and have ended when it is left. The files are begun at once, so that the
    folder can be opened as a checkpoint; a reader of one of them waits for it.

    Args:
        shards: the tensors of each file, by its name.
        advance: called with the bytes of tensors written.
    """

    def __init__(
        self,
        folder: Path,
        shards: Mapping[str, Sequence[PlannedTensor]],
        advance: Advance = lambda _: None,
    ) -> None:
        # Wide elements first, so that every tensor begins at a multiple of its element's size.
        self._shards = {
            name: sorted(some, key=lambda one: -one.dtype.itemsize) for name, some in shards.items()
        }
        self._folder = folder
        self._advance = advance
        self._records: dict[str, FileRecord] = {}  # of files that are whole
        self._settled = {name: Event() for name in shards}  # set when a file is whole, or never will be
        for name, tensors in self._shards.items():
            header = header_of(tensors)
            with name_file(folder / name), (folder / name).open("wb") as file:
                file.write(header)
                file.truncate(len(header) + sum(tensor.num_bytes for tensor in tensors))
        if len(shards) > 1:
            total = sum(tensor.num_bytes for tensors in shards.values() for tensor in tensors)
            weight_map = {tensor.name: name for name, tensors in shards.items() for tensor in tensors}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            write_json(folder / INDEX_FILE, index)

    def __enter__(self) -> Writing:
        self._writing = Beside(self._write)
        self._reading_back = Beside(self._read_back)
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        self._writing.__exit__()
        self._reading_back.__exit__()
        if isinstance(error, Stopped):
            self._writing.result()  # raises what has kept a file from becoming whole

    def wait(self, name: str) -> None:
        """Wait until a file is whole.

        Raises:
            Stopped: if it never will be; leaving the block raises the reason.
        """
        self._settled[name].wait()
        if name not in self._records:
            raise Stopped

    def finish(self) -> dict[str, FileRecord]:
        """Wait for all files, and return their records by name."""
        self._writing.result()
        self._reading_back.result()
        return self._records

    def _write(self, go_on: Callable[[], None]) -> None:
        try:
            for name, tensors in self._shards.items():
                digest = hashlib.sha256()
                size = 0
                blocks = chain.from_iterable(map(content_of, tensors))
                with name_file(self._folder / name), (self._folder / name).open("r+b") as file:
                    for content in chain[bytes | memoryview]([header_of(tensors)], blocks):
                        go_on()
                        digest.update(content)
                        file.write(content)
                        self._advance(len(content) if size else 0)  # the header is of no tensor
                        size += len(content)
                self._records[name] = FileRecord(size, digest.hexdigest())
                self._settled[name].set()
        finally:
            for event in self._settled.values():
                event.set()

    def _read_back(self, go_on: Callable[[], None]) -> None:
        for name, tensors in self._shards.items():
            self.wait(name)
            sync(self._folder / name)
            # Values that are rounded as they are stored are compared when they are proven, and passed over here.
            values = ([tensor.num_bytes] if tensor.rounded else content_of(tensor) for tensor in tensors)
            if not holds(
                self._folder / name, chain([header_of(tensors)], chain.from_iterable(values)), go_on
            ):
                raise OSError(f"{name} does not read back as it was written; is the disk sound?")


def header_of(tensors: Sequence[PlannedTensor]) -> bytes:
    """Return the beginning of a safetensors file with these tensors in this order."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.num_bytes
        entries[tensor.name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begin at a multiple of 8
    return struct.pack("<Q", len(text)) + text


def content_of(planned: PlannedTensor) -> Iterator[memoryview]:
    """Yield a tensor's bytes as they are to be written, a block at a time, each valid until the next."""
    if planned.blocks is not None:
        yield from planned.blocks()
        return
    size = 0
    for rows in planned.rows():
        flat = rows.reshape(-1)
        size += len(flat)
        for part in flat.split(BLOCK // planned.dtype.itemsize):
            array: Any = as_bytes(part.to(planned.dtype)).numpy()
            yield memoryview(array)
    expected = torch.Size(planned.shape).numel()
    assert size == expected, f"{planned.name} has {size} elements, planned as {planned.shape}"


def as_bytes(tensor: Tensor) -> Tensor:
    """View a tensor as files hold it, as uint8."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def holds(
    path: Path, expected: Iterable[bytes | memoryview | int], go_on: Callable[[], None] = lambda: None
) -> bool:
    """Tell whether a file has these bytes and no others.

    Args:
        expected: in order; a number stands for so many bytes that are not compared.
        go_on: called on the way.
    """
    with path.open("rb", buffering=0) as file:
        for content in expected:
            go_on()
            if isinstance(content, int):
                file.seek(content, os.SEEK_CUR)
                continue
            # Compares itself with any other bytes at once; a memoryview does not.
            found: Any = bytearray(len(content))
            count = 0
            while count < len(found) and (more := file.readinto(memoryview(found)[count:])):
                count += more
            if count < len(found) or found != content:
                return False
        return file.tell() == os.fstat(file.fileno()).st_size
