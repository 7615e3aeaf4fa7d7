"""Conversations to train on, and to measure on: whole in their windows, where only answers count."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Mapping
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch

from surgeon.quality.conversations import ConversationTokens, read_conversations
from surgeon.quality.data import Windows, digest_of
from surgeon.quality.text_files import Reading, read_pieces
from surgeon.quality.tokens import Tokens
from surgeon.training.packing import Documents, Packer
from surgeon.training.texts import HELD_OUT_TOKENS, TrainingText, TrainTexts, load_train_texts
from surgeon.training.token_store import as_table


def load_texts(
    tokenizer: Any,
    data: str | Mapping[str, float],
    window: int,
    tokens: int,
    held_out: str | None = None,
    held_out_tokens: int = HELD_OUT_TOKENS,
    separator: str | None = None,
    documents: Documents = "joined",
) -> TrainTexts:
    """Training text and held-out text, of documents or of conversations; arguments and errors as `load_train_texts`.

    Conversations are written as `surgeon.quality.conversations.ConversationTokenizer` has them, none longer than a
    window. Those to train on stand whole in windows, several in one where they fit; those to measure on each have one.

    Raises:
        ValueError: if one of the texts is of conversations, and the other is not, or several are to be mixed.
    """
    reading = Reading()
    several = [data] if isinstance(data, str) else list(data)
    sorts = [read_conversations(tokenizer, name, window, reading) for name in several]
    if all(found is None for found in sorts):
        return load_train_texts(tokenizer, data, window, tokens, held_out, held_out_tokens, separator, documents)
    (found, *_), (data, *others) = sorts, several
    if others or found is None:
        raise ValueError(f"{', '.join(several)}: conversations are not mixed; write them into one file")
    if separator is not None:
        raise ValueError(f"{data} holds conversations, which are apart as they are; leave the separator out")
    if held_out is None:
        read = _first(found, max(tokens, window) + held_out_tokens)
        sums = accumulate(len(each.ids) for each in reversed(read))
        kept = max(0, len(read) - 1 - sum(1 for _ in takewhile(lambda last: last < held_out_tokens, sums)))
        training, measured = read[:kept], read[kept:]
        if not training:
            raise ValueError(
                f"{data} has {len(read)} conversations, and the last {held_out_tokens} tokens are held out to measure "
                "on: nothing is left to train on; give more of them, hold out fewer tokens, or another text"
            )
        return TrainTexts(_packed(training, window, data, reading), _windows(measured, data, Reading()))
    other = Reading()
    apart = read_conversations(tokenizer, held_out, window, other)
    if apart is None:
        raise ValueError(f"{data} holds conversations, and {held_out} does not; hold out conversations, too")
    training, measured = _first(found, max(tokens, window)), _first(apart, held_out_tokens)
    seen = {each.ids.tobytes() for each in measured}
    if again := sum(each.ids.tobytes() in seen for each in training):
        raise ValueError(
            f"{again} of the conversations of the held-out text {held_out} are in the training text {data}, too; a "
            "model is not judged by what it was trained on: hold out others, or name none"
        )
    return TrainTexts(_packed(training, window, data, reading), _windows(measured, held_out, other))


def _first(found: Iterable[ConversationTokens], tokens: int) -> list[Tokens]:
    """The first conversations that have so many tokens, or all of them."""
    read, total = list[Tokens](), 0
    for each in found:
        read.append(Tokens(np.array(each.ids, np.int32), np.array(each.answers, np.bool_)))
        total += len(each.ids)
        if total >= tokens:
            break
    return read


def _packed(found: list[Tokens], window: int, source: str, reading: Reading) -> TrainingText:
    packer = Packer(window, "whole")
    rows = [row for each in found for row in packer.add(each)] + list(packer.rest())
    table = as_table(rows)
    digest = hashlib.sha256()
    for row in rows:
        for name in sorted(row):
            digest.update(row[name].tobytes())
    notes = tuple(reading.lines(source))
    return TrainingText(datasets.Dataset(table), source, digest.hexdigest(), notes, left_out=+reading.left_out)


def _windows(found: list[Tokens], source: str, reading: Reading) -> Windows:
    """A window for each conversation, as long as the longest; the tokens behind the others' ends do not count."""
    marks = [each.answer for each in found if each.answer is not None]
    ids, answers = (
        torch.nn.utils.rnn.pad_sequence([torch.from_numpy(one) for one in each], batch_first=True)
        for each in ([each.ids.astype(np.int64) for each in found], marks)
    )
    digest = digest_of(torch.stack([ids, answers.long()]))
    return Windows(ids, source, digest, None, tuple(reading.lines(source)), None, +reading.left_out, answers)


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
