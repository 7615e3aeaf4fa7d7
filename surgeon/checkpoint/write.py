"""Writing safetensors files tensor by tensor: the header first, from shapes alone, then one tensor after the other.

So memory holds one tensor at a time, not a file's worth, and what will be written is known before any of it is.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surgeon.checkpoint.awaited import WholeFiles
from surgeon.checkpoint.forms import PlannedTensor
from surgeon.checkpoint.header import DTYPES
from surgeon.checkpoint.read import BLOCK, INDEX_FILE, SINGLE_FILE, Checkpoint
from surgeon.checkpoint.verify import Expected, FileRecord
from surgeon.progress import Advance
from surgeon.provenance import write_json

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def shard_limit(source: Checkpoint) -> int | None:
    """How large a file may become: as the source's largest shard, in bytes; None where the source is one file."""
    files = set(source.files.values())
    return max(path.stat().st_size for path in files) if len(files) > 1 else None


def split_into_shards(tensors: Sequence[PlannedTensor], limit: int | None) -> dict[str, list[PlannedTensor]]:
    """The tensors of each file, by its name; a tensor larger than the limit has a file of its own.

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
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, start=1)}


def work_of_writing(
    source: Checkpoint,
    tensors: Sequence[PlannedTensor],
    folder: Path,
    whole: WholeFiles,
    advance: Advance,
    written: Callable[[Path, Expected], None],
) -> Callable[[Callable[[], None]], dict[str, FileRecord]]:
    """`fill_files`, which are like the source's and are begun at once, as work for `Beside`.

    Args:
        whole: is told of them, and closed at the end.
    """
    shards = split_into_shards(tensors, shard_limit(source))
    begin_files(folder, shards)

    def work(go_on: Callable[[], None]) -> dict[str, FileRecord]:
        def told(amount: float) -> None:
            go_on()
            advance(amount)

        def done(path: Path, expected: Expected) -> None:
            whole.add(path.name)
            written(path, expected)

        try:
            return fill_files(folder, shards, told, done)
        finally:
            whole.close()

    return work


def begin_files(folder: Path, shards: dict[str, list[PlannedTensor]]) -> None:
    """Make all files with their headers, as long as they will be, and their index if there are several.

    So the folder can be opened as a checkpoint before its tensors are there.

    Raises:
        OSError: if files may not be so long, or cannot be written.
    """
    for name, tensors in shards.items():
        header = header_of(_in_file(tensors))
        with _named_in_errors(folder / name), (folder / name).open("wb") as file:
            file.write(header)
            file.truncate(len(header) + sum(tensor.num_bytes for tensor in tensors))
    if len(shards) > 1:
        total = sum(tensor.num_bytes for tensors in shards.values() for tensor in tensors)
        weight_map = {tensor.name: name for name, tensors in shards.items() for tensor in tensors}
        write_json(
            folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        )


def fill_files(
    folder: Path,
    shards: dict[str, list[PlannedTensor]],
    advance: Advance,
    written: Callable[[Path, Expected], None] = lambda *_: None,
) -> dict[str, FileRecord]:
    """Write the tensors of files that have been begun.

    Args:
        written: told of each weight file as soon as it is whole, and what it should hold: everything but the values
            that are rounded as they are stored, which are compared when they are proven.

    Returns:
        What each weight file holds, by its name.

    Raises:
        OSError: if the disk fills up or a file cannot be written.
    """
    records = {}
    for name, tensors in shards.items():
        records[name] = _fill_file(folder / name, tensors, advance)
        written(folder / name, partial(_expected, tensors))
    return records


def header_of(tensors: Sequence[PlannedTensor]) -> bytes:
    """The beginning of a safetensors file with these tensors in this order."""
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


def _fill_file(path: Path, tensors: Sequence[PlannedTensor], advance: Advance) -> FileRecord:
    digest, size = hashlib.sha256(), 0
    with _named_in_errors(path), path.open("r+b") as file:
        for content, told in _contents(tensors):
            digest.update(content)
            file.write(content)
            size += len(content)
            advance(told)
    return FileRecord(size, digest.hexdigest())


@contextmanager
def _named_in_errors(path: Path) -> Iterator[None]:
    """Say which file the system could not write."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def _in_file(tensors: Sequence[PlannedTensor]) -> list[PlannedTensor]:
    """Wide elements first, so that every tensor begins at a multiple of its element's size."""
    return sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)


def _contents(tensors: Sequence[PlannedTensor]) -> Iterator[tuple[bytes | memoryview, int]]:
    """A file's bytes, a block at a time, each with how many of them belong to tensors."""
    yield header_of(_in_file(tensors)), 0
    for planned in _in_file(tensors):
        for block in content_of(planned):
            yield block, len(block)


def _expected(tensors: Sequence[PlannedTensor]) -> Iterator[bytes | memoryview | int]:
    """The same once more; of values that are rounded, which `prove` compares, only how many bytes they take."""
    yield header_of(_in_file(tensors))
    for planned in _in_file(tensors):
        if planned.rounded:
            yield planned.num_bytes
        else:
            yield from content_of(planned)


def content_of(planned: PlannedTensor) -> Iterator[memoryview]:
    """A tensor's bytes as they are to be written, a block at a time, each valid until the next one is asked for.

    What is copied byte for byte is never held as a whole.
    """
    if planned.copy_of is not None:
        yield from planned.copy_of.blocks()
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
    """What a file holds of a tensor, as uint8."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
