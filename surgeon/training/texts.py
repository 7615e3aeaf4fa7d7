"""Training text, and held-out text to measure on: of documents, or of conversations.

Conversations are whole in their windows, where only answers count; those to measure on have a window each.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from surgeon.quality.conversations import read_conversations
from surgeon.quality.data import (
    HELD_OUT_SHARE,
    HELD_OUT_TOKENS,
    Tokens,
    Windows,
    check_window,
    digest_of,
    marks_in_text,
)
from surgeon.quality.sources import read_pieces
from surgeon.training.token_store import (
    ROWS_AT_ONCE,
    SELF,
    Documents,
    TextSource,
    as_table,
    rows_digest,
    split_documents,
)
from surgeon.words import plural, show_value

_LOOKED_AT = 1 << 16  # tokens, for marks that were read as text


def parse_texts(texts: str | Path | Sequence[str] | Mapping[str, float]) -> str | Mapping[str, float]:
    """Parse one text, or several, each with its weight behind it ("text.txt=0.7"), for `load_texts`.

    Raises:
        ValueError: if one of several has no weight, or occurs twice.
    """
    if isinstance(texts, Mapping):
        return texts
    if isinstance(texts, str | Path):
        return str(texts)
    if len(texts) == 1:
        return texts[0]
    found: dict[str, float] = {}
    for text in texts:
        source, _, weight = text.rpartition("=")
        try:
            number = float(weight)
        except ValueError as error:
            raise ValueError(
                f"{text} has no weight, as each of several texts needs one; write {text}=0.5, say"
            ) from error
        if source in found:
            raise ValueError(f"{source} is given twice; give it once, with one weight")
        found[source] = number
    return found


def check_texts(data: Any) -> str | dict[str, float]:
    """Check a text, or several with their weights."""
    if isinstance(data, str) and data:
        return data
    if not isinstance(data, Mapping) or not data:
        example = "{a.jsonl: 0.7, b.txt: 0.3}"
        raise ValueError(
            f"it must be a text, or several with their weights, as {example}, not {show_value(data)}"
        )
    for name, weight in data.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < inf:
            raise ValueError(f"the weight of {name} must be a number above 0, not {show_value(weight)}")
    return {str(name): float(weight) for name, weight in data.items()}


@dataclass(frozen=True)
class TrainingText:
    """A text to train on, in windows: rows of Arrow, mapped into memory from files where it is large.

    Attributes:
        rows: a window each, with columns as `columns` has them.
        source, digest, notes, column, left_out: as of `Windows`.
        parts: the texts that it is made of, where they are several: windows of each, one after the other, and weight.
    """

    rows: datasets.Dataset
    source: str
    digest: str
    notes: tuple[str, ...] = ()
    column: str | None = None
    left_out: Mapping[str, int] = field(default_factory=dict)
    parts: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of(cls, windows: Windows) -> TrainingText:
        """Make a text of windows in memory, joined."""
        ids = windows.ids.numpy().astype(np.int32)
        rows = datasets.Dataset(
            as_table([{"input_ids": row} for row in ids], ("input_ids",), ids.shape[1])
        )
        return cls(rows, windows.source, windows.digest, windows.notes, windows.column, windows.left_out)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def window(self) -> int:
        return len(self.rows[0]["input_ids"])

    @property
    def ids(self) -> Tensor:
        """Token ids of all windows, (windows, tokens), read into memory."""
        found: Tensor = self.rows.with_format("torch")[:]["input_ids"]
        return found

    def record(self) -> dict[str, Any]:
        return Windows(
            torch.empty(0), self.source, self.digest, None, (), self.column, self.left_out
        ).record()


def model_inputs(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Select the inputs of a model's forward pass."""
    return {name: inputs[name] for name in ("input_ids", "position_ids") if name in inputs}


