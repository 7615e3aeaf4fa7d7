"""The journal of a scan: what was measured, one line as soon as it is known, so that a killed scan can go on."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from surgeon.analysis.measure import Measured
from surgeon.program import Program

JOURNAL = "journal.jsonl"
_NAMES = {"weights_hash": "model (hash of its weights)", "data": "text (hash of its tokens)", "window": "window size"}


class Journal:
    """Per-window numbers of each program, in a file that only ever grows.

    The first line says what is measured; a folder that holds a scan of something else is refused. A last line that
    was cut off by a kill is dropped.

    Attributes:
        operations: those this folder holds or was asked for, in earlier runs too.
        at_once: how many windows the first run took together, which the next ones keep to get the same digits.

    Args:
        folder: made if it is not there.
        identity: what the numbers depend on, as JSON values.
        windows: how many windows are measured.

    Raises:
        ValueError: if the folder holds a scan of something else (naming the difference), or the journal is damaged.
        OSError: if it cannot be written, or another scan is writing to it.
    """

    def __init__(self, folder: Path, identity: dict[str, Any], windows: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / JOURNAL
        self.windows = windows
        self.operations: list[str] = []
        self.at_once: int | None = None
        self._values: dict[str, NDArray[np.float64]] = {}
        self._file: BinaryIO = self.path.open("a+b")
        try:
            self._lock()
            self._load(identity)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def start(self, operations: list[str], at_once: int) -> None:
        """Note the operations to scan and the number of windows taken together."""
        if operations != self.operations or at_once != self.at_once:
            self.operations, self.at_once = operations, at_once
            self._append({"operations": operations, "at_once": at_once})

    def add(self, measured: Measured) -> None:
        """Keep one program's numbers on some windows."""
        quality = measured.quality
        nll, divergence = quality.nll.tolist(), quality.divergence.tolist()
        line = {"program": str(measured.program), "start": measured.start, "nll": nll, "divergence": divergence}
        self._append(line)
        self._take(line)

    def is_done(self, program: Program, windows: range) -> bool:
        """Whether a program was measured on all of these windows."""
        values = self._values.get(str(program))
        return values is not None and not np.isnan(values[2, windows.start : windows.stop]).any()

    def values(self, program: Program) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Negative log-likelihood and divergence of a measured program, each (windows,)."""
        nll, divergence, done = self._values[str(program)]
        assert not np.isnan(done).any(), "asked for a program that is not measured on all windows"
        return nll, divergence

    def _append(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        self._file.flush()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            where = self.path.parent
            raise OSError(f"another scan is writing to {where}; wait for it, or use another folder") from error

    def _load(self, identity: dict[str, Any]) -> None:
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.ftruncate(self._file.fileno(), whole)
        lines = content[:whole].splitlines()
        if not lines:
            self._append({"scan": identity})
            return
        self._check(self._parse(lines[0], 1), identity)
        for number, text in enumerate(lines[1:], start=2):
            line = self._parse(text, number)
            if "operations" in line:
                self.operations, self.at_once = line["operations"], line["at_once"]
            else:
                self._take(line)

    def _check(self, header: dict[str, Any], identity: dict[str, Any]) -> None:
        held = header.get("scan", {})
        for key, value in identity.items():
            if held.get(key) != value:
                what = f"{_NAMES.get(key, key)}: {_brief(held.get(key))}, now {_brief(value)}"
                raise ValueError(
                    f"{self.path.parent} holds a scan of another {what}; use another output folder (-o), "
                    "or delete this one to begin again"
                )

    def _parse(self, text: bytes, number: int) -> dict[str, Any]:
        try:
            line = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{self.path} is damaged in line {number}; delete the file to begin again") from error
        if not isinstance(line, dict):
            raise ValueError(f"{self.path} is damaged in line {number}; delete the file to begin again")
        return line

    def _take(self, line: dict[str, Any]) -> None:
        values = self._values.get(line["program"])
        if values is None:
            # Third row: not NaN where measured, so that a NaN that was measured is not taken for a gap.
            values = self._values[line["program"]] = np.full((3, self.windows), np.nan)
        windows = slice(line["start"], line["start"] + len(line["nll"]))
        values[0, windows], values[1, windows], values[2, windows] = line["nll"], line["divergence"], 1.0


def _brief(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:12] + "..."
