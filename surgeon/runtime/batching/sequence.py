"""An open request as the scheduler has it, its part of a pass, and its expected length. No tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import accumulate
from typing import NamedTuple

from surgeon.runtime.batching.ahead import FEW_MISSED, Hits
from surgeon.runtime.batching.blocks import BlockRun, SequenceBlocks
from surgeon.runtime.batching.request import Request

# Of the tokens that have to be the same for a lookup
LONGEST = 3
SHORTEST = 2


class Lookup:
    """Prompt lookup (Saxena 2023): drafts came behind a text's last few tokens when these came before."""

    def __init__(self) -> None:
        self._behind: dict[tuple[int, ...], int] = {}
        self._known = 0  # of the text's tokens, how many were looked at

    def drafts(self, text: Several[int], most: int) -> list[int]:
        """Look up to so many tokens that may come next, perhaps none."""
        for end in range(self._known, len(text)):  # what comes at `end` is known, unlike what comes next
            for length in range(SHORTEST, min(LONGEST, end) + 1):
                self._behind[tuple(text[end - length : end])] = end
        self._known = len(text)
        for length in range(min(LONGEST, len(text)), SHORTEST - 1, -1):
            found = self._behind.get(tuple(text[len(text) - length :]))
            if found is not None:
                # Where it repeats what it is just writing, it goes on to do so.
                period = len(text) - found
                return [text[found + place % period] for place in range(most)]
        return []


class Wanted(IntEnum):
    """The result wanted of a row's last token."""

    NOTHING = 0  # a prompt that goes on in a later pass, or is not to be continued
    BEST = 1  # the most likely next token
    LOGITS = 2  # logits of the whole vocabulary


class Targets(NamedTuple):
    """Tokens of the prompt whose likelihood a row is to tell.

    Attributes:
        first: the row's token that predicts the first of them.
        top: how many of the most likely tokens to report at each place.
    """

    first: int
    tokens: list[int]
    top: int


class Row(NamedTuple):
    """One sequence's part of a pass, as ranks are sent it.

    Attributes:
        start: tokens of the sequence in the cache.
        tokens: the next ones.
        runs: the sequence's blocks in each group of the cache, with room for these tokens.
        wanted: of the last token.
        targets: of the others, and of the last one too while the prompt goes on behind it; None if nobody asks.
        prompt: tokens of the sequence's prompt, or of what was computed again as one: each of these turns as in a text
            of so many (`LongTexts`).
        known: of a draft's rows, tokens that the model has computed: their keys and values stay as they are where the
            draft's attentions share them.
    """

    start: int
    tokens: list[int]
    runs: tuple[list[BlockRun], ...]
    wanted: Wanted
    targets: Targets | None = None
    prompt: int = 0
    known: int = 0

    @property
    def end(self) -> int:
        """The position behind its tokens."""
        return self.start + len(self.tokens)

    @property
    def continues(self) -> bool:
        """True if it adds one token to a text."""
        return self.start > 0 and len(self.tokens) == 1


LEAST_IN_HALF = 2  # tokens of a text that is cut, on either side
Halves = tuple[list[Row], list[Row]]


def halves_of(rows: Several[Row]) -> Halves | None:
    """Divide rows into two halves that take turns (model/rank_model.py), in the same order; None if that cannot be.

    The row in the middle is cut if it is long enough, and otherwise in the half that is nearer.
    """
    ends = list(accumulate(len(row.tokens) for row in rows))
    middle = ends[-1] // 2
    number = next(number for number, end in enumerate(ends) if end > middle)
    row = rows[number]
    before = [*rows[:number]]
    count = middle - (ends[number] - len(row.tokens))  # of its tokens that come before the middle
    if LEAST_IN_HALF <= count <= len(row.tokens) - LEAST_IN_HALF:
        first = row._replace(tokens=row.tokens[:count])
        second = row._replace(tokens=row.tokens[count:], start=row.start + count)
        return [*before, first], [second, *rows[number + 1 :]]
    if before and (2 * count <= len(row.tokens) or number + 1 == len(rows)):
        return before, [*rows[number:]]
    if number + 1 < len(rows):
        return ([*before, row], [*rows[number + 1 :]])
    return None


