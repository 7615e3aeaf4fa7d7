"""The text that a model is trained on, and the text it is judged by meanwhile."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import ceil, inf
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from surgeon.errors import shown
from surgeon.quality.data import (
    HELD_OUT_SHARE,
    HELD_OUT_TOKENS,
    Windows,
    check_window,
    digest_of,
    load_windows,
    marks_in_text,
)
from surgeon.quality.sources import DEMO, DEMO_TRAINING, are_apart, documents, file_and_column, files_in, is_folder
from surgeon.quality.tables import is_table
from surgeon.quality.text_files import Reading
from surgeon.quality.tokens import TextTokens, Tokens, tokenizer_digest
from surgeon.training.packing import Documents, pieces
from surgeon.training.token_store import TokenStore, as_table
from surgeon.words import plural


class TextSource:
    """A text as tokens, for a `TokenStore`.

    Args:
        data, separator: as `load_windows` takes them.
        documents: other than joined, a text without a separator is by rows and files.

    Raises:
        ValueError: if documents are to be apart, and it is one text, or the tokenizer has no marks to put between.
        FileNotFoundError: if it is no text.
    """

    def __init__(self, tokenizer: Any, data: str, separator: str | None, documents: Documents) -> None:
        self.source = data
        self.separator = separator
        self.by_row = documents != "joined"
        self.apart = are_apart(data, separator, self.by_row)
        path, _ = (None, None) if is_folder(data) else file_and_column(data)
        if self.by_row and separator is None and path is not None and not is_table(path):
            raise ValueError(
                f"{data} is one text, whose documents cannot be told apart; give the separator between them, or join "
                "them"
            )
        self._files = files_in(data) if path is None and is_folder(data) else [path] if path is not None else []
        self._tokens = TextTokens(tokenizer, self.apart)
        self._reading = Reading()
        self._tokenizer = tokenizer

    def identity(self) -> dict[str, Any]:
        """The text's name, and the size and the time of its files; of the demo's, what it says."""
        files: list[Any] = [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in self._files]
        if self.source in (DEMO, DEMO_TRAINING):
            files = [hashlib.sha256("".join(chain(*documents(self.source, None))).encode()).hexdigest()]
        follows = {"text": self.source, "files": files, "separator": self.separator, "by_row": self.by_row}
        if self.separator is not None or self.by_row:
            follows["ends"] = "as they are"  # of documents, which once were stripped
        return follows | {"tokenizer": tokenizer_digest(self._tokenizer)}

    def read(self) -> Iterator[list[Tokens]]:
        """As `TokenSource` has it."""
        return self._tokens.read(documents(self.source, self.separator, self._reading, self.by_row))

    def state(self) -> dict[str, Any]:
        """As `TokenSource` has it."""
        return self._tokens.state()

    def resume(self, state: dict[str, Any]) -> None:
        """As `TokenSource` has it; the text is read again up to there, and not tokenized."""
        self._tokens.resume(state)

    def known(self) -> dict[str, Any]:
        """As `TokenSource` has it."""
        reading = self._reading
        left_out = dict(+reading.left_out)
        return {"column": reading.column, "left_out": left_out, "notes": reading.lines(self.source)}


_LOOKED_AT = 1 << 16  # tokens, for marks that were read as text


def texts_by_weight(texts: str | Path | Sequence[str] | Mapping[str, float]) -> str | Mapping[str, float]:
    """What `load_train_texts` takes of one text, or of several, each with its weight behind it ("text.txt=0.7").

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
    """What says which text is trained on: one, or several with their weights.

    Raises:
        ValueError: if it says something else.
    """
    if isinstance(data, str) and data:
        return data
    if not isinstance(data, Mapping) or not data:
        example = "{a.jsonl: 0.7, b.txt: 0.3}"
        raise ValueError(f"it must be a text, or several with their weights, as {example}, not {shown(data)}")
    for name, weight in data.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < inf:
            raise ValueError(f"the weight of {name} must be a number above 0, not {shown(weight)}")
    return {str(name): float(weight) for name, weight in data.items()}


