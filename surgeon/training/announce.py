"""What `surgeon.heal` and `surgeon.train` say while they go on."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from accelerate import PartialState

from surgeon.exports.prove import Proof
from surgeon.quality.summary import Quality
from surgeon.training.arguments import describe_devices
from surgeon.training.packing import IGNORED
from surgeon.training.settings import TrainSettings
from surgeon.training.texts import TrainingText, TrainTexts

_MARKS = ("\u27e6", "\u27e7")  # white square brackets, around what is learned
_ROWS_AT_ONCE = 1000


def learned_lines(text: TrainingText, tokenizer: Any, show_row: bool = False) -> list[str]:
    """How many tokens of a text are learned, where those are not all but the first of each window.

    Args:
        show_row: and the first row, as text with what is learned of it between brackets.
    """
    lines = []
    if "labels" in text.rows.column_names:
        blocks = text.rows.select_columns("labels").with_format("numpy").iter(_ROWS_AT_ONCE)
        learned = sum(int((block["labels"] != IGNORED).sum()) for block in blocks)
        total = len(text) * text.window
        lines.append(f"of the {total:,} tokens to train on, padding among them, {learned:,} are learned")
    if show_row:
        lines += [f"one row, what is learned of it between {' '.join(_MARKS)}:", _first_row(text, tokenizer)]
    return lines


def _first_row(text: TrainingText, tokenizer: Any) -> str:
    """The first document or conversation of a text, decoded; what is learned of it stands between marks."""
    row = text.rows.with_format("numpy")[0]
    ids = row["input_ids"]
    learned = row.get("labels", row["input_ids"]) != IGNORED
    if "position_ids" in row:
        begins = np.flatnonzero(row["position_ids"] == 0)
    else:
        begins = np.zeros(1, int)
    end = begins[1] if len(begins) > 1 else len(ids)
    turns = np.flatnonzero(np.diff(learned[:end])) + 1  # from what is learned to what is not, and back
    parts = [(tokenizer.decode(ids[first:last]), learned[first]) for first, last in pairwise([0, *turns, end])]
    return "".join(f"{_MARKS[0]}{part}{_MARKS[1]}" if is_learned else part for part, is_learned in parts)


def announce(
    processes: PartialState,
    where: str,
    what: str,
    texts: TrainTexts,
    settings: TrainSettings,
    tokenizer: Any,
    show_row: bool = False,
) -> None:
    """Say on standard error, once for all processes, what is trained on what; and warn of what to know of the texts."""
    notes = (*texts.notes, *settings.notes_on(len(texts.training)))  # refuses too little text, in every process
    if processes.is_main_process:
        learned = learned_lines(texts.training, tokenizer, show_row)
        say(f"{what}; {texts.line()}", *learned, describe_devices(processes, where))
        for note in notes:
            warnings.warn(note, stacklevel=1)


def say_stages(stages: Mapping[str, Quality | None]) -> None:
    """Say how good the model was, and is, as far as that is known."""
    width = max(map(len, stages))
    say(*(f"{stage:<{width}} {quality.line()}" for stage, quality in stages.items() if quality is not None))


def say_proof(proof: Proof, whose: str) -> None:
    """Say what was proven; `whose` the program is."""
    say(
        f"proof: the program is {whose}; on {proof.tokens} random tokens the logits differ from the trained "
        f"model's {proof.differ}."
    )


def say(*lines: str) -> None:
    """Say something on standard error; empty lines are left out."""
    for line in filter(None, lines):
        print(line, file=sys.stderr, flush=True)