@dataclass(frozen=True)
class LongTexts:
    """Texts beyond a length, where rotary positions depend on how long a text is.

    A token turns as in a text as long as its prompt, or as up to the token itself, whichever is more: whatever the
    chunks of its prompt and other texts.

    Attributes:
        beyond: of more tokens than these.
        by_length: whether it matters how many more (dynamic), or only that there are more (longrope).
        anew: whether a text that grows beyond is computed again, all its tokens as if they were a prompt (Phi3).
    """

    beyond: int
    by_length: bool
    anew: bool

    def root(self, prompt: int) -> int:
        """The root, as of `BlockPool.match`, of texts whose keys of the same tokens are the same."""
        if prompt <= self.beyond:
            return 0
        if self.by_length:
            return -prompt
        return -1


class AskedPlaces(NamedTuple):
    """The tokens of a pass that something is asked of; the stream of others ends behind the last attention.

    Attributes:
        places: of those whose next token or logits are wanted, then of those that predict targets.
        wanted: of each of the former.
    """

    places: list[int]
    wanted: list[Wanted]


def asked_of(rows: Several[Row]) -> AskedPlaces:
    """Collect what the rows of a pass ask for."""
    places = list[int]()
    wanted = list[Wanted]()
    predicting = list[int]()
    end = 0
    for row in rows:
        start = end
        end += len(row.tokens)
        if row.wanted:
            places.append(end - 1)
            wanted.append(row.wanted)
        if row.targets is not None:
            first = start + row.targets.first
            predicting += range(first, first + len(row.targets.tokens))
    return AskedPlaces(places + predicting, wanted)


@dataclass(eq=False)
class Sequence:
    """An open request.

    Attributes:
        tokens: prompt and output so far.
        wanted: of a pass that completes them.
        prompt: tokens of the prompt, or of what was computed again as one.
        last: how many they are when the request ends at the latest. The last one is not computed.
        computed: how many of them are in the cache.
        drafter_computed: of how many the cache holds those keys and values that are a draft's own.
        cached: tokens of the prompt that were not computed when it was first let in, at `admitted`.
        unscored: the first token of the prompt whose log-probability is asked for and not known, if any.
        drafting: whether tokens may be drafted for it; no more once there were logits that are not finite.
        drafted, accepted: tokens drafted for it, and those of them it has taken over.
        unverified: how many of the last tokens are drafts that have not been verified.
    """

    request: Request
    tokens: list[int]
    wanted: Wanted
    prompt: int
    last: int
    unscored: int | None
    computed: int = 0
    drafter_computed: int = 0
    blocks: SequenceBlocks = field(default_factory=SequenceBlocks)
    cached: int = 0
    admitted: float | None = None
    drafting: bool = True
    drafted: int = 0
    accepted: int = 0
    hits: Hits = field(default_factory=Hits)
    lookup: Lookup = field(default_factory=Lookup)
    unverified: int = 0

    @property
    def known(self) -> int:
        """The number of tokens but drafts."""
        return len(self.tokens) - self.unverified

    def take_unverified(self) -> list[int]:
        """Take off the drafts, which have not been computed then."""
        known = self.known
        self.unverified = 0
        drafts = self.tokens[known:]
        del self.tokens[known:]
        self.computed = min(self.computed, known)
        return drafts

    @classmethod
    def of(cls, request: Request) -> Sequence:
        """Open a request."""
        prompt = list(request.prompt)
        sampling = request.sampling
        if sampling.greedy:
            wanted = Wanted.BEST
        else:
            wanted = Wanted.LOGITS
        scored = sampling.prompt_logprobs is not None and len(prompt) > 1
        return cls(
            request,
            prompt,
            wanted if sampling.max_new_tokens else Wanted.NOTHING,
            len(prompt),
            last=len(prompt) + sampling.max_new_tokens,
            unscored=1 if scored else None,
        )


