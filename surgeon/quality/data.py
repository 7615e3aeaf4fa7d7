"""Text that a model is measured on, as fixed, non-overlapping windows of tokens.

Texts of any length are read in little memory: a long one is tokenized in overlapping blocks. Where the tokens of two
blocks agree for a while, in the middle of their overlap, the second takes over: so the tokens are those of the whole
text at once. Where they have no token in common there, as in a word of thousands of letters, the text is cut.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, takewhile
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from surgeon.quality import DEFAULT_TOKENS, DEFAULT_WINDOW
from surgeon.quality.sources import DEMO, Reading, are_apart, documents
from surgeon.words import plural

__all__ = [
    "DEFAULT_TOKENS",
    "DEFAULT_WINDOW",
    "DEMO",
    "Windows",
    "held_out",
    "load_windows",
    "window_for",
]

HELD_OUT_SHARE = 10  # by default one in so many windows of a text is held out
HELD_OUT_TOKENS = 16384  # at most
_MARKS = ("<|endoftext|>", "<|end_of_text|>", "<|begin_of_text|>", "</s>", "<s>")
_TRIED_CHARACTERS = 4096  # of the default text, with a tokenizer
_LOST_CHARACTERS = 0.1  # of them: with more, it is not for such text
LEAST_HELD_OUT = 2  # windows: one has no interval
_HOLD_OUT_ADVICE = "search on fewer tokens so that text is left, hold out other text, or hold out none"


# Characters: in the first block of a document, in the longest, in what two have in common.
_FIRST = 1 << 15
_BLOCK = 1 << 17
_OVERLAP = 1 << 11
_AGREEING = 16  # tokens
_AT_ONCE = 1 << 18  # characters that are tokenized together, on all cores


@dataclass(frozen=True)
class Tokens:
    """Tokens of a document, or of a part of one; parts follow until one ends the document.

    Attributes:
        ids: (tokens,).
        answer: (tokens,), tokens that a model learns to predict; None for all.
        ends: whether the document ends here.
    """

    ids: NDArray[np.int32]
    answer: NDArray[np.bool_] | None = None
    ends: bool = True


@dataclass(frozen=True)
class _Block:
    """A part of a document, which begins with the end of the one before."""

    text: str
    begins: bool
    ends: bool


# (tokens, 3): id, and where each begins and ends in a text; slow tokenizers do not say where.
_Placed = NDArray[np.int32]


class TextTokens:
    """Reads the tokens of documents one after the other.

    Args:
        tokenizer: of `transformers`.
        apart: put the tokenizer's BOS before each document, or without one its EOS behind it; else the first one gets
            what the tokenizer puts around a text.

    Raises:
        ValueError: if documents are to be apart, and the tokenizer has neither.
    """

    def __init__(self, tokenizer: Any, apart: bool) -> None:
        self.tokenizer = tokenizer
        self.is_fast = bool(getattr(tokenizer, "is_fast", False))
        # Tokens before and behind each document, and those around all of the text.
        self._marks: tuple[list[int], list[int]] = ([], [])
        self._around: tuple[list[int], list[int]] = ([], [])
        if not apart:
            coded = tokenizer("a", return_special_tokens_mask=True)
            coded = list(zip(coded["input_ids"], coded["special_tokens_mask"], strict=True))
            before = [id_ for id_, _ in takewhile(itemgetter(1), coded)]
            behind = [id_ for id_, _ in takewhile(itemgetter(1), reversed(coded))]
            self._around = (before, behind[::-1])
        elif tokenizer.bos_token_id is not None:
            self._marks = ([tokenizer.bos_token_id], [])
        elif tokenizer.eos_token_id is not None:
            self._marks = ([], [tokenizer.eos_token_id])
        else:
            raise ValueError(
                "documents cannot be kept apart: the tokenizer has no BOS and no EOS; drop the separator, and read one "
                "text"
            )
        self._begun = False
        # The last tokens of a document that goes on, by their places in the next block.
        self._held = np.zeros((0, 3), np.int32)

    def read(self, documents: Iterable[Iterable[str]]) -> Iterator[list[Tokens]]:
        blocks = (block for pieces in documents for block in self._cut(pieces))
        most = _FIRST
        batch = list[_Block]()
        for block in chain(blocks, [None]):
            if block is not None:
                batch.append(block)
            if batch and (block is None or sum(len(each.text) for each in batch) >= most):
                yield list(map(self._join, batch, self._code([each.text for each in batch])))
                batch = []
                most = min(2 * most, _AT_ONCE)  # little is read for little text
        if self._around[1] and self._begun:
            yield [Tokens(np.array(self._around[1], np.int32))]

    def _cut(self, pieces: Iterable[str]) -> Iterator[_Block]:
        held = ""
        begins = True
        size = _FIRST
        for piece in pieces:
            for start in range(0, len(piece), _BLOCK):
                held += piece[start : start + _BLOCK]
                while self.is_fast and len(held) > size:
                    yield _Block(held[:size], begins, False)
                    held = held[size - _OVERLAP :]
                    begins = False
                    size = min(2 * size, _BLOCK)
        yield _Block(held, begins, True)

    def _code(self, texts: list[str]) -> Iterator[_Placed]:
        coded = self.tokenizer(texts, add_special_tokens=False, verbose=False)
        for number, ids in enumerate(coded["input_ids"]):
            found = np.zeros((len(ids), 3), np.int32)
            found[:, 0] = ids
            if self.is_fast and ids:
                found[:, 1:] = coded.encodings[number].offsets
            yield found

    def _join(self, block: _Block, coded: _Placed) -> Tokens:
        """Tokens that a block adds, up to where the next one begins."""
        begin = []
        if not self._begun:
            begin = self._around[0]
            self._begun = True
        if block.begins:
            begin = [*begin, *self._marks[0]]
        else:
            coded = self._go_on(block, coded)
        close = self._marks[1]
        if not block.ends:
            close = []
            start = len(block.text) - _OVERLAP
            end = np.searchsorted(coded[:, 1], start)
            self._held = coded[end:] - np.array([0, start, start], np.int32)
            coded = coded[:end]
        return Tokens(np.array([*begin, *coded[:, 0], *close], np.int32), ends=block.ends)

    def _go_on(self, block: _Block, coded: _Placed) -> _Placed:
        """Go on from the tokens of the block before to this one's where both agree longest in their overlap."""
        held, common = (
            [tuple(token) for token in part.tolist()]
            for part in (self._held, coded[: np.searchsorted(coded[:, 1], _OVERLAP)])
        )
        where = {token: place for place, token in reversed([*enumerate(common)])}
        seams = [
            (left, where[token])
            for left, token in enumerate(held)
            if token[1] >= _OVERLAP // 2 and token in where
        ]
        if not seams:  # they never agree
            (rest,) = self._code([block.text[_OVERLAP:]])
            return np.concatenate([self._held, rest + np.array([0, _OVERLAP, _OVERLAP], np.int32)])
        left, place = max(
            seams,
            key=lambda seam: count_alike(held[seam[0] : seam[0] + _AGREEING], common[seam[1] :]),
        )
        return np.concatenate([self._held[:left], coded[place:]])


