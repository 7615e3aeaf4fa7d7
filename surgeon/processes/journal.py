"""Files that only ever grow: what long work has found so far, so that it can be killed at any point and go on."""

from __future__ import annotations

import json
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

from surgeon.processes.files import lock, make_folder, name_file

# What messages call the entries of an identity; others are called by their own names.
_NAMES = {
    "format": "format, an older version's",
    "model_hash": "model (hash of its configuration and weights)",
    "data": "text (hash of its tokens)",
    "calibration": "calibration text (hash of its tokens)",
    "window": "window size",
    "dtype": "dtype to compute in",
    "kept": "dtype to store in",
    "late_steps": "order of late steps",
}
_SHOWN = 40


@dataclass(eq=False)
class Journal(ABC):
    """JSON values, one a line, each in the file as soon as it is known; subclasses say in `take` what they mean.

    The first line says what the others depend on; a file of anything else is refused. A last line that was cut off by a
    kill is dropped. Where WORK.json, the work's result, is there and the journal has lost lines, a warning says that
    they are found again. Lines are taken in as it is made, once all its fields are set.

    Attributes:
        path: its folder is made if it is not there; None to keep nothing.
        work: as the first line and error messages call it ("scan").
        identity: what the lines depend on, as JSON values; None for a file without such a first line.

    Raises:
        ValueError: if the file belongs to something else (naming the difference), or is damaged.
        OSError: if it cannot be written, or another process is writing to it.
    """

    path: Path | None
    work: str
    identity: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self._place = self.path or Path(os.devnull)
        if self.path is not None:
            make_folder(self.path.parent)
        self._file: BinaryIO = self._place.open("a+b")
        try:
            if self.path is not None and not lock(self._file.fileno()):
                raise OSError(
                    f"another {self.work} is writing to {self.path.parent}; wait for it, or use another folder"
                )
            self._load()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let others write to the file."""
        with name_file(self._place):  # what could not be written is tried once more
            self._file.close()

    @abstractmethod
    def take(self, line: Any) -> None:
        """Take in what a line says; IndexError, KeyError, TypeError and ValueError mean that the line is damaged."""

    def append(self, *lines: Any) -> None:
        """Put lines into the file at once."""
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        with name_file(self._place):
            self._file.write(text.encode())
            self._file.flush()

    def keep(self, line: Any) -> None:
        """Put a line into the file, and take it in."""
        self.append(line)
        self.take(line)

    def _load(self) -> None:
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.ftruncate(self._file.fileno(), whole)
        result = self._place.with_name(f"{self.work}.json")
        if result.is_file() and (not whole or whole < len(content)):
            lost = "is gone or empty"
            if content:
                lost = "is cut short"
            warnings.warn(
                f"{self._place} {lost}, which {result.name} was made from; what is missing is found again",
                stacklevel=2,
            )
        lines = [
            (number, line) for number, line in enumerate(content[:whole].splitlines(), 1) if line.strip()
        ]
        if (
            self.identity is not None
            and not result.is_file()
            and len(lines) == 1
            and lines[0][1].startswith(b'{"%s":{' % self.work.encode())
        ):
            os.ftruncate(self._file.fileno(), 0)  # begun by a command that measured nothing
            lines.clear()
        if self.identity is not None and lines:
            self._check(*lines.pop(0), self.identity)
        elif self.identity is not None:
            self.append({self.work: self.identity})
        for number, text in lines:
            try:
                self.take(json.loads(text))
            except (IndexError, KeyError, TypeError, ValueError) as error:
                raise self._damage_error(number) from error

    def _check(self, number: int, text: bytes, identity: dict[str, Any]) -> None:
        try:
            first = json.loads(text)
        except ValueError as error:
            raise self._damage_error(number) from error
        held = None
        if isinstance(first, dict):
            held = first.get(self.work)
        if not isinstance(held, dict):
            raise ValueError(
                f"{self._place} was not written by surgeon {self.work}; use another output folder"
            )
        for key, value in identity.items():
            name = _NAMES.get(key, key)
            if key not in held:
                other = f"an earlier version, which does not say its {name}"
            elif held[key] != value:
                other = f"another {name}: {_brief(held[key])}, now {_brief(value)}"
            else:
                continue
            raise ValueError(
                f"{self._place.parent} holds a {self.work} of {other}; use another output folder, or delete this one "
                "to begin again"
            )

    def _damage_error(self, number: int) -> ValueError:
        return ValueError(f"{self._place} is damaged in line {number}; delete the file to begin again")


def read_journal(path: Path, work: str, take: Callable[[Any, dict[str, Any]], object]) -> dict[str, Any]:
    """Read a journal's identity (its first line), and give `take` its other whole lines; the file stays as it is."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is gone, which has what was measured; run surgeon {work} again on its folder"
        )
    *whole, _ = path.read_bytes().split(b"\n")
    try:
        first, *lines = [json.loads(line) for line in whole if line.strip()]
        identity = dict(first[work])
        for line in lines:
            take(line, identity)
        return identity
    except (IndexError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ValueError(f"{path} is damaged; run surgeon {work} again on its folder") from error


def _brief(value: Any) -> str:
    text = str(value)
    if len(text) <= _SHOWN:
        return text
    return text[:12] + "..."
