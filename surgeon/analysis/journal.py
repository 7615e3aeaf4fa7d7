"""The journal of a scan: what was measured, one line as soon as it is known, so that a killed scan can go on."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from surgeon.analysis.cells import Selection
from surgeon.program import Program
from surgeon.quality.head import Quality

JOURNAL = "journal.jsonl"
FORMAT = 2
_NAMES = {
    "format": "format, an older version's",
    "weights_hash": "model (hash of its weights)",
    "data": "text (hash of its tokens)",
    "window": "window size",
}


class Journal:
    """Per-window numbers of each program, in a file that only ever grows.

    The first line says what is measured; a folder that holds a scan of something else is refused. A last line that
    was cut off by a kill is dropped.

    Attributes:
        finished: what earlier runs that came to their end were asked for.
        at_once: how many windows the first run took together, which the next ones keep to get the same digits.
        spread: whether a run took the windows in the rounds of a screening, so that the next ones find them whole.

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
        self.finished: list[Selection] = []
        self.at_once: int | None = None
        self.spread = False
        self._values: dict[str, NDArray[np.float64]] = {}
        self._file: BinaryIO = self.path.open("a+b")
        try:
            self._lock()
            self._load({"format": FORMAT} | identity)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def start(self, at_once: int, spread: bool) -> None:
        """Note how many windows are taken together, and in which order."""
        spread = spread or self.spread
        if (at_once, spread) != (self.at_once, self.spread):
            self.at_once, self.spread = at_once, spread
            self._append({"at_once": at_once, "spread": spread})

    def finish(self, selection: Selection) -> None:
        """Note that everything this selection asks for is measured."""
        if selection not in self.finished:
            self.finished.append(selection)
            self._append({"finished": selection.to_json()})

    def add(self, program: Program, windows: Sequence[int], quality: Quality) -> None:
        """Keep one program's numbers on some windows."""
        nll, divergence = quality.nll.tolist(), quality.divergence.tolist()
        line = {"program": str(program), "windows": list(windows), "nll": nll, "divergence": divergence}
        self._append(line)
        self._take(line)

    def is_done(self, program: Program, windows: Sequence[int]) -> bool:
        """Whether a program was measured on all of these windows."""
        values = self._values.get(str(program))
        return values is not None and not np.isnan(values[2, list(windows)]).any()

    def values(self, program: Program, windows: Sequence[int]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Negative log-likelihood and divergence of a program on windows it was measured on, each (windows,)."""
        nll, divergence, done = self._values[str(program)][:, list(windows)]
        assert not np.isnan(done).any(), "asked for a program on windows that it was not measured on"
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
            try:
                self._read(line)
            except (IndexError, KeyError, TypeError, ValueError) as error:
                raise self._damaged(number) from error

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
            raise self._damaged(number) from error
        if not isinstance(line, dict):
            raise self._damaged(number)
        return line

    def _damaged(self, number: int) -> ValueError:
        return ValueError(f"{self.path} is damaged in line {number}; delete the file to begin again")

    def _read(self, line: dict[str, Any]) -> None:
        if "finished" in line:
            self.finished.append(Selection.from_json(line["finished"]))
        elif "at_once" in line:
            self.at_once, self.spread = line["at_once"], line["spread"]
        else:
            self._take(line)

    def _take(self, line: dict[str, Any]) -> None:
        values = self._values.get(line["program"])
        if values is None:
            # Third row: not NaN where measured, so that a NaN that was measured is not taken for a gap.
            values = self._values[line["program"]] = np.full((3, self.windows), np.nan)
        windows = line["windows"]
        values[0, windows], values[1, windows], values[2, windows] = line["nll"], line["divergence"], 1.0


def _brief(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:12] + "..."