def count_alike(one: Sequence[object], other: Sequence[object]) -> int:
    """Count the first items that two sequences have in common."""
    both = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))


def tokenizer_digest(tokenizer: Any) -> str:
    """Hash a tokenizer (SHA-256): its rules where they can be written down, else its entries."""
    rules = getattr(tokenizer, "backend_tokenizer", None)
    if rules is None:
        text = json.dumps(tokenizer.get_vocab(), sort_keys=True)
    else:
        text = rules.to_str()
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Windows:
    """Windows of a text.

    Attributes:
        ids: (windows, tokens); in each window every token but the first is predicted.
        answers: (windows, tokens), tokens that count, of conversations; None where all do.
        source: the data as the user named it.
        digest: SHA-256 of the token ids and their shape.
        separator: between documents; None where the text was read as one.
        notes: for the user, one line each.
        column: of a table or dataset.
        left_out: counts of what was left out, as far as the text was read (see `Reading`).
    """

    ids: Tensor
    source: str
    digest: str
    separator: str | None = None
    notes: tuple[str, ...] = ()
    column: str | None = None
    left_out: Mapping[str, int] = field(default_factory=dict)
    answers: Tensor | None = None

    def behind(self, first: int) -> Windows:
        """Leave out the first windows, and the notes, which whoever reads those has."""
        ids = self.ids[first:]
        return replace(self, ids=ids, digest=digest_of(ids), notes=())

    def record(self, name: str = "data") -> dict[str, Any]:
        """Describe the text as JSON values, under names that begin with `name`."""
        record: dict[str, Any] = {name: self.source, f"{name}_hash": self.digest}
        if self.column is not None:
            record[f"{name}_column"] = self.column
        if self.left_out:
            record[f"{name}_left_out"] = dict(self.left_out)
        return record

    @property
    def predicted_tokens(self) -> int:
        if self.answers is not None:
            return int(self.answers[:, 1:].sum())
        return len(self.ids) * (self.ids.shape[1] - 1)


