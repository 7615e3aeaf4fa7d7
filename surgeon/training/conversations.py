"""Conversations to train on, and to measure on: whole in their windows, where only answers count."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from surgeon.quality.conversations import ConversationTokens, read_conversations
from surgeon.quality.data import Windows
from surgeon.quality.sources import file_and_column
from surgeon.quality.text_files import Reading, read_pieces
from surgeon.quality.tokens import Tokens, tokenizer_digest
from surgeon.training.packing import Documents, pieces
from surgeon.training.texts import (
    TextPart,
    TrainTexts,
    asked_of,
    check_texts,
    each_by_itself,
    held_out_size,
    load_train_texts,
    split,
    together,
)
from surgeon.training.token_store import TokenStore

_RULES = 2  # raised where the same rows come to be other tokens


class ConversationSource:
    """Conversations as tokens, for a `TokenStore`; none is longer than a window."""

    def __init__(self, tokenizer: Any, data: str, window: int) -> None:
        self.source = data
        self._tokenizer = tokenizer
        self._window = window
        self._reading = Reading()

    def identity(self) -> dict[str, Any]:
        """The table's name, size and time, the window, and what conversations are written with."""
        path, _ = file_and_column(self.source)
        if path is None:
            file = []
        else:
            file = [str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns]
        written = {"tokenizer": tokenizer_digest(self._tokenizer), "chat_template": self._tokenizer.chat_template}
        return {"conversations": self.source, "file": file, "longest": self._window, "rules": _RULES, **written}

    def read(self) -> Iterator[list[Tokens]]:
        """As `TokenSource` has it."""
        found = read_conversations(self._tokenizer, self.source, self._window, self._reading, self._reading.rows)
        for each in found or ():
            yield [_tokens(each)]

    def state(self) -> dict[str, Any]:
        """As `TokenSource` has it."""
        reading = self._reading
        return {"rows": reading.rows, "left_out": dict(reading.left_out), "sizes": dict(reading.sizes)}

    def resume(self, state: dict[str, Any]) -> None:
        """As `TokenSource` has it; rows are read again up to there, and not tokenized."""
        self._reading.rows = int(state["rows"])
        self._reading.left_out, self._reading.sizes = Counter(state["left_out"]), Counter(state["sizes"])

    def known(self) -> dict[str, Any]:
        """As `TokenSource` has it."""
        reading = self._reading
        return {"column": None, "left_out": dict(+reading.left_out), "notes": reading.lines(self.source)}


def load_texts(
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
    """Training text and held-out text, of documents or of conversations; arguments and errors as `load_train_texts`.

    Conversations are written as `surgeon.quality.conversations.ConversationTokenizer` has them, none longer than a
    window. Those to train on stand whole in windows, several in one where they fit; those to measure on each have one.

    Raises:
        ValueError: if some of the texts are of conversations, and others are not.
    """
    data = check_texts(data)
    several = {data: 1.0} if isinstance(data, str) else data
    names = [*several] if held_out is None else [*several, held_out]
    others = [name for name in names if read_conversations(tokenizer, name, window) is None]
    if len(others) == len(names):
        return load_train_texts(tokenizer, data, window, tokens, held_out, held_out_tokens, separator, documents, cache)
    if others:
        first, *_ = (name for name in names if name not in others)
        raise ValueError(f"{first} holds conversations, and {others[0]} does not; give texts of one sort")
    if separator is not None:
        raise ValueError(f"{names[0]} holds conversations, which are apart as they are; leave the separator out")
    measured = None
    if held_out is not None:
        measured = _held_out(tokenizer, held_out, window, held_out_size(window, held_out_tokens))
    found = list[TextPart]()
    for name, asked in asked_of(several, window, tokens, held_out_tokens, measured is None).items():
        part = split(TokenStore(ConversationSource(tokenizer, name, window), window, "whole", cache=cache), asked)
        found.append(part)
        if measured is not None:
            _require_apart(part.store, len(part.training), measured)
    return together(found, several, measured)


def _held_out(tokenizer: Any, data: str, window: int, tokens: int) -> Windows:
    reading = Reading()
    read = list[Tokens]()
    total = 0
    for each in read_conversations(tokenizer, data, window, reading) or ():
        read.append(_tokens(each))
        total += len(each.ids)
        if total >= tokens:
            break
    found = each_by_itself(read, data)
    return replace(found, notes=tuple(reading.lines(data)), left_out=+reading.left_out)


def _require_apart(store: TokenStore, count: int, measured: Windows) -> None:
    """Refuse to measure on conversations that are in the first windows of a store."""
    assert measured.answers is not None
    windows = zip(measured.ids.numpy(), measured.answers.numpy(), strict=True)
    seen = {_up_to_last_answer(Tokens(ids, answer)) for ids, answer in windows}

    def shared() -> int:
        return sum(_up_to_last_answer(each) in seen for each in pieces(store.rows(range(count))))

    if again := store.remembered(f"conversations of {count} in {measured.digest}", shared):
        raise ValueError(
            f"{again} of the conversations of {store.source.source} are in the held-out text {measured.source}, too; a "
            "model is not judged by what it was trained on: hold out others, or name none"
        )


def _tokens(found: ConversationTokens) -> Tokens:
    return Tokens(np.array(found.ids, np.int32), np.array(found.answers, np.bool_))


def _up_to_last_answer(found: Tokens) -> bytes:
    assert found.answer is not None
    return found.ids[: np.flatnonzero(found.answer)[-1] + 1].astype(np.int32).tobytes()


def in_template(tokenizer: Any, template: str | Path | None) -> Any:
    """A tokenizer with the chat template of a file in place of its own; as it is without one.

    Raises:
        OSError, ValueError: if there is no such file, or no text in it.
    """
    if template is None:
        return tokenizer
    changed = copy.deepcopy(tokenizer)  # what is written with the healed model is as it was
    changed.chat_template = "".join(read_pieces(Path(template)))
    return changed
