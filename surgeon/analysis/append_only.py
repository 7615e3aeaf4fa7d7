"""A file of results that only ever grows, so that long work can be killed at any point and go on."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

_SHOWN = 40


class AppendOnlyFile:
    """JSON objects, one a line, each written as soon as it is known.

    The first line says what the results depend on; results of anything else are refused. A last line that was cut off
    by a kill is dropped.

    Attributes:
        lines: what the file held when it was opened, without the first line.

    Args:
        path: the file; its folder is made if it is not there.
        what: the kind of results, for the first line and for messages ("spectrum").
        identity: what the results depend on, as JSON values.
        names: how messages call the entries of the identity.

    Raises:
        ValueError: if the file holds results of something else (naming the difference), or is damaged.
        OSError: if it cannot be written, or another process is writing to it.
    """

    def __init__(self, path: Path, what: str, identity: dict[str, Any], names: Mapping[str, str]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.what, self.names = path, what, names
        self._file: BinaryIO = path.open("a+b")
        try:
            self._lock()
            self.lines = self._load(identity)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> AppendOnlyFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def append(self, line: dict[str, Any]) -> None:
        """Write one more line."""
        self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        self._file.flush()

    def damaged(self, number: int) -> ValueError:
        """The error for a line that cannot be used; lines count from 1."""
        return ValueError(f"{self.path} is damaged in line {number}; delete the file to begin again")

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            where = self.path.parent
            raise OSError(f"another {self.what} is writing to {where}; wait for it, or use another folder") from error

    def _load(self, identity: dict[str, Any]) -> list[dict[str, Any]]:
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.ftruncate(self._file.fileno(), whole)
        lines = [self._parse(text, number) for number, text in enumerate(content[:whole].splitlines(), start=1)]
        if not lines:
            self.append({self.what: identity})
            return []
        self._check(lines[0], identity)
        return lines[1:]

    def _parse(self, text: bytes, number: int) -> dict[str, Any]:
        try:
            line = json.loads(text)
        except ValueError as error:
            raise self.damaged(number) from error
        if not isinstance(line, dict):
            raise self.damaged(number)
        return line

    def _check(self, header: dict[str, Any], identity: dict[str, Any]) -> None:
        held = header.get(self.what)
        if not isinstance(held, dict):
            raise ValueError(f"{self.path} was not written by surgeon {self.what}; use another output folder (-o)")
        for key, value in identity.items():
            if held.get(key) != value:
                change = f"{self.names.get(key, key)}: {_brief(held.get(key))}, now {_brief(value)}"
                raise ValueError(
                    f"{self.path.parent} holds a {self.what} of another {change}; use another output folder (-o), "
                    "or delete this one to begin again"
                )


def _brief(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _SHOWN else text[:12] + "..."