def load_windows(
    tokenizer: Any,
    data: str,
    window: int = DEFAULT_WINDOW,
    tokens: int = DEFAULT_TOKENS,
    separator: str | None = None,
    at_most: bool = False,
) -> Windows:
    """Cut the first tokens of a text into windows.

    With a separator the text is split into documents (at least one for each row of a table), each begun with the
    tokenizer's BOS, or ended with its EOS where it has no BOS. Documents follow one another in the windows. Without a
    separator all of the text is one document, with a blank line between rows.

    A byte order mark, the CR of CRLF, rows without text (null, or no such column) and empty documents between
    separators are left out; the result counts them, and its notes name them.

    Args:
        tokenizer: a `transformers` tokenizer.
        data: a UTF-8 text file; a .jsonl, .json (one object a line) or .parquet file, as file or file:column (by
            default the column text, or else the only one of strings); a folder of such files, whose documents are
            apart; "demo" for held-out source files of the Python standard library, "demo:train" for the others, which
            the demo model was trained on; or the name of a dataset for `datasets`, as name[:config[:split[:column]]].
            Text and JSON files may be compressed (.gz). Endings count in any letter case.
        window: tokens in a window.
        tokens: tokens in all, cut down to whole windows.
        at_most: do not note that there is less text than that.

    Raises:
        FileNotFoundError: if there is no such file or dataset.
        ValueError: if the text is empty, not UTF-8 (UTF-16 is named, NUL bytes are refused), too short for one window,
            a row is damaged or holds something else (a lone surrogate, too), the column is ambiguous, or the sizes make
            no sense.
    """
    check_window(window)
    if tokens < window:
        raise ValueError(
            f"tokens must be at least one window of {window}, not {tokens}; take more tokens or a smaller window"
        )
    if separator == "":
        raise ValueError(
            "the separator is empty; give the text between documents, such as '<|endoftext|>'"
        )
    wanted = tokens // window * window
    apart = are_apart(data, separator)
    ids: list[int] = []
    reading = Reading()
    for some in TextTokens(tokenizer, apart).read(documents(data, separator, reading)):
        ids += [id_ for each in some for id_ in each.ids.tolist()]
        if len(ids) >= wanted:
            break
    if not ids:
        raise ValueError(f"{data} is empty; give a text file with something in it")
    if len(ids) < window:
        raise ValueError(
            f"{data} has {plural(len(ids), 'token')}, fewer than one window of {window}; use a smaller window or more "
            "text"
        )
    ids = ids[: min(wanted, len(ids) // window * window)]
    notes = reading.lines(data)
    if len(ids) < wanted and not at_most:
        notes.insert(
            0,
            f"{data} has only {len(ids)} tokens in whole windows of the {wanted} asked for: all are used",
        )
    if not apart:
        notes += marks_in_text(tokenizer, ids, data)
    tensor = torch.tensor(ids, dtype=torch.long).view(-1, window)
    return Windows(
        tensor, data, digest_of(tensor), separator, tuple(notes), reading.column, +reading.left_out
    )


def marks_in_text(tokenizer: Any, ids: list[int], data: str) -> list[str]:
    """Warn of marks between documents that were read as ordinary text."""
    # The BOS that the tokenizer itself put at the start is no sign of them.
    marks = [mark for mark in _MARKS if tokenizer.decode(ids).count(mark, len(mark))]
    if not marks:
        return []
    advice = f"to keep its documents apart, give the separator '{marks[0]}'"
    return [
        f"{data} contains {marks[0]!r}, read as ordinary text, which makes perplexity worse; {advice}"
    ]


def default_data(tokenizer: Any) -> str:
    """Choose the demo's text where none is given, with a warning."""
    text = "".join(next(documents(DEMO, None)))[:_TRIED_CHARACTERS]
    read = tokenizer.decode(
        tokenizer(text, add_special_tokens=False)["input_ids"], skip_special_tokens=True
    )
    wanted, kept = (Counter("".join(part.split())) for part in (text, read))
    lost = 1 - (wanted & kept).total() / wanted.total()
    what = "source files of the Python standard library"
    if lost > _LOST_CHARACTERS:
        raise ValueError(
            f"no text was given, and the one that ships with surgeon, {what}, is nothing for this tokenizer, which has "
            f"no tokens for {lost:.0%} of its characters; give a text that the model is made for"
        )
    warnings.warn(
        f"no text was given, so the one that ships with surgeon is used: {what}. What is found holds for such text; "
        "for a model that is used on another, give some of that",
        stacklevel=2,
    )
    return DEMO


def digest_of(ids: Tensor) -> str:
    """Hash token ids and their shape (SHA-256)."""
    return hashlib.sha256(
        repr(tuple(ids.shape)).encode() + ids.contiguous().numpy().tobytes()
    ).hexdigest()


def shared_windows(one: Windows, other: Windows) -> int:
    """Count windows that two texts share: a model is not judged by text that it was chosen by."""
    seen = {row.tobytes() for row in other.ids.numpy()}
    return sum(row.tobytes() in seen for row in one.ids.numpy())


def held_out(
    tokenizer: Any,
    searched: Windows,
    tokens: int | None = None,
    other: str | None = None,
) -> Windows:
    """Load text that a search has not seen: what follows its windows, or another text, in windows of equal length.

    Args:
        tokenizer: of the searched windows.
        searched: the first windows of their data.
        tokens: by default as many as were searched on, and at least two windows; a note tells where there are fewer.
        other: another text, as `load_windows` takes it.

    Raises:
        FileNotFoundError: if there is no such other text.
        ValueError: if there are not two windows of it, or it holds windows that were searched on.
    """
    window = searched.ids.shape[1]
    separator = searched.separator
    wanted = max(searched.ids.numel(), LEAST_HELD_OUT * window)
    if tokens is not None:
        wanted = tokens
    if wanted < LEAST_HELD_OUT * window:
        raise ValueError(
            f"held-out text of {wanted} tokens is less than {LEAST_HELD_OUT} windows of {window}, without which there "
            f"is no interval; hold out {LEAST_HELD_OUT * window} or more"
        )
    if other is None:
        used = searched.ids.numel()
        every = load_windows(tokenizer, searched.source, window, used + wanted, separator, at_most=True)
        found = every.behind(len(searched.ids))
        there = f"{searched.source} has only {found.ids.numel()} tokens in whole windows behind the first {used}"
        if not len(found.ids):
            raise ValueError(f"nothing is left to hold out: {there}; {_HOLD_OUT_ADVICE}")
        if len(found.ids) < wanted // window:
            note = f"{there} of the {wanted // window * window} asked for: all are used"
            found = replace(found, notes=(note,))
    else:
        found = load_windows(tokenizer, other, window, wanted, separator)
        if again := shared_windows(found, searched):
            raise ValueError(
                f"{again} of the {len(found.ids)} windows of {found.source} are among those that the search saw; hold "
                "out other text"
            )
    if len(found.ids) < LEAST_HELD_OUT:
        raise ValueError(
            f"{found.source} has only {len(found.ids)} window of {window} tokens to hold out, and an interval needs "
            f"{LEAST_HELD_OUT}; {_HOLD_OUT_ADVICE}"
        )
    return found


def tokens_before_rest(
    tokenizer: Any, data: str, window: int, tokens: int, separator: str | None = None, least: int = 1
) -> int:
    """Count the first tokens of a text that are used where the rest is held out by default.

    The rest is a tenth of the text, at most 16,384 tokens and at least `least` windows. Where too few follow the
    `tokens` that are asked for, fewer are used, with a warning.

    Raises:
        FileNotFoundError, ValueError: as `load_windows`.
    """
    most = max(least, HELD_OUT_TOKENS // window)
    there = len(
        load_windows(tokenizer, data, window, tokens + most * window, separator, at_most=True).ids
    )
    rest = min(most, max(least, there // HELD_OUT_SHARE))
    used = min(tokens // window, there - rest)
    if used < 1 or used == tokens // window:
        return tokens
    warnings.warn(
        f"{data} has {there * window:,} tokens in whole windows: the first {used * window:,} are used of the "
        f"{tokens:,} asked for, and the last {rest * window:,} are held out",
        stacklevel=2,
    )
    return used * window


def check_window(window: int) -> None:
    """Refuse windows in which nothing is predicted."""
    if window < 2:
        raise ValueError(f"window must be at least 2 tokens, so that one is predicted, not {window}")


def window_for(config: Any, window: int | None) -> int:
    """Choose the window: the given one or the default, within the model's positions."""
    positions = getattr(config, "max_position_embeddings", None)
    if window is None:
        return min(DEFAULT_WINDOW, positions or DEFAULT_WINDOW)
    if positions is not None and window > positions:
        raise ValueError(
            f"a window of {window} tokens is longer than the model's {positions} positions; use a window of {positions}"
        )
    return window
