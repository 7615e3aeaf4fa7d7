"""Requests of a client, how to sample, and events that come back; then an open request as the scheduler has it.

Plain data, read without importing torch: a sequence, its part of a pass, its expected length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import accumulate
from typing import Literal, NamedTuple

from surgeon.runtime.batching.ahead import FEW_MISSED, Hits
from surgeon.runtime.batching.blocks import BlockRun, SequenceBlocks

MOST_LOGPROBS = 64
MOST_STOPS = 64
MOST_STOP_CHARACTERS = 1 << 16

UNDEFINED = -1  # in place of a token: the logits that it was to be chosen from are not finite

FinishReason = Literal["stop", "length", "cancelled"]


class UndefinedLogits(ValueError):
    """The model's logits are NaN or infinite somewhere, so that it predicts nothing there."""


class QueueFull(ValueError):
    """The service is full of running and waiting requests; the client may try again later."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters and stop conditions.

    The filters apply in this order: repetition penalty, suppressed tokens, temperature, top_k, top_p, min_p. Log-
    probabilities are those of the model itself, before any of them.

    Attributes:
        temperature: 0 takes the most likely token (greedy); the logits are divided by it otherwise.
        top_p: keep the fewest most likely tokens whose probabilities sum to at least this (nucleus sampling); with 0
            that is the most likely one.
        top_k: keep this many of the most likely tokens; 0 keeps all.
        min_p: keep tokens at least this times as likely as the most likely one.
        repetition_penalty: logits of tokens that prompt or output have are divided by it if positive, else multiplied
            (Keskar et al. 2019, CTRL, section 4.1; there over the output only).
        seed: the same seed and place give the same tokens, whatever else runs at the time; None draws a seed.
        max_new_tokens: how many to add at most; with 0 the prompt is computed and nothing added.
        stop: texts that end the output; they are not part of it.
        logprobs: report the log-probability of every chosen token and those of this many most likely ones; None
            reports none.
        prompt_logprobs: the same for the prompt's tokens but the first; no part of the prompt is taken from the cache
            then.
        ignore_end: go on after the model's own end tokens.
        suppress_tokens: token ids that are never chosen; those beyond the vocabulary mean nothing.
        begin_suppress_tokens: the same for the first new token.
        place: which text of its seed this is, as (prompt, answer): each has random numbers of its own.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_new_tokens: int = 64
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    ignore_end: bool = False
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    place: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, self.temperature >= 0, "at least 0")
        _check("top_p", self.top_p, 0 <= self.top_p <= 1, "in 0..1")
        _check("top_k", self.top_k, self.top_k >= 0, "at least 0 (0 keeps all tokens)")
        _check("min_p", self.min_p, 0 <= self.min_p <= 1, "in 0..1")
        _check(
            "repetition_penalty",
            self.repetition_penalty,
            self.repetition_penalty > 0,
            "above 0 (1 is none)",
        )
        _check("seed", self.seed, self.seed is None or abs(self.seed) < 1 << 64, "within 64 bits")
        _check("max_new_tokens", self.max_new_tokens, self.max_new_tokens >= 0, "at least 0")
        for name, number in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            _check(
                name, number, number is None or 0 <= number <= MOST_LOGPROBS, f"in 0..{MOST_LOGPROBS}"
            )
        if isinstance(self.stop, str) or not all(self.stop) or len(self.stop) > MOST_STOPS:
            raise ValueError(
                f"stop must be up to {MOST_STOPS} texts, none of them empty, not {self.stop!s:.60}"
            )
        if (characters := sum(map(len, self.stop))) > MOST_STOP_CHARACTERS:
            raise ValueError(
                f"stop must have {MOST_STOP_CHARACTERS} characters at most in all, not {characters}"
            )

    @property
    def draws(self) -> bool:
        """True if more than one token may be chosen at a place."""
        return self.temperature > 0 and self.top_p > 0 and self.top_k != 1

    @property
    def greedy(self) -> bool:
        """True if only the most likely token is needed, so that ranks need not exchange all logits."""
        changed = self.repetition_penalty != 1 or self.suppress_tokens or self.begin_suppress_tokens
        return not self.draws and not changed and self.logprobs is None


def _check(name: str, value: float | None, fits: bool, allowed: str) -> None:
    if not fits or (value is not None and not math.isfinite(value)):
        raise ValueError(f"{name} must be {allowed}, not {value}")


@dataclass(frozen=True)
class Request:
    """One text to go on from.

    Attributes:
        id: names the request; no two that are open share one.
        prompt: token ids, at least one.
    """

    id: int
    prompt: tuple[int, ...]
    sampling: Sampling


def check_length(request: Request, room: int) -> None:
    """Refuse a request that could not even run alone.

    Args:
        room: how many tokens prompt and output may have together.
    """
    prompt = len(request.prompt)
    new = request.sampling.max_new_tokens
    if not prompt:
        raise ValueError("the prompt is empty: it has no tokens; give at least one")
    if prompt + new > room:
        if prompt >= room:
            mend = "shorten the prompt"
        else:
            mend = f"ask for at most {room - prompt} new ones"
        raise ValueError(
            f"{prompt} tokens of the prompt and {new} new ones are more than the {room} that fit; {mend}"
        )


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability (natural) of a chosen token, and the most likely tokens at its place.

    Attributes:
        top: (token id, log-probability), the most likely first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


Choice = tuple[int, TokenLogprob | None]  # a token, or UNDEFINED, and what is reported about it


@dataclass(frozen=True)
class Usage:
    """Tokens so far.

    Attributes:
        prompt: how many the prompt has.
        cached: of these, how many needed no computing because an earlier request began with the same ones.
        new: how many were added, an end token among them.
        drafted: how many were drafted, where the service drafts.
        accepted: of these, how many are among the new ones.
        seconds: from the first new token to the newest.
    """

    prompt: int = 0
    cached: int = 0
    new: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_pass(self) -> float:
        """Tokens that each of the model's passes over the text has added, the last one of its prompt among them."""
        return self.new / max(1, self.new - self.accepted)