class ScheduledChunk(NamedTuple):
    """A sequence's part of a pass: its next `tokens` tokens.

    Attributes:
        drafts: how many tokens are drafted behind them first, and computed with them; there are blocks for all.
        missed: how many tokens the draft computes before, which the model has computed without it.
    """

    sequence: Sequence
    tokens: int
    drafts: int = 0
    missed: int = 0

    @property
    def completes(self) -> bool:
        """True if all tokens so far are in the cache afterwards."""
        return self.sequence.computed + self.tokens == len(self.sequence.tokens)

    @property
    def wanted(self) -> Wanted:
        if self.completes:
            return self.sequence.wanted
        return Wanted.NOTHING

    @property
    def targets(self) -> Targets | None:
        """Targets among the prompt's tokens."""
        sequence = self.sequence
        prompt = self.sequence.request.prompt
        top = sequence.request.sampling.prompt_logprobs
        begin = sequence.unscored
        tokens = () if begin is None else prompt[begin : sequence.computed + self.tokens + 1]
        if begin is None or top is None or not tokens:
            return None
        return Targets(begin - 1 - sequence.computed, list(tokens), top)

    def rows(self, drafts: Several[int] = ()) -> list[Row]:
        """Rows for the ranks: one, or where tokens were drafted one of each token.

        A pass puts all keys and values into the cache before anything looks there, so that tokens that were drafted
        come in passes of the same kind as texts that add one token.
        """
        sequence = self.sequence
        first = sequence.computed
        tokens = sequence.tokens[first : first + self.tokens]
        row = Row(
            first, [*tokens, *drafts], sequence.blocks.runs, self.wanted, self.targets, sequence.prompt
        )
        if drafts:
            return _apart(row)
        return [row]

    def drafting_rows(self, drafts: Several[int]) -> list[Row]:
        """Rows that draft one more token.

        Missed tokens come with the first of them, in front of the newest token, or alone.
        """
        sequence = self.sequence
        missed = 0 if drafts else self.missed
        tokens = [*sequence.tokens, *drafts]
        end = len(tokens) if self.drafts else sequence.drafter_computed + missed
        first = end - missed - bool(self.drafts)
        wanted = sequence.wanted if len(drafts) < self.drafts else Wanted.NOTHING
        runs = sequence.blocks.runs
        prompt = sequence.prompt
        row = Row(first, tokens[first:end], runs, wanted, prompt=prompt, known=sequence.computed)
        if not 0 < missed <= FEW_MISSED:
            return [row]
        *before, last = _apart(row)
        return [*(one._replace(wanted=Wanted.NOTHING) for one in before), last]


def _apart(row: Row) -> list[Row]:
    return [
        row._replace(start=row.start + place, tokens=[token]) for place, token in enumerate(row.tokens)
    ]


class Expectation:
    """The share of the tokens that they may add that the newest texts did add: admission reserves blocks by it.

    Attributes:
        share: the first one, until texts have ended; more again whenever one had to give way.
    """

    _WEIGHT = 1 / 8  # of the newest text

    def __init__(self, share: float) -> None:
        self.share = share

    def ended(self, sequence: Sequence) -> None:
        """Note how far a text has come."""
        if limit := sequence.request.sampling.max_new_tokens:
            added = (len(sequence.tokens) - len(sequence.request.prompt)) / limit
            self.share += (added - self.share) * self._WEIGHT

    def failed(self) -> None:
        """Note that texts have become longer than expected."""
        self.share += (1 - self.share) / 2

    def length(self, sequence: Sequence) -> int:
        """Estimate how many tokens of a text there will be in the cache."""
        prompt = len(sequence.request.prompt)
        limit = sequence.request.sampling.max_new_tokens
        return min(prompt + math.ceil(limit * self.share), sequence.last - 1)
