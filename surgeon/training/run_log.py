"""What a run says while it goes on: the tables in its folder, and the numbers beside its progress bar."""

from __future__ import annotations

import csv
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from surgeon.processes.files import whole_file
from surgeon.progress import Advance
from surgeon.quality.summary import Quality
from surgeon.training.checkpoints import step_of
from surgeon.training.resume import add_to_record, read_record
from surgeon.training.trainer import ModelTrainer

_BEFORE = "before"  # its training: in the record
TRAINING_FILE = "training.csv"
HELD_OUT_FILE = "held_out.csv"
TRAINING = ("step", "tokens", "seconds", "loss", "learning_rate", "logits", "hidden", "text", "balance")
HELD_OUT = (
    *("step", "seconds", "perplexity", "perplexity_low", "perplexity_high"),
    *("divergence", "divergence_low", "divergence_high"),
)


class RunLog(TrainerCallback):
    """Writes both tables of a run, and moves its progress bar.

    A run that goes on has its tables as they were at the checkpoint it goes on from.

    Attributes:
        files: the tables, which belong into every checkpoint; none in every process but the first.
        advance: moves the progress bar; set once there is one, in the first process.
        latest: what the progress bar says beside the time left.

    Args:
        trainer: whose run it is.
        folder: of the run; None in every process but the first.
        checkpoint: from which it goes on; None where it begins. One of the version before has no tables.
        tokens: of training text in a step.
    """

    def __init__(self, trainer: ModelTrainer, folder: Path | None, checkpoint: Path | None, tokens: int) -> None:
        self.trainer = trainer
        self.folder = folder
        self.tokens = tokens
        self.files = () if folder is None else (folder / TRAINING_FILE, folder / HELD_OUT_FILE)
        self.advance: Advance = lambda _: None
        self.latest: dict[str, float] = {}
        self._before = 0.0
        self._begun = time.monotonic()
        for path, columns in zip(self.files, (TRAINING, HELD_OUT), strict=False):
            rows: list[dict[str, str]] = []
            if checkpoint is not None:
                copy = checkpoint / path.name
                there = read_rows(copy if copy.is_file() else path)
                rows = [row for row in there if int(row["step"]) <= step_of(checkpoint)]
            with whole_file(path) as beside, beside.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, columns, lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
            self._before = max([self._before, *(float(row["seconds"]) for row in rows)])

    @property
    def seconds(self) -> float:
        """Of the run so far, with those of earlier processes."""
        return self._before + time.monotonic() - self._begun

    def note(self) -> str:
        """The latest numbers, in as many words as stand beside a bar on a narrow terminal."""
        names = ("loss", "divergence" if "divergence" in self.latest else "perplexity")
        return ", ".join(f"{name} {self.latest[name]:.4g}" for name in names if name in self.latest)

    def held_out_before(self) -> Quality | None:
        """What was measured before the first step, if it was."""
        if self.folder is None or not read_rows(self.folder / HELD_OUT_FILE):
            return None
        before = read_record(self.folder).get(_BEFORE)
        if before is None:
            return None
        return Quality.from_json(before)

    def held_out(self, step: int, seconds: float, quality: Quality) -> None:
        """Add a row on held-out text; of the first one, every digit is put into the run's record."""
        if self.folder is None:
            return
        _append(self.folder / HELD_OUT_FILE, HELD_OUT, {"step": step, "seconds": seconds} | quality.estimates)
        if step == 0:
            add_to_record(self.folder, {_BEFORE: quality.to_json()})

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._begun = time.monotonic()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> Any:  # noqa: ARG002
        self.advance(1)
        if control.should_save or state.global_step >= state.max_steps:
            control.should_log = True  # so that a run that goes on from here has the same rows
        return control

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **_: Any) -> None:  # noqa: ARG002
        if logs is None or "loss" not in logs:
            return
        self.latest["loss"] = logs["loss"]
        if self.folder is not None:
            place = {"step": state.global_step, "tokens": state.global_step * self.tokens, "seconds": self.seconds}
            _append(self.folder / TRAINING_FILE, TRAINING, place | logs)

    def on_evaluate(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:  # noqa: ARG002
        quality = self.trainer.latest
        assert quality is not None
        self.latest["perplexity"] = quality.perplexity
        if quality.knows("divergence"):
            self.latest["divergence"] = quality.divergence
        self.held_out(state.global_step, self.seconds, quality)


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
