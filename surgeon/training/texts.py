"""The text that a model is trained on, and the text it is judged by meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import torch
from datasets.arrow_writer import ArrowWriter
from torch import Tensor
from torch.utils.data import Dataset

from surgeon.processes.files import whole_file
from surgeon.quality.data import Windows, digest_of, load_windows, shared_windows
from surgeon.training.packing import Row

HELD_OUT_TOKENS = 16384
_ROWS_AT_ONCE = 1000


@dataclass(frozen=True)
class TrainingText:
    """A text to train on, in windows: rows of Arrow, in files that are mapped into memory where it is large.

    Attributes:
        rows: a window each, with columns as `surgeon.training.packing.columns` has them.
        source, digest, notes, column, left_out: as of `Windows`.
    """

    rows: datasets.Dataset
    source: str
    digest: str
    notes: tuple[str, ...] = ()
    column: str | None = None
    left_out: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, windows: Windows) -> TrainingText:
        """A text in memory, joined."""
        rows = datasets.Dataset(as_table([{"input_ids": row} for row in windows.ids.numpy().astype(np.int32)]))
        found = windows
        return cls(rows, found.source, found.digest, found.notes, found.column, found.left_out)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def window(self) -> int:
        """Tokens in each."""
        return len(self.rows[0]["input_ids"])

    @property
    def ids(self) -> Tensor:
        """All of them, (windows, tokens), read into memory."""
        found: Tensor = self.rows.with_format("torch")[:]["input_ids"]
        return found

    def record(self) -> dict[str, Any]:
        """Which text this is, as JSON values."""
        return Windows(torch.empty(0), self.source, self.digest, None, (), self.column, self.left_out).record()


def as_table(rows: list[Row]) -> pa.Table:
    """Rows of one size as columns of Arrow."""
    window = len(rows[0]["input_ids"])
    flat = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    return pa.table({name: pa.FixedSizeListArray.from_arrays(pa.array(each), window) for name, each in flat.items()})


def write_rows(path: Path, rows: datasets.Dataset) -> None:
    """Write rows to a file of Arrow, which is whole or not there.

    Raises:
        OSError: if it cannot be written.
    """
    with whole_file(path) as beside, ArrowWriter(path=str(beside), features=rows.features) as writer:
        for table in rows.with_format("arrow").iter(_ROWS_AT_ONCE):
            writer.write_table(table)
        writer.finalize()


def read_rows(path: Path) -> datasets.Dataset:
    """The rows of a file of Arrow, which is mapped into memory.

    Raises:
        FileNotFoundError: if it is not there.
    """
    return datasets.Dataset.from_file(str(path))


def model_inputs(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What of some windows a model's forward pass takes."""
    return {name: inputs[name] for name in ("input_ids", "position_ids") if name in inputs}


@dataclass(frozen=True)
class TrainTexts:
    """Both texts, in windows of one size."""

    training: TrainingText
    held_out: Windows

    def line(self) -> str:
        """How much there is of them, for people."""
        window = self.training.window
        training = f"{len(self.training) * window:,} tokens of {self.training.source}"
        what = "tokens" if self.held_out.answers is None else "tokens of answers"
        count = self.held_out.ids.numel() if self.held_out.answers is None else self.held_out.predicted
        held_out = f"{count:,} {what} of {self.held_out.source}"
        return f"trained on {training}, measured on {held_out}, in windows of {window}"

    def record(self) -> dict[str, Any]:
        """Which texts these are, as JSON values: `data` is trained on, `held_out` measured."""
        return self.training.record() | self.held_out.record("held_out")

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know of them, one line each."""
        return self.training.notes + self.held_out.notes


def load_train_texts(
    tokenizer: Any,
    data: str,
    window: int,
    tokens: int,
    held_out: str | None = None,
    held_out_tokens: int = HELD_OUT_TOKENS,
    separator: str | None = None,
) -> TrainTexts:
    """Training text and held-out text.

    Args:
        data, separator: as `load_windows` takes them.
        tokens: of training text, at most; what there is, if there is less.
        held_out: data to measure on; by default the last `held_out_tokens` of the training text, which then are not
            trained on.

    Raises:
        FileNotFoundError: if there is no such text.
        ValueError: if it cannot be used, is too short, or both texts are the same.
    """
    if held_out is not None:
        read = load_windows(tokenizer, data, window, max(tokens, window), separator, at_most=True)
        measured = load_windows(tokenizer, held_out, window, held_out_tokens, separator)
        if shared_windows(read, measured):
            raise ValueError(
                f"windows of the held-out text {held_out} are in the training text {data}, too; a model is not judged "
                "by what it was trained on: hold out another text, or name none"
            )
        return TrainTexts(TrainingText.of(read), measured)
    apart = max(1, held_out_tokens // window)
    both = load_windows(tokenizer, data, window, max(tokens, window) + apart * window, separator, at_most=True)
    if len(both.ids) <= apart:
        raise ValueError(
            f"{data} has {len(both.ids)} windows of {window} tokens, and the last {apart} are held out to measure on: "
            "nothing is left to train on; give more text, hold out fewer tokens, or another text"
        )
    training = TrainingText.of(_part(both, slice(None, -apart)))
    return TrainTexts(training, replace(_part(both, slice(-apart, None)), notes=()))


def _part(windows: Windows, rows: slice) -> Windows:
    ids = windows.ids[rows].clone()
    return replace(windows, ids=ids, digest=digest_of(ids))


class RunOrder:
    """Which window comes when, over a whole run: every epoch in an order of its own, which follows from the seed.

    As one list for all epochs it makes a run the same whatever the number of processes and the size of micro-batches,
    and wherever it is interrupted.
    """

    def __init__(self, windows: int, steps: int, batch: int, seed: int) -> None:
        self.windows, self.count, self.seed = windows, steps * batch, seed
        self._epoch, self._permutation = -1, torch.empty(0)  # drawn last: places are asked for one after the other

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return map(self.__getitem__, range(self.count))

    def __getitem__(self, place: int) -> int:
        epoch, place_in_epoch = divmod(place, self.windows)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed((self.seed << 20) + epoch)
            self._epoch, self._permutation = epoch, torch.randperm(self.windows, generator=generator)
        return int(self._permutation[place_in_epoch])


class TrainingWindows(Dataset[dict[str, Tensor]]):
    """A run's windows in its order, as the Trainer takes them: one after the other is the whole run.

    Each has its tokens, and its labels, which are its tokens where it has none of its own; and says which window it is,
    and at which place it stands.
    """

    def __init__(self, text: TrainingText, order: RunOrder) -> None:
        self.rows, self.order = text.rows.with_format("torch"), order
        self.has_labels = "labels" in text.rows.column_names

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        index = self.order[place]
        row: dict[str, Tensor] = self.rows[index]
        return {"labels": row["input_ids"]} | row | {"index": torch.tensor(index), "place": torch.tensor(place)}
