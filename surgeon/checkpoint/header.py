"""The header of a safetensors file, read without trusting it.

A file begins with what it holds:

    8 bytes   length of the header, little-endian
    header    {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, ..., "__metadata__": {...}}
    data      the tensors one after the other, without gaps
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from safetensors import SafetensorError, safe_open

from surgeon.errors import first_line, shown

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
LONGEST_HEADER = 100_000_000  # bytes, as the safetensors library has it
MOST_DIMENSIONS = 8
METADATA = "__metadata__"
_LARGEST = 1 << 40  # of a dimension


@dataclass(frozen=True)
class Entry:
    """What a header says of a tensor, which lies in bytes begin..end-1 of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class _Damaged(ValueError):
    """What is wrong with a header."""


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file by name; nothing else of it is read.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is no regular file, is truncated, or its header does not describe what it holds.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path} is not a regular file; weights are read from *.safetensors files only")
    try:
        return _parse(path)
    except _Damaged as damage:
        raise ValueError(
            f"{path} is truncated or not a safetensors file ({damage}); fetch or copy it again"
        ) from damage


def _parse(path: Path) -> dict[str, Entry]:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < 8:
            raise _Damaged(f"it has {size} bytes")
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(size - 8, LONGEST_HEADER):
            raise _Damaged(f"its first bytes promise a header of {length} bytes, and it has {size} in all")
        text = file.read(length)
    try:
        entries = parse_json(text.decode())
    except ValueError as error:
        raise _Damaged(f"its header is not valid: {error}") from error
    if not isinstance(entries, dict):
        raise _Damaged("its header is no JSON object")
    metadata = entries.pop(METADATA, None)
    # Texts by name, or the safetensors library refuses the file where a tensor is read.
    if not isinstance(metadata, dict | None):
        raise _Damaged(f"its {METADATA} is no JSON object: {shown(metadata)}")
    for name, value in (metadata or {}).items():
        if not isinstance(value, str):
            raise _Damaged(f"its {METADATA} has {shown(name)}: {shown(value)}, where a text should be")
    start = 8 + length
    tensors = {name: _tensor(name, entry, start, path) for name, entry in entries.items()}
    _check_places(tensors, start, size)
    try:  # what is sound so far, and refused by the library that reads it later (numbers that no JSON has)
        with safe_open(path, framework="pt"):
            return tensors
    except SafetensorError as error:
        raise _Damaged(first_line(error)) from error


def _tensor(name: str, entry: Any, start: int, path: Path) -> Entry:
    if not isinstance(entry, dict):
        raise _Damaged(f"its header says nothing about tensor {name!r}")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(
            f"tensor {name!r} in {path} has dtype {dtype}, which is not supported (known: {', '.join(DTYPES)})"
        )
    if not _are_sizes(shape) or len(shape) > MOST_DIMENSIONS or max(shape, default=0) > _LARGEST:
        raise _Damaged(f"tensor {name!r} has the shape {str(shape)[:60]}")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise _Damaged(f"tensor {name!r} lies at {str(offsets)[:60]}")
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    begin, end = offsets
    if end - begin != needed:
        raise _Damaged(f"tensor {name!r} takes {needed} bytes, but its place has {end - begin}")
    return Entry(DTYPES[dtype], tuple(shape), start + begin, start + end)


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_places(tensors: Mapping[str, Entry], start: int, size: int) -> None:
    """Tensors must fill the file after its header, without gaps and without sharing bytes."""
    at = start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin != at:
            if tensor.begin < at:
                what = "overlaps the one before it"
            else:
                what = "has unused bytes before it"
            raise _Damaged(f"tensor {name!r} {what}")
        at = tensor.end
    if at != size:
        raise _Damaged(f"its header describes {at} bytes, and it has {size}")


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