@dataclass(frozen=True)
class Event:
    """News of a request.

    Attributes:
        request: the request's id.
        tokens: new token ids; the last event of a text that ended by itself has the end token.
        text: new text, whole characters only. It lags behind the tokens while a stop text may be beginning, and the
            last event brings the rest; empty if the service has no tokenizer.
        logprobs: one for each of `tokens`, if asked for.
        finish_reason: in the last event "stop" (an end token or a stop text), "length" or "cancelled".
        usage: tokens so far.
        queue_seconds: from `submit` until the request was first let in; 0 if it was cancelled before.
        prompt_logprobs: of the next tokens of the prompt, if asked for, from its second token on; all of them have come
            with the first new token.
        offsets: where each of `tokens` begins in the text of all events, in characters; of end tokens, where they
            stand. Empty if the service has no tokenizer.
    """

    request: int
    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None
    usage: Usage
    queue_seconds: float = 0.0
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    offsets: tuple[int, ...] = ()


@dataclass
class Stats:
    """A service's counts: since it started, and now.

    Attributes:
        prompt_tokens: of requests let in.
        cached_tokens: of these, tokens that needed no computing.
        new_tokens: added.
        finished: requests that have ended, in whatever way.
        preempted: how often a request was put back into the queue.
        drafted: tokens that were drafted.
        accepted: of these, how many were added.
        running: requests that are let in.
        waiting: requests in the queue, those preempted among them.
        blocks: of the cache.
        free_blocks: that no request uses; later requests may still share some of them.
        passes: forward passes.
        drafting_passes: of these, those that drafted.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    finished: int = 0
    preempted: int = 0
    drafted: int = 0
    accepted: int = 0
    running: int = 0
    waiting: int = 0
    blocks: int = 0
    free_blocks: int = 0
    passes: int = 0
    drafting_passes: int = 0


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


Rows = Several[Row]  # of a pass
LEAST_IN_HALF = 2  # tokens of a text that is cut, on either side
Halves = tuple[list[Row], list[Row]]


def halves_of(rows: Rows) -> Halves | None:
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


def asked_of(rows: Rows) -> list[int]:
    """The places in a pass that rows ask something of; the stream of others ends behind the last attention.

    First those of the tokens whose next token or logits are wanted, then those that predict targets.
    """
    places = list[int]()
    predicting = list[int]()
    end = 0
    for row in rows:
        start = end
        end += len(row.tokens)
        if row.wanted:
            places.append(end - 1)
        if row.targets is not None:
            first = start + row.targets.first
            predicting += range(first, first + len(row.targets.tokens))
    return places + predicting


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
    def known_tokens(self) -> int:
        """The number of tokens but drafts."""
        return len(self.tokens) - self.unverified

    def take_unverified(self) -> list[int]:
        """Take off the drafts, which have not been computed then."""
        verified = self.known_tokens
        self.unverified = 0
        drafts = self.tokens[verified:]
        del self.tokens[verified:]
        self.computed = min(self.computed, verified)
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

    def note_end(self, sequence: Sequence) -> None:
        """Note how far a text has come."""
        if limit := sequence.request.sampling.max_new_tokens:
            added = (len(sequence.tokens) - len(sequence.request.prompt)) / limit
            self.share += (added - self.share) * self._WEIGHT

    def note_failure(self) -> None:
        """Note that texts have become longer than expected."""
        self.share += (1 - self.share) / 2

    def length(self, sequence: Sequence) -> int:
        """Estimate how many tokens of a text there will be in the cache."""
        prompt = len(sequence.request.prompt)
        limit = sequence.request.sampling.max_new_tokens
        return min(prompt + math.ceil(limit * self.share), sequence.last - 1)
