"""Rows of a paper's tables as they are printed and written: what the paper has beside what was measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd

from scripts.cost.cases import NOTES
from surgeon.processes.files import write_table, write_text

NOTHING = float("nan")
HEAD = "| table | row | ranks | printed | here | unit | printed, x | here, x | |\n|:--|:--|--:|--:|--:|:--|--:|--:|:--|"


@dataclass(frozen=True)
class Line:
    """A row of the result.

    Attributes:
        ranks: that measured it; the paper's are in `printed_ranks`.
        printed, here: in the printed unit; NaN where it was not measured.
        printed_speedup, here_speedup: times the baseline of the table; NaN for a baseline.
        note: why there is nothing, or nothing to say.
    """

    table: str
    row: str
    ranks: int
    printed_ranks: int
    printed: float
    here: float
    unit: str
    printed_speedup: float
    here_speedup: float
    note: str

    def __str__(self) -> str:
        ranks = (
            str(self.ranks)
            if self.ranks == self.printed_ranks
            else f"{self.ranks} of {self.printed_ranks}"
        )
        numbers = (self.printed, self.here, self.printed_speedup, self.here_speedup)
        printed, here, *speedups = ("" if one != one else f"{one:.4g}" for one in numbers)
        cells = [self.table, self.row, ranks, printed, here, self.unit, *speedups, self.note]
        return "| " + " | ".join(cells) + " |"


def write(folder: Path, lines: Sequence[Line], heading: str) -> None:
    """What is sent back, beside the runs."""
    read = [
        f"- {table}: {NOTES[table]}"
        for table in dict.fromkeys(line.table for line in lines)
        if table in NOTES
    ]
    notes = ["", "How rows are read, of which a paper does not say all:", "", *read] if read else []
    write_text(folder / "table.md", "\n".join([heading, "", HEAD, *map(str, lines), *notes]) + "\n")
    write_table(folder / "rows.csv", pd.DataFrame([asdict(line) for line in lines]))
    records = [
        {name: None if value != value else value for name, value in asdict(line).items()}
        for line in lines
    ]
    write_text(folder / "rows.json", json.dumps(records, indent=1) + "\n")