@dataclass(frozen=True)
class MixedPart:
    """One of several texts in one `TrainingText`: how many windows it has, one after the other, and its weight."""

    windows: int
    weight: float = 1.0


@dataclass(frozen=True)
class TrainingText:
    """A text to train on, in windows: rows of Arrow, in files that are mapped into memory where it is large.

    Attributes:
        rows: a window each, with columns as `surgeon.training.packing.columns` has them.
        source, digest, notes, column, left_out: as of `Windows`.
        parts: the texts that it is made of, where they are several.
    """

    rows: datasets.Dataset
    source: str
    digest: str
    notes: tuple[str, ...] = ()
    column: str | None = None
    left_out: Mapping[str, int] = field(default_factory=dict)
    parts: tuple[MixedPart, ...] = ()

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


def model_inputs(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What of some windows a model's forward pass takes."""
    return {name: inputs[name] for name in ("input_ids", "position_ids") if name in inputs}


@dataclass(frozen=True)
class TrainTexts:
    """Both texts, in windows of one size.

    Attributes:
        behind: how many windows of the training text, behind those that are trained on, are what is held out; 0 where
            that is another text.
    """

    training: TrainingText
    held_out: Windows
    behind: int = 0

    def line(self) -> str:
        """How much there is of them, for people."""
        window = self.training.window
        training = f"{len(self.training) * window:,} tokens of {self.training.source}"
        what = "tokens" if self.held_out.answers is None else "predicted tokens"
        if self.held_out.answers is None:
            count = self.held_out.ids.numel()
        else:
            count = self.held_out.predicted
        held_out = f"{count:,} {what} of {self.held_out.source}"
        if self.behind:
            held_out += f" (held out: {plural(self.behind, 'window')} behind them)"
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
    data: str | Mapping[str, float],
    window: int,
    tokens: int,
    held_out: str | None = None,
    held_out_tokens: int | None = None,
    separator: str | None = None,
    documents: Documents = "joined",
    cache: Path | None = None,
) -> TrainTexts:
    """Training text and held-out text, the former from the disk, where it is tokenized once.

    Args:
        data, separator: as `load_windows` takes them; or several texts, of which windows are taken by their weights.
        tokens: of training text, at most, in whole windows; what there is, if there is less.
        held_out: data to measure on, which is measured as one text, joined, whatever `documents` says; by default
            windows of the training text behind those that are trained on, of each of several by its weight. Of those
            each document is measured by itself where they are apart.
        held_out_tokens: to measure on, in whole windows; by default 16,384 at most, and of the training text no more
            than a tenth, at least one window.
        documents: how they share windows (`surgeon.training.packing`).
        cache: where tokens are kept (`TokenStore`).

    Raises:
        FileNotFoundError: if there is no such text.
        ValueError: if it cannot be used, is too short, or both texts are the same.
        OSError: if it cannot be read to the end, or there is no room for its tokens.
    """
    check_window(window)
    data = check_texts(data)
    several = {data: 1.0} if isinstance(data, str) else data
    measured = None
    if held_out is not None:
        wanted = held_out_size(window, held_out_tokens)
        at_most = held_out_tokens is None
        measured = load_windows(tokenizer, held_out, window, wanted, separator, at_most=at_most)
    found = []
    for name, asked in asked_of(several, window, tokens, held_out_tokens, measured is None).items():
        source = TextSource(tokenizer, name, separator, documents)
        part = split(TokenStore(source, window, documents, _pad_of(tokenizer), cache), asked)
        found.append(replace(part, training=_with_marks(part.training, tokenizer, separator, documents)))
        if measured is not None and part.store.shared(len(part.training), measured.ids, measured.digest):
            raise ValueError(
                f"windows of the held-out text {measured.source} are in the training text {name}, too; a model is not "
                "judged by what it was trained on: hold out another text, or name none"
            )
    return together(found, several, measured, separator)


