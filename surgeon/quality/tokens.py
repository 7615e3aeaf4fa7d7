"""Tokens of texts of any length, in little memory.

A long text is tokenized in overlapping blocks. Where the tokens of two blocks agree for a while, in the middle of their
overlap, the second takes over: so the tokens are those of the whole text at once. Where they have no token in common
there, as in a word of thousands of letters, the text is cut.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

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


_Placed = list[tuple[int, int, int]]  # tokens: id, and where they begin and end in the text


@dataclass(frozen=True)
class _Coded:
    """A block's tokens; `encoding` is that of `tokenizers`, None for slow tokenizers."""

    text: str
    ids: list[int]
    encoding: Any

    def placed(self, first: int, end: int | None = None) -> _Placed:
        return [
            (self.ids[token], *self.encoding.token_to_chars(token))
            for token in range(len(self.ids))[first:end]
        ]

    def token_at(self, character: int) -> int:
        """Find the first token that begins at a character or behind it."""
        return bisect_left(
            range(len(self.ids)),
            character,
            key=lambda token: int(self.encoding.token_to_chars(token)[0]),
        )


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
        self._blocks = 0  # so far
        # The last tokens of a document that goes on, by their places in the next block.
        self._held: _Placed = []

    def read(self, documents: Iterable[Iterable[str]]) -> Iterator[list[Tokens]]:
        blocks = (block for pieces in documents for block in self._cut(pieces))
        most = _FIRST
        batch = list[_Block]()
        for block in chain(blocks, [None]):
            if block is not None:
                batch.append(block)
            if batch and (block is None or sum(len(each.text) for each in batch) >= most):
                coded = self._code([each.text for each in batch])
                yield list(map(self._join_rows, batch, coded))
                batch = []
                most = min(2 * most, _AT_ONCE)  # little is read for little text
        if self._around[1] and self._blocks:
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

    def _code(self, texts: list[str]) -> list[_Coded]:
        coded = self.tokenizer(texts, add_special_tokens=False, verbose=False)
        encodings = coded.encodings or [None] * len(texts)
        return [_Coded(*each) for each in zip(texts, coded["input_ids"], encodings, strict=True)]

    def _join_rows(self, block: _Block, coded: _Coded) -> Tokens:
        """Tokens that a block adds, up to where the next one begins."""
        before = []
        if self._blocks == 0:
            before = self._around[0]
        first = 0
        if not block.begins:
            own = coded.placed(0, coded.token_at(_OVERLAP))
            where = {each: token for token, each in reversed([*enumerate(own)])}
            seams = [
                (token, where[each])
                for token, each in enumerate(self._held)
                if each[1] >= _OVERLAP // 2 and each in where
            ]
            # The tokens of the block before that stay, and this block's first one.
            left = len(self._held)
            most = 0
            for token, at in seams:
                agreeing = count_alike(self._held[token : token + _AGREEING], own[at:])
                if agreeing > most:
                    left = token
                    first = at
                    most = agreeing
            if not seams:  # they never agree
                coded = self._code([block.text[_OVERLAP:]])[0]
            before = [id_ for id_, *_ in self._held[:left]]
        end = len(coded.ids)
        self._held = []
        if not block.ends:
            start = len(coded.text) - _OVERLAP
            end = coded.token_at(start)
            self._held = [(id_, begin - start, stop - start) for id_, begin, stop in coded.placed(end)]
        self._blocks += 1
        begin = []
        if block.begins:
            begin = self._marks[0]
        close = []
        if block.ends:
            close = self._marks[1]
        return Tokens(
            np.array([*begin, *before, *coded.ids[first:end], *close], np.int32), ends=block.ends
        )


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
