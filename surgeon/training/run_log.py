"""The tables that a run leaves: what was lost in training, and what was measured on held-out text."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surgeon.processes.files import whole_file
from surgeon.quality.text import TextQuality
from surgeon.training.checkpoints import step_of
from surgeon.training.resume import add_to_record, read_record

_BEFORE = "before"  # its training: in the record
TRAINING_FILE, HELD_OUT_FILE = "training.csv", "held_out.csv"
TRAINING = ("step", "tokens", "seconds", "loss", "learning_rate", "logits", "hidden", "text")
HELD_OUT = (
    *("step", "seconds", "perplexity", "perplexity_low", "perplexity_high"),
    *("divergence", "divergence_low", "divergence_high"),
)


class RunLog:
    """Both tables of a run; one that goes on has them as they were at the checkpoint it goes on from.

    Attributes:
        files: the tables, which belong into every checkpoint.

    Args:
        folder: of the run.
        checkpoint: from which it goes on; None where it begins. One of the version before has no tables.
    """

    def __init__(self, folder: Path, checkpoint: Path | None = None) -> None:
        self._folder = folder
        self.files = (folder / TRAINING_FILE, folder / HELD_OUT_FILE)
        self.seconds = 0.0
        for path, columns in zip(self.files, (TRAINING, HELD_OUT), strict=True):
            rows: list[dict[str, str]] = []
            if checkpoint is not None:
                kept = checkpoint / path.name
                there = read_rows(kept if kept.is_file() else path)
                rows = [row for row in there if int(row["step"]) <= step_of(checkpoint)]
            with whole_file(path) as beside, beside.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, columns, lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
            self.seconds = max([self.seconds, *(float(row["seconds"]) for row in rows)])

    def training(self, row: Mapping[str, float]) -> None:
        """Add a row on the loss."""
        _append(self.files[0], TRAINING, row)

    def held_out(self, step: int, seconds: float, quality: TextQuality) -> None:
        """Add a row on held-out text; of the first one, every digit is kept in the run's record."""
        _append(self.files[1], HELD_OUT, {"step": step, "seconds": seconds} | flat(quality))
        if step == 0:
            add_to_record(self._folder, {_BEFORE: quality.to_json()})

    def first_quality(self) -> TextQuality | None:
        """What was measured before the first step, if it was."""
        kept = read_record(self._folder).get(_BEFORE) if read_rows(self.files[1]) else None
        return None if kept is None else TextQuality.from_json(kept)


def flat(quality: TextQuality) -> dict[str, float]:
    """A quality as columns; what is not known is NaN."""
    unknown = (math.nan, math.nan)
    perplexity, divergence = quality.perplexity_interval or unknown, quality.divergence_interval or unknown
    return {
        "perplexity": quality.perplexity,
        "perplexity_low": perplexity[0],
        "perplexity_high": perplexity[1],
        "divergence": math.nan if quality.divergence is None else quality.divergence,
        "divergence_low": divergence[0],
        "divergence_high": divergence[1],
    }


def read_rows(path: Path) -> list[dict[str, str]]:
    """The whole rows of a table that a run writes; a last one that a kill cut off is left out."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        text = file.read()
    rows = csv.DictReader(text[: text.rfind("\n") + 1].splitlines())
    return [row for row in rows if None not in row and None not in row.values()]


def _append(path: Path, columns: tuple[str, ...], row: Mapping[str, Any]) -> None:
    with path.open("a", newline="", encoding="utf-8") as file:
        csv.DictWriter(file, columns, lineterminator="\n").writerow(
            {name: f"{row[name]:.9g}" for name in columns if name in row}
        )
