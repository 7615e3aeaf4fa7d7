"""The text that a model is trained on, and the text it is judged by meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from surgeon.quality.data import Windows, digest_of, load_windows, shared_windows

HELD_OUT_TOKENS = 16384


@dataclass(frozen=True)
class TrainTexts:
    """Both texts, in windows of one size."""

    training: Windows
    held_out: Windows

    def line(self) -> str:
        """How much there is of them, for people."""
        training, held_out = (
            f"{each.ids.numel():,} tokens of {each.source}" for each in (self.training, self.held_out)
        )
        return f"trained on {training}, measured on {held_out}, in windows of {self.training.ids.shape[1]}"

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
        training = load_windows(tokenizer, data, window, max(tokens, window), separator, at_most=True)
        measured = load_windows(tokenizer, held_out, window, held_out_tokens, separator)
        if shared_windows(training, measured):
            raise ValueError(
                f"windows of the held-out text {held_out} are in the training text {data}, too; a model is not judged "
                "by what it was trained on: hold out another text, or name none"
            )
        return TrainTexts(training, measured)
    apart = max(1, held_out_tokens // window)
    both = load_windows(tokenizer, data, window, max(tokens, window) + apart * window, separator, at_most=True)
    if len(both.ids) <= apart:
        raise ValueError(
            f"{data} has {len(both.ids)} windows of {window} tokens, and the last {apart} are held out to measure on: "
            "nothing is left to train on; give more text, hold out fewer tokens, or another text"
        )
    return TrainTexts(_part(both, slice(None, -apart)), replace(_part(both, slice(-apart, None)), notes=()))


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
        self._epoch, self._permutation = -1, list[int]()  # drawn last: places are asked for one after the other

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return map(self.__getitem__, range(self.count))

    def __getitem__(self, place: int) -> int:
        epoch, place_in_epoch = divmod(place, self.windows)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed((self.seed << 20) + epoch)
            self._epoch, self._permutation = epoch, torch.randperm(self.windows, generator=generator).tolist()
        return self._permutation[place_in_epoch]


class TrainingWindows(Dataset[dict[str, Tensor]]):
    """A run's windows in its order, as the Trainer takes them: one after the other is the whole run.

    Each has its tokens, which are its labels, too, and says which window it is, and at which place it stands.
    """

    def __init__(self, ids: Tensor, order: RunOrder) -> None:
        self.ids, self.order = ids, order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        index = self.order[place]
        ids = self.ids[index]
        return {"input_ids": ids, "labels": ids, "index": torch.tensor(index), "place": torch.tensor(place)}