@dataclass(frozen=True)
class TrainTexts:
    """Training text and held-out text, in windows of one size.

    Attributes:
        behind: number of windows behind the training text that are held out; 0 for another text.
    """

    training: TrainingText
    held_out: Windows
    behind: int = 0

    def line(self) -> str:
        window = self.training.window
        training = f"{len(self.training) * window:,} tokens of {self.training.source}"
        what = f"{self.held_out.ids.numel():,} tokens"
        if self.held_out.answers is not None:
            what = f"{self.held_out.predicted_tokens:,} predicted tokens"
        held_out = f"{what} of {self.held_out.source}"
        if self.behind:
            held_out += f" (held out: {plural(self.behind, 'window')} behind them)"
        return f"trained on {training}, measured on {held_out}, in windows of {window}"

    def record(self) -> dict[str, Any]:
        """JSON values: `data` is trained on, `held_out` measured."""
        return self.training.record() | self.held_out.record("held_out")

    @property
    def notes(self) -> tuple[str, ...]:
        return self.training.notes + self.held_out.notes


def load_texts(
    tokenizer: Any,
    data: str | Mapping[str, float],
    window: int,
    tokens: int,
    held_out: str | None = None,
    held_out_tokens: int | None = None,
    separator: str | None = None,
    documents: Documents = "joined",
    own: TextSource | None = None,
) -> TrainTexts:
    """Load training text and held-out text, the former from the disk, where it is tokenized once.

    Conversations are written as by `surgeon.quality.conversations.ConversationTokenizer`, none longer than a window.
    Those to train on are whole in windows, several in one where they fit.

    Args:
        data, separator: as `load_windows` takes them; or several texts, of which windows are taken by their weights.
        tokens: of training text, at most, in whole windows.
        held_out: data to measure on, which is measured as one text, joined, whatever `documents` says; by default
            windows behind the training text, of each of several by its weight. Of those each document is measured by
            itself where they are apart.
        held_out_tokens: to measure on, in whole windows; by default 16,384 at most, and of the training text no more
            than a tenth, at least one window.
        documents: how they share windows (`Packer`).
        own: a text that is written as far as it is needed, by its name (`surgeon.training.self_text`).

    Raises:
        FileNotFoundError: if there is no such text.
        ValueError: if it cannot be used, is too short, or both texts are the same; or if only some texts are of
            conversations.
        OSError: if it cannot be read to the end, or there is no room for its tokens.
    """
    check_window(window)
    data = check_texts(data)
    several = {data: 1.0} if isinstance(data, str) else data
    own_texts = {} if own is None else {own.source: own}
    chats = _hold_conversations(
        tokenizer, [*several, *([] if held_out is None else [held_out])], own_texts, window
    )
    if chats:
        if separator is not None:
            name = next(iter(several))
            raise ValueError(
                f"{name} holds conversations, which are apart as they are; leave the separator out"
            )
        documents = "whole"
    size = HELD_OUT_TOKENS if held_out_tokens is None else held_out_tokens
    behind = max(1, size // window)
    measured = None
    if held_out is not None:
        source = TextSource(
            tokenizer, held_out, window, "whole" if chats else "joined", separator, chats
        )
        other, _ = _split(source, behind, 0, is_share=False)
        measured = replace(_to_measure(other.rows, other, separator), notes=other.notes)
        behind = 0
    wanted = max(1, tokens // window)
    texts = list[TrainingText]()
    rests = list[datasets.Dataset]()
    for name, weight in several.items():
        share = weight / sum(several.values())
        source = own_texts.get(name) or TextSource(tokenizer, name, window, documents, separator, chats)
        needed = wanted if len(several) == 1 else ceil(share * wanted) + 1
        text, rest = _split(source, needed, ceil(share * behind), held_out_tokens is None)
        texts.append(text)
        if rest is not None:
            rests.append(rest)
        if measured is not None:
            require_apart(text, measured)
    training = texts[0]
    if len(texts) > 1:
        weights = list(several.values())
        follows = [[text.digest, weight] for text, weight in zip(texts, weights, strict=True)]
        training = TrainingText(
            datasets.concatenate_datasets([text.rows for text in texts]),
            ", ".join(f"{name}={weight:g}" for name, weight in several.items()),
            hashlib.sha256(json.dumps(follows).encode()).hexdigest(),
            tuple(note for text in texts for note in text.notes),
            parts=tuple(zip(map(len, texts), weights, strict=True)),
        )
    if measured is not None:
        return TrainTexts(training, measured)
    rows = datasets.concatenate_datasets(rests)
    return TrainTexts(training, _to_measure(rows, training, separator), len(rows))


def _to_measure(rows: datasets.Dataset, text: TrainingText, separator: str | None) -> Windows:
    """Make windows to measure on of rows of a text; of documents that are apart one of each."""
    if "labels" in rows.column_names:
        found = pad_pieces(split_documents(rows), text.source)
    else:
        ids = rows.with_format("torch")[:]["input_ids"]
        found = Windows(ids, text.source, digest_of(ids))
    return replace(found, separator=separator, column=text.column, left_out=text.left_out)


def _hold_conversations(tokenizer: Any, names: Sequence[str], own: Iterable[str], window: int) -> bool:
    """Tell whether texts hold conversations, all or none; those of `own` hold none."""
    read = [name for name in names if name not in own]
    if SELF in read:
        raise ValueError(
            f"{SELF} is text that the original of an edited model writes, for surgeon heal; give another text, or "
            f"./{SELF} for a file of this name"
        )
    chats = [name for name in read if read_conversations(tokenizer, name, window) is not None]
    others = [name for name in names if name not in chats]
    if chats and others:
        raise ValueError(
            f"{chats[0]} holds conversations, and {others[0]} does not; give texts of one sort"
        )
    return bool(chats)


def _split(
    source: TextSource, needed: int, behind: int, is_share: bool
) -> tuple[TrainingText, datasets.Dataset | None]:
    """Split a text into at most `needed` windows to train on, and those behind them.

    Args:
        behind: windows to hold out.
        is_share: hold out at most a share of the text.
    """
    if is_share and source.endless:
        behind = min(behind, max(1, needed // (HELD_OUT_SHARE - 1)))
    asked = needed + behind
    if is_share and not source.endless:
        asked = max(asked, HELD_OUT_SHARE * behind)
    rows, facts = source.windows(asked)
    there = len(rows)
    if is_share:
        behind = min(behind, max(1, there // HELD_OUT_SHARE))
    count = min(needed, there - behind)
    if count < 1 and behind:
        raise ValueError(
            f"{source.source} has {plural(there, 'window')} of {source.window} tokens, and {behind} of the last ones "
            "are held out to measure on: nothing is left to train on; give more text, hold out fewer tokens, or "
            "another text, or use a smaller window"
        )
    if count < 1:
        raise ValueError(
            f"{source.source} has no whole window of {source.window} tokens; give more text, or a smaller window"
        )
    training = rows.select(range(count))
    notes = list[str](facts["notes"])
    if not (source.apart or source.chats):
        looked_at = training.select(range(min(count, max(1, _LOOKED_AT // source.window)))).with_format(
            "torch"
        )
        notes += marks_in_text(
            source.tokenizer, looked_at[:]["input_ids"].flatten().tolist(), source.source
        )
    if source.endless and behind:
        notes.append(
            "held out is what the original wrote itself, which says little of other text; give some to measure on"
        )
    digest = rows_digest(training, source.window)
    text = TrainingText(
        training, source.source, digest, tuple(notes), facts["column"], facts["left_out"]
    )
    if not behind:
        return text, None
    return text, rows.select(range(count, count + behind))


def require_apart(text: TrainingText, measured: Windows) -> None:
    """Refuse to measure on what is trained on."""
    if measured.answers is None:
        what = "windows"
        seen = {row.tobytes() for row in measured.ids.numpy()}
        blocks = text.rows.with_format("numpy").iter(ROWS_AT_ONCE)
        own = (row.astype(np.int64).tobytes() for block in blocks for row in block["input_ids"])
    else:
        what = "conversations"
        windows = zip(measured.ids.numpy(), measured.answers.numpy(), strict=True)
        seen = {_up_to_last_answer(Tokens(ids, answer)) for ids, answer in windows}
        own = (_up_to_last_answer(each) for each in split_documents(text.rows))
    if again := sum(one in seen for one in own):
        raise ValueError(
            f"{again} of the {what} of the held-out text {measured.source} are in the training text {text.source}, "
            "too; a model is not judged by what it was trained on: hold out another text, or name none"
        )


def _up_to_last_answer(found: Tokens) -> bytes:
    assert found.answer is not None
    return found.ids[: np.flatnonzero(found.answer)[-1] + 1].astype(np.int32).tobytes()


def pad_pieces(found: Iterable[Tokens], source: str) -> Windows:
    """Make a window of each piece of a text, padded to the longest; only its answer counts."""
    parts = list[tuple[Tensor, Tensor]]()
    for each in found:
        assert each.answer is not None
        parts.append((torch.from_numpy(each.ids.astype(np.int64)), torch.from_numpy(each.answer)))
    if not parts:
        raise ValueError(
            f"nothing is predicted in what is held out of {source}, where every document is one token; hold out more"
        )
    ids, answers = (pad_sequence(list(each), batch_first=True) for each in zip(*parts, strict=True))
    return Windows(ids, source, digest_of(torch.stack([ids, answers.long()])), answers=answers)


def with_chat_template(tokenizer: Any, template: str | Path | None) -> Any:
    """Copy a tokenizer with the chat template of a file; without one it is returned as it is."""
    if template is None:
        return tokenizer
    changed = copy.deepcopy(tokenizer)  # what is written with the healed model is as it was
    changed.chat_template = "".join(read_pieces(Path(template)))
    return changed


class RunOrder:
    """The order of windows over a whole run: every epoch has its own, by the seed.

    As one list for all epochs it makes a run the same for any number of processes, size of micro-batches, and
    interruption: the window at a place is computed, and nothing before it is read.

    Of several texts the k-th window of one has its turn at (k + 1/2) / weight, so that up to any place each has had its
    share, up to one window; each goes through its own epochs.
    """

    def __init__(
        self, windows: int, steps: int, batch: int, seed: int, parts: Sequence[tuple[int, float]] = ()
    ) -> None:
        self.parts = tuple(parts) or ((windows, 1.0),)
        self.count = steps * batch
        self.seed = seed
        counts, weights = np.array(self.parts).T
        self._first = (np.cumsum(counts) - counts).astype(int)
        # Last epoch drawn of each text, and its order.
        self._drawn = dict[int, tuple[int, Tensor]]()
        shares = weights / weights.sum()
        turns = [np.arange(int(share * self.count) + 2) for share in shares]
        times = [(each + 0.5) / share for each, share in zip(turns, shares, strict=True)]
        order = np.argsort(np.concatenate(times), kind="stable")[: self.count]
        self._text = np.repeat(np.arange(len(shares)), [len(each) for each in turns])[order]
        self._turn = np.concatenate(turns)[order]

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return map(self.__getitem__, range(self.count))

    def __getitem__(self, place: int) -> int:
        text = int(self._text[place])
        windows = self.parts[text][0]
        epoch, place_in_epoch = divmod(int(self._turn[place]), windows)
        if self._drawn.get(text, (-1,))[0] != epoch:
            generator = torch.Generator().manual_seed((text << 56) + (self.seed << 20) + epoch)
            self._drawn[text] = epoch, torch.randperm(windows, generator=generator)
        return int(self._first[text]) + int(self._drawn[text][1][place_in_epoch])


class TrainingWindows(Dataset[dict[str, Tensor]]):
    """A run's windows in its order, for the Trainer: tokens, labels (by default the tokens), number and place."""

    def __init__(self, text: TrainingText, order: RunOrder) -> None:
        self.rows = text.rows.with_format("torch")
        self.order = order
        self.has_labels = "labels" in text.rows.column_names

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        index = self.order[place]
        row: dict[str, Tensor] = self.rows[index]
        return (
            {"labels": row["input_ids"]}
            | row
            | {"index": torch.tensor(index), "place": torch.tensor(place)}
        )