@dataclass(frozen=True)
class AskedWindows:
    """What is asked of one text, in windows.

    Attributes:
        training: to train on, at most.
        behind: to hold out behind them; 0 for none.
        share: whether that is the most, and no more than a share of the text is held out.
    """

    training: int
    behind: int
    share: bool


@dataclass(frozen=True)
class TextPart:
    """One text: its windows that are trained on, and those behind them that are held out, if any."""

    store: TokenStore
    training: TrainingText
    behind: datasets.Dataset | None


def held_out_size(window: int, tokens: int | None) -> int:
    """How many tokens are held out, at most where it is not said how many."""
    if tokens is None:
        return max(window, HELD_OUT_TOKENS)
    return tokens


def asked_of(
    several: Mapping[str, float], window: int, tokens: int, held_out_tokens: int | None, is_held_out: bool
) -> dict[str, AskedWindows]:
    """What is asked of each text, by its weight; see `load_train_texts`."""
    wanted = max(1, tokens // window)
    if is_held_out:
        behind = max(1, held_out_size(window, held_out_tokens) // window)
    else:
        behind = 0
    whole = sum(several.values())
    found = dict[str, AskedWindows]()
    for name, weight in several.items():
        share = weight / whole
        needed = wanted if len(several) == 1 else ceil(share * wanted) + 1
        found[name] = AskedWindows(needed, ceil(share * behind), held_out_tokens is None)
    return found


def split(store: TokenStore, asked: AskedWindows) -> TextPart:
    """Windows to train on, and those behind them.

    Raises:
        ValueError: if there are none, or nothing is left to train on.
        OSError: as `TokenStore.fill`.
    """
    needed = asked.training + asked.behind
    there = store.fill(max(needed, HELD_OUT_SHARE * asked.behind) if asked.share else needed)
    if asked.share:
        behind = min(asked.behind, max(1, there // HELD_OUT_SHARE))
    else:
        behind = asked.behind
    count = min(asked.training, there - behind)
    data = store.source.source
    window = store.packer.window
    if count < 1:
        raise ValueError(
            f"{data} has {plural(there, 'window')} of {window} tokens, and {behind} of the last ones are held out to "
            "measure on: nothing is left to train on; give more text, hold out fewer tokens, or another text, or use a "
            "smaller window"
            if behind
            else f"{data} has no whole window of {window} tokens; give more text, or a smaller window"
        )
    rows = store.rows(range(count))
    known = store.known
    notes = tuple(known["notes"])
    column = known["column"]
    left_out = known["left_out"]
    training = TrainingText(rows, data, store.digest(count), notes, column, left_out)
    return TextPart(store, training, store.rows(range(count, count + behind)) if behind else None)


def together(
    parts: Sequence[TextPart], several: Mapping[str, float], measured: Windows | None, separator: str | None = None
) -> TrainTexts:
    """One text or several, and what they are judged by: other text, or what is held out of them."""
    if len(parts) == 1:
        training = parts[0].training
    else:
        training = mixed([part.training for part in parts], several)
    if measured is not None:
        return TrainTexts(training, measured)
    rows = datasets.concatenate_datasets([part.behind for part in parts if part.behind is not None])
    if "labels" in rows.column_names:
        found = each_by_itself(pieces(rows), training.source)
    else:
        ids = rows.with_format("torch")[:]["input_ids"]
        found = Windows(ids, training.source, digest_of(ids))
    found = replace(found, separator=separator, column=training.column, left_out=training.left_out)
    return TrainTexts(training, found, len(rows))


def each_by_itself(found: Iterable[Tokens], source: str) -> Windows:
    """A window for each piece of a text, as long as the longest; only what is marked as its answer counts.

    Raises:
        ValueError: if there is nothing.
    """
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


def _with_marks(text: TrainingText, tokenizer: Any, separator: str | None, documents: Documents) -> TrainingText:
    """A text, with what to say of marks in it that were read as text."""
    if are_apart(text.source, separator, documents != "joined"):
        return text
    looked_at = text.rows.select(range(min(len(text), max(1, _LOOKED_AT // text.window)))).with_format("torch")
    marks = marks_in_text(tokenizer, looked_at[:]["input_ids"].flatten().tolist(), text.source)
    return replace(text, notes=(*text.notes, *marks))


def mixed(texts: Sequence[TrainingText], several: Mapping[str, float]) -> TrainingText:
    """Several texts as one."""
    parts = tuple(MixedPart(len(text), weight) for text, weight in zip(texts, several.values(), strict=True))
    follows = json.dumps([[text.digest, part.weight] for text, part in zip(texts, parts, strict=True)])
    return TrainingText(
        datasets.concatenate_datasets([text.rows for text in texts]),
        ", ".join(f"{name}={weight:g}" for name, weight in several.items()),
        hashlib.sha256(follows.encode()).hexdigest(),
        tuple(note for text in texts for note in text.notes),
        parts=parts,
    )


def _pad_of(tokenizer: Any) -> int:
    """The token that fills windows."""
    return int(next((one for one in (tokenizer.pad_token_id, tokenizer.eos_token_id) if one is not None), 0))


class RunOrder:
    """Which window comes when, over a whole run: every epoch in an order of its own, which follows from the seed.

    As one list for all epochs it makes a run the same whatever the number of processes and the size of micro-batches,
    and wherever it is interrupted: what comes at a place is computed, and nothing before it is read.

    Of several texts the k-th window of one has its turn at (k + 1/2) / weight, so that up to any place each has had its
    share, up to one window; each goes through its own epochs.
    """

    def __init__(self, windows: int, steps: int, batch: int, seed: int, parts: Sequence[MixedPart] = ()) -> None:
        self.parts = tuple(parts) or (MixedPart(windows),)
        self.count = steps * batch
        self.seed = seed
        self._first = [sum(part.windows for part in self.parts[:number]) for number in range(len(self.parts))]
        self._drawn = dict[int, tuple[int, Tensor]]()  # of each text the epoch that was drawn last, and its order
        if len(self.parts) > 1:
            self._text, self._turn = _turns([part.weight for part in self.parts], self.count)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return map(self.__getitem__, range(self.count))

    def __getitem__(self, place: int) -> int:
        text, turn = (0, place) if len(self.parts) == 1 else (int(self._text[place]), int(self._turn[place]))
        windows = self.parts[text].windows
        epoch, place_in_epoch = divmod(turn, windows)
        if self._drawn.get(text, (-1,))[0] != epoch:
            generator = torch.Generator().manual_seed((text << 56) + (self.seed << 20) + epoch)
            self._drawn[text] = epoch, torch.randperm(windows, generator=generator)
        order = self._drawn[text][1]
        return self._first[text] + int(order[place_in_epoch])


def _turns(weights: Sequence[float], count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Whose turn it is at each place, and which one of theirs, (count,)."""
    shares = np.array(weights) / sum(weights)
    numbers = [np.arange(int(share * count) + 2) for share in shares]
    times = np.concatenate([(each + 0.5) / share for each, share in zip(numbers, shares, strict=True)])
    texts = np.repeat(np.arange(len(shares)), [len(each) for each in numbers])
    order = np.argsort(times, kind="stable")[:count]
    return texts[order], np.concatenate(numbers)[order]


class TrainingWindows(Dataset[dict[str, Tensor]]):
    """A run's windows in its order, as the Trainer takes them: one after the other is the whole run.

    Each has its tokens, and its labels, which are its tokens where it has none of its own; and says which window it is,
    and at which place it stands.
    """

    def __init__(self, text: TrainingText, order: RunOrder) -> None:
        self.rows = text.rows.with_format("torch")
        self.order = order
        self.has_labels = "labels" in text.rows.column_names

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        index = self.order[place]
        row: dict[str, Tensor] = self.rows[index]
        return {"labels": row["input_ids"]} | row | {"index": torch.tensor(index), "place": torch.tensor(place)}
