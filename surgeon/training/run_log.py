"""Progress of a run: tables in its folder, and numbers beside its progress bar."""

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

TRAINING_FILE = "training.csv"
HELD_OUT_FILE = "held_out.csv"
TABLES = {
    TRAINING_FILE: (
        "step",
        "tokens",
        "seconds",
        "loss",
        "learning_rate",
        "logits",
        "hidden",
        "text",
        "balance",
    ),
    HELD_OUT_FILE: (
        *("step", "seconds", "perplexity", "perplexity_low", "perplexity_high"),
        *("divergence", "divergence_low", "divergence_high"),
    ),
}
_NEEDED = {TRAINING_FILE: "loss", HELD_OUT_FILE: "perplexity"}  # by a row of each


class RunLog(TrainerCallback):
    """Writes both tables of a run, of what the Trainer has logged, and moves its progress bar.

    Attributes:
        before: the model's quality before its training.
        advance: moves the progress bar; set in the first process.
        latest: last logged numbers, of training and of held-out text.

    Args:
        folder: of the run; None in every process but the first.
        tokens: of training text in a step.
    """

    before: Quality

    def __init__(self, folder: Path | None, tokens: int) -> None:
        self.folder = folder
        self.tokens = tokens
        self.advance: Advance = lambda _: None
        self.latest: dict[str, Any] = {}
        self._before = 0.0
        self._begun = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds of the run so far, with those of earlier processes."""
        return self._before + time.monotonic() - self._begun

    def note(self) -> str:
        names = ("loss", "divergence" if "divergence" in self.latest else "perplexity")
        return ", ".join(f"{name} {self.latest[name]:.4g}" for name in names if name in self.latest)

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:  # noqa: ARG002
        self._begun = time.monotonic()
        self._before = max([0.0, *(row.get("seconds", 0.0) for row in state.log_history)])
        if self.folder is not None:
            for name, columns in TABLES.items():
                with (
                    whole_file(self.folder / name) as beside,
                    beside.open("w", newline="", encoding="utf-8") as file,
                ):
                    csv.DictWriter(file, columns, lineterminator="\n").writeheader()
            self._add({"step": 0, "seconds": 0.0} | self.before.estimates)
            for row in state.log_history:
                self._add(row)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> Any:  # noqa: ARG002
        self.advance(1)
        if control.should_save or state.global_step >= state.max_steps:
            control.should_log = True  # so that a run that goes on from here has the same rows
        return control

    def on_log(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:  # noqa: ARG002
        row: Any = state.log_history[-1]
        row |= {"tokens": state.global_step * self.tokens, "seconds": self.seconds}
        self.latest |= _rename_quantities(row)
        if self.folder is not None:
            self._add(row)

    def _add(self, row: Mapping[str, Any]) -> None:
        assert self.folder is not None
        numbers = _rename_quantities(row)
        for name, columns in TABLES.items():
            if _NEEDED[name] in numbers:
                with (self.folder / name).open("a", newline="", encoding="utf-8") as file:
                    csv.DictWriter(file, columns, lineterminator="\n").writerow(
                        {column: f"{numbers[column]:.9g}" for column in columns if column in numbers}
                    )


def _rename_quantities(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name.removeprefix("eval_") if name != "eval_loss" else name: value for name, value in row.items()
    }


def read_rows(path: Path) -> list[dict[str, str]]:
    """Read the whole rows of a run's table, without a last one that a kill cut off."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        text = file.read()
    rows = csv.DictReader(text[: text.rfind("\n") + 1].splitlines())
    return [row for row in rows if None not in row and None not in row.values()]
