"""A file of JSON lines that only ever grows: what long work has found so far, so that it can go on after a kill."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO


class Lines:
    """JSON objects, one a line; the first one says what the others belong to.

    A last line that was cut off by a kill is dropped.

    Attributes:
        held: the lines that were there when it was opened, but for the first.

    Args:
        path: its folder is made if it is not there.
        work: what is done, one word, for error messages.
        identity: what the numbers depend on, as JSON values, by a name that a user understands.

    Raises:
        ValueError: if the file belongs to something else (naming the difference), or is damaged.
        OSError: if it cannot be written, or another process is writing to it.
    """

    def __init__(self, path: Path, work: str, identity: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.work = path, work
        self.held: list[dict[str, Any]] = []
        self._file: BinaryIO = path.open("a+b")
        try:
            self._lock()
            self._load(identity)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Lines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def append(self, line: dict[str, Any]) -> None:
        """Write a line at once."""
        self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        self._file.flush()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OSError(
                f"another {self.work} is writing to {self.path.parent}; wait for it, or use another folder"
            ) from error

    def _load(self, identity: dict[str, Any]) -> None:
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.ftruncate(self._file.fileno(), whole)
        lines = [self._parse(text, number) for number, text in enumerate(content[:whole].splitlines(), start=1)]
        if not lines:
            self.append({self.work: identity})
            return
        self._check(lines[0].get(self.work), identity)
        self.held = lines[1:]

    def _parse(self, text: bytes, number: int) -> dict[str, Any]:
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if not isinstance(line, dict):
            raise ValueError(f"{self.path} is damaged in line {number}; delete the file to begin again")
        return line

    def _check(self, held: Any, identity: dict[str, Any]) -> None:
        for key, value in identity.items():
            before = held.get(key) if isinstance(held, dict) else None
            if before != value:
                raise ValueError(
                    f"{self.path.parent} holds a {self.work} of another {key}: {_brief(before)}, now {_brief(value)}; "
                    "use another output folder (-o), or delete this one to begin again"
                )


def _brief(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:12] + "..."
