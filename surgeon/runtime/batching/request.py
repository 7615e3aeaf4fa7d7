"""Requests of a client, how to sample, and events that come back: plain data, read without importing torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

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
class Tally:
    """A scheduler's counts so far.

    Attributes:
        prompt_tokens: of requests let in.
        cached_tokens: of these, tokens that needed no computing.
        new_tokens: added.
        finished: requests that have ended, in whatever way.
        preempted: how often a request was put back into the queue.
        drafted: tokens that were drafted.
        accepted: of these, how many were added.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    finished: int = 0
    preempted: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass
class Stats(Tally):
    """A service's counts: now, and since it started.

    Attributes:
        running: requests that are let in.
        waiting: requests in the queue, those preempted among them.
        blocks: of the cache.
        free_blocks: that no request uses; later requests may still share some of them.
        passes: forward passes.
        drafting_passes: of these, those that drafted.
    """

    running: int = 0
    waiting: int = 0
    blocks: int = 0
    free_blocks: int = 0
    passes: int = 0
    drafting_passes: int = 0
