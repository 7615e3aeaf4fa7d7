"""Whether files hold what was written, by the sizes and SHA-256 that surgeon.json keeps."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from surgeon.checkpoint.read import read_json


@dataclass(frozen=True)
class FileRecord:
    """What identifies a file's content: its size in bytes and its SHA-256."""

    size: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileRecord:
        """Read a file."""
        with path.open("rb", buffering=0) as file:
            return cls(os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest())


def verify(folder: Path, report: Path) -> int:
    """Compare a checkpoint's files with the records that its report (surgeon.json) keeps of them.

    Returns:
        How many files there are.

    Raises:
        FileNotFoundError: if there is no report.
        ValueError: naming every file that differs; or if the report has no such records.
    """
    if not report.exists():
        raise FileNotFoundError(f"{folder} has no {report.name}, so it cannot be verified; surgeon export writes one")
    records = read_json(report).get("files")
    if not isinstance(records, dict) or not records:
        raise ValueError(f"{report} has no record of files, so they cannot be verified")
    changes = [change for name, record in records.items() if (change := change_of(folder, name, record)) is not None]
    if changes:
        raise ValueError(f"{folder} is not as it was written: {'; '.join(changes)}")
    return len(records)


def change_of(folder: Path, name: str, record: Any, by_size: bool = False) -> str | None:
    """What has become of a file since its record was written; None if it is as it was.

    Args:
        by_size: go by the size alone where the record has no SHA-256.

    Raises:
        ValueError: if the record is of no file of the folder.
    """
    path = folder / name
    parts = PurePosixPath(name).parts
    if "/".join(parts) != name or ".." in parts or path == folder or not isinstance(record, dict):
        raise ValueError(f"the list of files of {folder} has a record that is none of its files: {name[:80]!r}")
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
