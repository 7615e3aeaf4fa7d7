"""Whether files hold what was written: read back at once, and later by sizes and SHA-256, kept in surgeon.json."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path, PurePosixPath
from queue import SimpleQueue
from types import TracebackType
from typing import Any

from surgeon.beside import Beside
from surgeon.checkpoint.read import blocks_of, check_inside, read_json

# What a file should hold, in order: bytes, or a number of those that are not compared here.
Expected = Callable[[], Iterable[bytes | memoryview | int]]


@dataclass(frozen=True)
class FileRecord:
    """What identifies a file's content: its size in bytes and its SHA-256."""

    size: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileRecord:
        """Read a file."""
        digest = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            for block in blocks_of(file, size, path):
                digest.update(block)
        return cls(size, digest.hexdigest())


class ReadBack:
    """Puts files on the disk and compares them with what they should hold, one after the other, beside something else.

    `finish` waits until all are done; where it is not come to, leaving the block around it ends the work.
    """

    def __init__(self) -> None:
        self._files: SimpleQueue[tuple[Path, Expected] | None] = SimpleQueue()
        self._work = Beside(self._check_all)

    def __enter__(self) -> ReadBack:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.put(None)
        self._work.__exit__(kind, error, trace)

    def add(self, path: Path, expected: Expected) -> None:
        """Check this file as soon as those before it are done."""
        self._files.put((path, expected))

    def finish(self) -> None:
        """Wait for all files.

        Raises:
            OSError: naming the first file that does not hold what was written, or could not be put on the disk.
        """
        self._files.put(None)
        self._work.result()

    def _check_all(self, go_on: Callable[[], None]) -> None:
        while (item := self._files.get()) is not None:
            path, expected = item
            go_on()
            sync(path)
            if not _holds(path, expected, go_on):
                raise OSError(f"{path.name} does not read back as it was written; is the disk sound?")


def _holds(path: Path, expected: Expected, go_on: Callable[[], None]) -> bool:
    """Whether a file has these bytes and no others."""
    with path.open("rb", buffering=0) as file:
        for content in expected():
            go_on()
            if isinstance(content, int):
                file.seek(content, os.SEEK_CUR)
            elif not _goes_on_with(file, content):
                return False
        return file.tell() == os.fstat(file.fileno()).st_size


def _goes_on_with(file: FileIO, content: bytes | memoryview) -> bool:
    """Whether these are the next bytes of an unbuffered file."""
    found: Any = bytearray(len(content))  # which compares itself with any other bytes at once, as a memoryview does not
    count = 0
    while count < len(found) and (more := file.readinto(memoryview(found)[count:])):
        count += more
    return count == len(found) and bool(found == content)


def sync(path: Path) -> None:
    """Wait until a file or a folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
    changes = [change for name, record in records.items() if (change := _change(folder, name, record)) is not None]
    if changes:
        raise ValueError(f"{folder} is not as it was written: {'; '.join(changes)}")
    return len(records)


def _change(folder: Path, name: str, record: Any) -> str | None:
    path, parts = folder / name, PurePosixPath(name).parts
    if "/".join(parts) != name or ".." in parts or path == folder or not isinstance(record, dict):
        raise ValueError(f"surgeon.json of {folder} has a record that is none of its files: {name[:80]!r}")
    check_inside(folder, path)
    if not path.is_file():
        return f"{name} is missing"
    size = path.stat().st_size
    if size != record.get("size"):
        return f"{name} has {size} bytes, not the {record.get('size')} that were written"
    if FileRecord.of(path).sha256 != record.get("sha256"):
        return f"{name} has another content than was written"
    return None
