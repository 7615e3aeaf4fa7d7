"""Whether files hold what was written: sizes and SHA-256, kept in surgeon.json and compared with what is read back."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, Generic, TypeVar

from surgeon.checkpoint.read import blocks_of, check_inside, read_json

T = TypeVar("T")


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


class Background(Generic[T]):
    """Work in a thread of its own, which does not keep a program from ending."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._done: list[T] = []
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._done.append(self._work())
        except Exception as error:  # noqa: BLE001 - handed to whoever asks for the result
            self._error = error

    def result(self) -> T:
        """Wait for the work's end; raises what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._done[0]


class ReadBack:
    """Puts files on the disk and reads them back, one after the other, while something else goes on.

    `finish` waits until all are done.
    """

    def __init__(self) -> None:
        self._files: SimpleQueue[tuple[Path, FileRecord] | None] = SimpleQueue()
        self._work = Background(self._check_all)

    def add(self, path: Path, record: FileRecord) -> None:
        """Check this file as soon as those before it are done."""
        self._files.put((path, record))

    def finish(self) -> None:
        """Wait for all files.

        Raises:
            OSError: naming the first file that does not hold what was written, or could not be put on the disk.
        """
        self._files.put(None)
        self._work.result()

    def _check_all(self) -> None:
        while (item := self._files.get()) is not None:
            path, record = item
            sync(path)
            if FileRecord.of(path) != record:
                raise OSError(f"{path.name} does not read back as it was written; is the disk sound?")


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
    path = folder / name
    if Path(name).name != name or not isinstance(record, dict):
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
