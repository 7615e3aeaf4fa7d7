"""Tables and texts that tests write, and what is read of them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from surgeon.quality.sources import Reading, documents

Row = dict[str, Any]


def texts(data: str | Path, separator: str | None = None, reading: Reading | None = None) -> list[str]:
    return ["".join(pieces) for pieces in documents(str(data), separator, reading)]


def write_jsonl(path: Path, rows: list[Row]) -> Path:
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_bytes(gzip.compress(lines.encode()) if path.suffix.lower() == ".gz" else lines.encode())
    return path


def write_parquet(path: Path, rows: list[Row]) -> Path:
    parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    return path
