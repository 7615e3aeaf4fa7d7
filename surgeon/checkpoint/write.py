"""Writing safetensors files tensor by tensor: the header first, from shapes alone, then one tensor after the other.

Memory holds one tensor at a time, and the whole content is planned before any of it is written.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path, PurePosixPath
from threading import Event
from typing import Any

import torch
from torch import Tensor

from surgeon.checkpoint.forms import PlannedTensor
from surgeon.checkpoint.stored import INDEX_FILE, SINGLE_FILE, Checkpoint, read_json
from surgeon.checkpoint.tensor_file import BLOCK, DTYPES
from surgeon.errors import name_file
from surgeon.machine import Beside, Stopped
from surgeon.processes.files import sync, write_json
from surgeon.progress import Advance


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


def shard_limit(source: Checkpoint) -> int | None:
    """Return the size of the source's largest shard in bytes; None where the source is one file."""
    paths = source.weight_files
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
