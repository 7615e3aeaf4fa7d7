"""Windows of tokens on disk: a text is tokenized and packed once, as far as runs need it, and then mapped into memory.

FOLDER/rows.arrow   windows, as `Packer` makes them
FOLDER/known.json   their number, whether these are all, and what of the text was left out

A folder's name follows from the text, the tokenizer and the packing; it is whole or not there. Where more windows are
needed, it is made again. Rows are written as tables: row by row, as `Dataset.from_generator` does, takes 20 times as
long.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal, cast, get_args

import datasets
import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from datasets.arrow_writer import ArrowWriter
from numpy.typing import NDArray

from surgeon.checkpoint.tensor_file import read_json
from surgeon.processes.files import (
    lock_file,
    make_folder,
    publish,
    scratch,
    sync_tree,
    write_json,
)
from surgeon.progress import progress
from surgeon.quality.conversations import read_conversations
from surgeon.quality.data import TextTokens, Tokens, tokenizer_digest
from surgeon.quality.sources import (
    DEMO,
    DEMO_TRAINING,
    Reading,
    are_apart,
    documents,
    file_and_column,
    files_in,
    is_folder,
    is_table,
)
from surgeon.words import did_you_mean

Documents = Literal["joined", "apart", "whole"]
Row = dict[str, NDArray[np.int32]]
IGNORED = -100  # a label of what is not to be predicted, as PyTorch's losses have it
# Model types whose masks `transformers` makes without positions.
ATTEND_ACROSS = ("falcon", "gpt_oss", "llama4_text", "opt")
# Marked tokens are (3, tokens): ids, 1 at the first token of a document, 1 at answers.
_NOTHING = np.zeros((3, 0), np.int32)
_OPEN = 64  # windows that documents may still be put into


def documents_of(name: str) -> Documents:
    """Parse a way to treat documents."""
    if name not in get_args(Documents):
        raise ValueError(
            f"documents cannot be {name!r} in a window; {did_you_mean(name, get_args(Documents))}"
        )
    return cast("Documents", name)


def columns(documents: Documents) -> tuple[str, ...]:
    """Columns of rows: `input_ids`, and of documents that are apart `position_ids` and `labels`."""
    if documents == "joined":
        return ("input_ids",)
    return ("input_ids", "position_ids", "labels")


def attends_across(config: Any) -> bool:
    """Tell whether attentions see across documents that are apart, as linear ones do, which carry a state."""
    return config.model_type in ATTEND_ACROSS or "linear_attention" in (
        getattr(config, "layer_types", None) or ()
    )


class Packer:
    """Packs tokens into windows as they come, whatever parts they come in.

    joined    one after the other, as one running text: neither positions nor attention know where one ends
    apart     one after the other, cut where a window ends. Positions begin anew with each document, which tells
              `transformers` that its tokens see no other's (`masking_utils.find_packed_sequence_indices`)
    whole     as apart, but a document that fits a window is not cut; what no document fills is padding

    Of documents that are apart the first token is not predicted, nor padding, nor what is no answer. A document that is
    cut begins anew with each of its pieces.

    Args:
        window: tokens in a window.
        pad: the token that fills windows of whole documents.

    Raises:
        ValueError: if there is no such way to treat documents.
    """

    def __init__(self, window: int, documents: Documents, pad: int = 0) -> None:
        self.window = window
        self.documents = documents_of(documents)
        self.pad = pad
        # Windows, as their marked tokens.
        self._open = [_NOTHING] if documents != "whole" else []
        self._document = _NOTHING  # a whole one, as far as it has come
        self._begins = True  # a document, with the next token

    def add(self, tokens: Tokens) -> Iterator[Row]:
        marked = np.zeros((3, len(tokens.ids)), np.int32)
        marked[0] = tokens.ids
        marked[1, :1] = self._begins
        marked[2] = 1 if tokens.answer is None else tokens.answer
        self._begins = tokens.ends or (self._begins and not len(tokens.ids))
        if self.documents != "whole":
            (held,) = self._open
            whole = np.concatenate([held, marked], axis=1)
            full = whole.shape[1] // self.window * self.window
            for at in range(0, full, self.window):
                yield self._row(whole[:, at : at + self.window])
            self._open = [whole[:, full:]]
            return
        self._document = np.concatenate([self._document, marked], axis=1)
        if tokens.ends:
            document = self._document
            self._document = _NOTHING
            document[1, :: self.window] = 1  # for the rest of a long one may share a window with others
            for start in range(0, document.shape[1], self.window):
                piece = document[:, start : start + self.window]
                # Into the open window that it fills best; beyond a number of open ones the fullest is done.
                room = [self.window - each.shape[1] - piece.shape[1] for each in self._open]
                fitting = [(left, index) for index, left in enumerate(room) if left >= 0]
                if not fitting:
                    if len(self._open) == _OPEN:
                        yield self._pad(self._open.pop(room.index(min(room))))
                    fitting = [(self.window - piece.shape[1], len(self._open))]
                    self._open.append(_NOTHING)
                left, index = min(fitting)
                self._open[index] = np.concatenate([self._open[index], piece], axis=1)
                if left == 0:
                    yield self._row(self._open.pop(index))

    def rest(self) -> Iterator[Row]:
        """Yield windows of whole documents that are not full, at the end; else the rest is dropped."""
        if self.documents == "whole":
            left = self._open
            self._open = []
            yield from map(self._pad, left)

    def _pad(self, marked: NDArray[np.int32]) -> Row:
        padding = np.zeros((3, self.window - marked.shape[1]), np.int32)
        padding[0] = self.pad
        padding[1, :1] = 1
        return self._row(np.concatenate([marked, padding], axis=1))

    def _row(self, marked: NDArray[np.int32]) -> Row:
        ids, first, answer = marked
        if self.documents == "joined":
            return {"input_ids": ids}
        place = np.arange(self.window, dtype=np.int32)
        # Start of each token's document in the window.
        start = np.maximum.accumulate(np.where(first, place, 0))
        labels = np.where(answer.astype(bool) & (first == 0), ids, np.int32(IGNORED))
        return {"input_ids": ids, "position_ids": place - start, "labels": labels}


def split_documents(rows: datasets.Dataset) -> Iterator[Tokens]:
    """Split windows of documents that are apart, each piece with its predicted tokens as its answer.

    Padding, and pieces of which nothing is predicted, are left out.
    """
    for row in rows.with_format("numpy"):
        begins = np.flatnonzero(row["position_ids"] == 0)[1:]
        for ids, labels in zip(
            *(np.split(row[name], begins) for name in ("input_ids", "labels")), strict=True
        ):
            answer = (labels != IGNORED) & (np.arange(len(ids)) > 0)
            if answer.any():
                yield Tokens(ids, answer)


SELF = "self"  # text that the original of an edited model writes (`surgeon.training.self_text`)
ALL_TOKENS = 1 << 50  # more than any text has
_FORMAT = 3  # of windows, and of how rows come to be tokens; another one is made again
_ROWS_FILE = "rows.arrow"
_KNOWN_FILE = "known.json"
ROWS_AT_ONCE = 1000


@dataclass(eq=False)
class TextSource:
    """A text, or conversations, as windows on disk.

    Attributes:
        source, separator: as `load_windows` takes them.
        documents: other than joined, a text without a separator is split by rows and files.
        chats: whether it holds conversations.
        endless: whether it is made as it is asked for, and is no file of its name.
        folder: of windows.

    Raises:
        ValueError: if documents are to be apart, and it is one text, or the tokenizer has no marks to put between.
        FileNotFoundError: if it is no text.
    """

    tokenizer: Any
    source: str
    window: int
    documents: Documents
    separator: str | None = None
    chats: bool = False
    endless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.folder = Path(datasets.config.HF_DATASETS_CACHE) / "surgeon"
        self.by_row = self.documents != "joined"
        self.apart = self.endless or are_apart(self.source, self.separator, self.by_row)
        self.files: list[Path] = []
        if not self.endless and is_folder(self.source):
            self.files = files_in(self.source)
        elif not self.endless and (path := file_and_column(self.source)[0]) is not None:
            self.files = [path]
            if self.by_row and self.separator is None and not is_table(path):
                raise ValueError(
                    f"{self.source} is one text, whose documents cannot be told apart; give the separator between "
                    "them, or join them"
                )
        fillers = [] if self.chats else [self.tokenizer.pad_token_id, self.tokenizer.eos_token_id]
        # The token that fills windows.
        self.pad = int(next((token for token in fillers if token is not None), 0))

    def identity(self) -> dict[str, Any]:
        """Identity of its windows, as JSON values: of files name, size and time; of the demo's text itself."""
        files: list[Any] = [
            [str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in self.files
        ]
        if self.source in (DEMO, DEMO_TRAINING):
            files = [hashlib.sha256("".join(chain(*documents(self.source, None))).encode()).hexdigest()]
        return {
            "format": _FORMAT,
            "text": self.source,
            "files": files,
            "separator": self.separator,
            "documents": self.documents,
            "window": self.window,
            "pad": self.pad,
            "tokenizer": tokenizer_digest(self.tokenizer),
            "chat_template": self.tokenizer.chat_template if self.chats else None,
        }

    def tokens(self, reading: Reading) -> Iterator[list[Tokens]]:
        """Tokens, some at a time; no conversation is longer than a window."""
        if self.chats:
            found = read_conversations(self.tokenizer, self.source, self.window, reading) or ()
            return ([each] for each in found)
        texts = documents(self.source, self.separator, reading, self.by_row)
        return TextTokens(self.tokenizer, self.apart).read(texts)

    def windows(self, count: int) -> tuple[datasets.Dataset, dict[str, Any]]:
        """Read or make so many windows, or all that there are; with what is known of the text read for them.

        Raises:
            OSError: if the text cannot be read to there, or there is no room.
            ValueError: if it is no text.
        """
        name = hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()[:32]
        folder = self.folder / name
        make_folder(self.folder)
        with lock_file(folder.with_suffix(".lock")):
            path = folder / _KNOWN_FILE
            facts = read_json(path) if path.is_file() else {"windows": 0, "ended": False}
            if facts["windows"] < count and not facts["ended"]:
                with scratch(folder) as beside:
                    facts = self._write(beside / _ROWS_FILE, count)
                    write_json(beside / _KNOWN_FILE, facts)
                    sync_tree(beside)
                    publish(beside, folder)
            rows = datasets.Dataset.from_file(str(folder / _ROWS_FILE))
        return rows.select(range(min(count, facts["windows"]))), facts

    def _write(self, path: Path, count: int) -> dict[str, Any]:
        reading = Reading()
        packer = Packer(self.window, self.documents, self.pad)
        names = columns(self.documents)
        done = 0
        ended = False
        total = None if count * self.window > ALL_TOKENS // 2 else count
        with (
            ArrowWriter(path=str(path), schema=as_table([], names, self.window).schema) as writer,
            progress(
                f"tokens of {self.source}", total, "windows", 0, lambda: f"{done * self.window:,} by now"
            ) as bar,
        ):
            reads = self.tokens(reading)
            while done < count and not ended:
                some = next(reads, None)
                ended = some is None
                rows = (
                    [*packer.rest()]
                    if some is None
                    else [row for one in some for row in packer.add(one)]
                )
                writer.write_table(as_table(rows, names, self.window))
                done += len(rows)
                bar(len(rows))
            writer.finalize()
        notes = reading.lines(self.source)
        left_out = dict(+reading.left_out)
        return {
            "windows": done,
            "ended": ended,
            "column": reading.column,
            "left_out": left_out,
            "notes": notes,
        }


def rows_digest(rows: datasets.Dataset, window: int) -> str:
    """Hash windows (SHA-256): joined ones as `surgeon.quality.data.digest_of` does."""
    digests = {name: hashlib.sha256(repr((len(rows), window)).encode()) for name in rows.column_names}
    for block in rows.with_format("numpy").iter(ROWS_AT_ONCE):
        for name, digest in digests.items():
            digest.update(block[name].astype(np.int64).tobytes())
    first, *others = (digest.hexdigest() for digest in digests.values())
    if others:
        return hashlib.sha256(f"{first} {others}".encode()).hexdigest()
    return first


def as_table(rows: list[Row], names: tuple[str, ...], window: int) -> pa.Table:
    """Make a table of Arrow of rows."""
    flat = {name: np.array([row[name] for row in rows], np.int32).reshape(-1) for name in names}
    return pa.table(
        {name: pa.FixedSizeListArray.from_arrays(pa.array(each), window) for name, each in flat.items()}
    )
