"""The journal of a scan: what was measured, and what the scans were asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from surgeon.analysis.cells import Selection
from surgeon.analysis.engine.program_journal import ProgramJournal
from surgeon.provenance import FORMAT

JOURNAL = "journal.jsonl"


class ScanJournal(ProgramJournal):
    """What a folder's scans have measured, in the order in which they did.

    Attributes:
        finished: what earlier runs that came to their end were asked for.
        at_once: how many windows the first run took together, which the next ones keep to get the same digits.
        spread: whether a run took the windows in the rounds of a screening, so that the next ones find them whole.

    Args:
        folder: made if it is not there.
        identity: what the numbers depend on, as JSON values.
        windows: how many windows are measured.

    Raises:
        ValueError, OSError: as `Journal`.
    """

    def __init__(self, folder: Path, identity: dict[str, Any], windows: int) -> None:
        self.finished: list[Selection] = []
        self.at_once: int | None = None
        self.spread = False
        super().__init__(folder, JOURNAL, "scan", {"format": FORMAT} | identity, windows)

    def start(self, at_once: int, spread: bool) -> None:
        """Note how many windows are taken together, and in which order."""
        spread = spread or self.spread
        if (at_once, spread) != (self.at_once, self.spread):
            self.keep({"at_once": at_once, "spread": spread})

    def finish(self, selection: Selection) -> None:
        """Note that everything this selection asks for is measured."""
        if selection not in self.finished:
            self.keep({"finished": selection.to_json()})

    def take(self, line: Any) -> None:
        if "finished" in line:
            self.finished.append(Selection.from_json(line["finished"]))
        elif "at_once" in line:
            self.at_once, self.spread = line["at_once"], line["spread"]
        else:
            super().take(line)
