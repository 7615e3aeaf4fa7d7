"""What of a text is learned, for people: how many of its tokens, and which of its first row."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from surgeon.training.packing import IGNORED
from surgeon.training.texts import TrainingText

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
    begins = np.flatnonzero(row["position_ids"] == 0) if "position_ids" in row else np.zeros(1, int)
    end = begins[1] if len(begins) > 1 else len(ids)
    turns = np.flatnonzero(np.diff(learned[:end])) + 1  # from what is learned to what is not, and back
    parts = [(tokenizer.decode(ids[first:last]), learned[first]) for first, last in pairwise([0, *turns, end])]
    return "".join(f"{_MARKS[0]}{part}{_MARKS[1]}" if is_learned else part for part, is_learned in parts)
