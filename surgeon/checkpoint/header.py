"""The header of a safetensors file, read without trusting it.

A file begins with what it holds:

    8 bytes   length of the header, little-endian
    header    {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, ..., "__metadata__": {...}}
    data      the tensors one after the other, without gaps
"""

from __future__ import annotations

import json
import stat
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

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
