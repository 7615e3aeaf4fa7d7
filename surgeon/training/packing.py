"""Tokens of documents, packed into windows of one size.

Documents are treated in three ways:

    joined    one after the other, as one running text: neither positions nor attention know where one ends
    apart     one after the other, cut where a window ends. Positions begin anew with each document, which tells
              `transformers` that its tokens see no other's (`masking_utils.find_packed_sequence_indices`)
    whole     as apart, but a document that fits a window is not cut; what no document fills is padding

Of documents that are apart the first token is not predicted, nor padding, nor what is no answer. A document that is cut
begins anew with each of its pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, cast, get_args

import datasets
import numpy as np
from numpy.typing import NDArray

from surgeon.errors import did_you_mean
from surgeon.quality.tokens import Tokens

Documents = Literal["joined", "apart", "whole"]
Row = dict[str, NDArray[np.int32]]
IGNORED = -100  # a label of what is not to be predicted, as PyTorch's losses have it
# Model types whose masks `transformers` makes without positions.
ATTEND_ACROSS = ("falcon", "gpt_oss", "llama4_text", "opt")
_OPEN = 64  # windows that documents may still be put into


def documents_of(name: str) -> Documents:
    """Parse a way to treat documents.

    Raises:
        ValueError: if there is none of this name.
    """
    for known in get_args(Documents):
        if name == known:
            return cast("Documents", known)
    raise ValueError(f"documents cannot be {name!r} in a window; {did_you_mean(name, get_args(Documents))}")


def columns(documents: Documents) -> tuple[str, ...]:
    """Columns of rows: `input_ids`, and of documents that are apart `position_ids` and `labels`."""
    if documents == "joined":
        return ("input_ids",)
    return ("input_ids", "position_ids", "labels")


def attends_across(config: Any) -> bool:
    """Whether attentions see across documents that are apart, as linear ones do, which carry a state."""
    return config.model_type in ATTEND_ACROSS or "linear_attention" in (getattr(config, "layer_types", None) or ())


class Packer:
    """Packs tokens into windows as they come, whatever parts they come in.

    Args:
        window: tokens in a window.
        pad: the token that fills windows of whole documents.

    Raises:
        ValueError: if there is no such way to treat documents.
    """

    def __init__(self, window: int, documents: Documents = "joined", pad: int = 0) -> None:
        self.window = window
        self.documents = documents_of(documents)
        self.pad = pad
        self._open = [_nothing()] if documents != "whole" else []  # windows, as their marked tokens (`_marked`)
        self._document = _nothing()  # a whole one, as far as it has come
        self._begins = True  # a document, with the next token

    def add(self, tokens: Tokens) -> Iterator[Row]:
        marked = _marked(tokens, self._begins)
        self._begins = tokens.ends or (self._begins and not len(tokens.ids))
        if self.documents != "whole":
            yield from self._cut(marked)
            return
        self._document = np.concatenate([self._document, marked], axis=1)
        if tokens.ends:
            document = self._document
            self._document = _nothing()
            document[1, :: self.window] = 1  # for the rest of a long one may share a window with others
            for start in range(0, document.shape[1], self.window):
                yield from self._place(document[:, start : start + self.window])

    def rest(self) -> Iterator[Row]:
        """Yield windows of whole documents that are not full, at the end; else the rest is dropped."""
        if self.documents == "whole":
            left = self._open
            self._open = []
            yield from map(self._padded, left)

    def _cut(self, marked: NDArray[np.int32]) -> Iterator[Row]:
        (held,) = self._open
        whole = np.concatenate([held, marked], axis=1)
        full = whole.shape[1] // self.window * self.window
        for start in range(0, full, self.window):
            yield self._row(whole[:, start : start + self.window])
        self._open = [whole[:, full:]]

    def _place(self, document: NDArray[np.int32]) -> Iterator[Row]:
        """Put a document into the open window that it fills best; beyond a number of open ones the fullest is done."""
        room = [self.window - each.shape[1] - document.shape[1] for each in self._open]
        fitting = [(left, index) for index, left in enumerate(room) if left >= 0]
        if fitting:
            left, index = min(fitting)
            self._open[index] = np.concatenate([self._open[index], document], axis=1)
        else:
            if len(self._open) == _OPEN:
                yield self._padded(self._open.pop(room.index(min(room))))
            self._open.append(document)
            left = self.window - document.shape[1]
            index = len(self._open) - 1
        if left == 0:
            yield self._row(self._open.pop(index))

    def _padded(self, marked: NDArray[np.int32]) -> Row:
        left = self.window - marked.shape[1]
        padding = _marked(Tokens(np.full(left, self.pad, np.int32), np.zeros(left, np.bool_)), begins=True)
        return self._row(np.concatenate([marked, padding], axis=1))

    def _row(self, marked: NDArray[np.int32]) -> Row:
        ids, first, answer = marked
        if self.documents == "joined":
            return {"input_ids": ids}
        place = np.arange(self.window, dtype=np.int32)
        start = np.maximum.accumulate(np.where(first, place, 0))  # of the document that each token is of, in the window
        labels = np.where(answer.astype(bool) & (first == 0), ids, np.int32(IGNORED))
        return {"input_ids": ids, "position_ids": place - start, "labels": labels}


def pieces(rows: datasets.Dataset) -> Iterator[Tokens]:
    """Split windows of documents that are apart, each piece with its predicted tokens as its answer.

    Padding, and pieces of which nothing is predicted, are left out.
    """
    for row in rows.with_format("numpy"):
        begins = np.flatnonzero(row["position_ids"] == 0)[1:]
        for ids, labels in zip(*(np.split(row[name], begins) for name in ("input_ids", "labels")), strict=True):
            answer = (labels != IGNORED) & (np.arange(len(ids)) > 0)
            if answer.any():
                yield Tokens(ids, answer)


def _marked(tokens: Tokens, begins: bool) -> NDArray[np.int32]:
    """(3, tokens): ids, 1 at the first token of a document, 1 at answers."""
    found = np.zeros((3, len(tokens.ids)), np.int32)
    found[0], found[2] = tokens.ids, 1 if tokens.answer is None else tokens.answer
    found[1, :1] = begins
    return found


def _nothing() -> NDArray[np.int32]:
    return np.zeros((3, 0), np.int32)
