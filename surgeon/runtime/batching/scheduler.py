"""Continuous batching: the content of every forward pass, chunks of prompts, admission, preemption, cancellation.

Only rank 0 has a scheduler. A pass takes, in this order,

1. one token of every sequence that is being continued, the oldest first, and behind it those that were drafted; 2. the
next chunk of every prompt that has been begun, as far as the budget of tokens and free blocks go; 3. the first chunk of
waiting requests, first come, first served: nobody is let past one that does not fit yet.

A request is let in when there are free blocks for all its tokens so far, and for what it and all running ones are
expected to add (`Expectation`), of running ones a block at least. When a sequence needs a block nevertheless and none
is free, the youngest running one is preempted: it gives back its blocks, which can be shared until they are
overwritten, goes to the front of the queue, and is computed again later. The oldest is never preempted by others and no
request is accepted that could not run alone, so all of them end.

In groups with a window a prompt gets blocks chunk by chunk, and gives back behind it what no window reaches.

Drafted tokens (`Limits.draft_tokens`) get free blocks, and nobody is preempted for them. Wrong ones are overwritten. A
draft with keys of its own (`catches_up`) first computes what it has missed, `pass_tokens` in a pass at most; a text
that still lacks some is drafted for in a later one.

Where all texts only go on with their likeliest tokens and nobody waits, ranks may compute a few passes before they hear
of this scheduler again (`Limits.at_once`). Tokens behind one that ends a text are dropped.

A request that asks how likely its prompt is shares no blocks until that is known: they hold no predictions.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence as Several
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal, NamedTuple

from surgeon.runtime.batching.ahead import Ahead
from surgeon.runtime.batching.blocks import PASS_TOKENS, ROOT, BlockPool, SequenceBlocks
from surgeon.runtime.batching.request import (
    UNDEFINED,
    Choice,
    Expectation,
    FinishReason,
    LongTexts,
    Request,
    ScheduledChunk,
    Sequence,
    Stats,
    TokenLogprob,
    Wanted,
)


@dataclass(frozen=True)
class Limits:
    """Limits of passes and texts.

    Attributes:
        max_batch: sequences in one pass.
        max_tokens: tokens of one sequence, prompt and output.
        pass_tokens: of prompts, in one pass; of texts that are continued, with their drafts, as many more.
        ends: token ids that end a text.
        draft_tokens: drafted at a time for a sequence; no more than `max_batch` of them have in `pass_tokens`.
        long_texts: that turn otherwise than short ones, if any.
        expected_share: of the tokens that texts may add, before any has ended.
        as_pays: whether fewer tokens are drafted, or none, where that is faster.
        looked_up: whether drafts are looked up in a text itself (`Lookup`).
        stretches: ranks that a pass goes through, one after the other.
        at_once: passes that ranks may compute before they hear of the scheduler again.
    """

    max_batch: int
    max_tokens: int
    pass_tokens: int = PASS_TOKENS["cpu"]
    ends: tuple[int, ...] = ()
    draft_tokens: int = 0
    expected_share: float = 1.0
    long_texts: LongTexts | None = None
    as_pays: bool = False
    looked_up: bool = False
    stretches: int = 1
    at_once: int = 1


Ending = FinishReason | Literal["undefined"]  # the latter: the model's logits are not finite
NOTHING = (None, None)  # in place of a choice


class Output(NamedTuple):
    """The result of a pass for one request, as the client's process is sent it.

    Attributes:
        token: the new one, if any.
        finish_reason: if this was the last.
        cached: tokens of the prompt that were not computed.
        admitted: when the request was first let in, by the machine's monotonic clock.
        prompt_logprobs: of the next tokens of the prompt.
        drafted, accepted: tokens drafted for it so far, and those of them among its new ones.
    """

    request: int
    token: int | None
    logprob: TokenLogprob | None
    finish_reason: Ending | None
    cached: int
    admitted: float | None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    drafted: int = 0
    accepted: int = 0


class Scheduler:
    """Open requests and the blocks they use. `plan` and `advance` are called in turn.

    Attributes:
        catches_up: whether drafts have keys of their own.
        waiting, running: in the order in which they will be, or were, let in.
        expected: how long texts become.
        ahead: how many drafts pay; None where there are always as many.
    """

    def __init__(self, pool: BlockPool, limits: Limits, catches_up: bool = False) -> None:
        self.pool = pool
        self.limits = limits
        self.catches_up = catches_up and not limits.looked_up
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.tally = Stats()
        self.expected = Expectation(limits.expected_share)
        self.ahead = Ahead() if limits.as_pays and limits.draft_tokens else None
        self._refused_at = -1  # the pool's releases when the first in the queue did not fit

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    def submit(self, request: Request) -> None:
        """Put a request at the end of the queue; the cache has to have room for all its tokens."""
        self.waiting.append(Sequence.of(request))

    def cancel(self, request: int) -> Output | None:
        """End a request and free its blocks; None if it is not open."""
        for sequence in (*self.running, *self.waiting):
            if sequence.request.id == request:
                return self._finish(sequence, "cancelled")
        return None

    def plan(self) -> list[ScheduledChunk]:
        """Plan the chunks of the next pass; none only if no request is open."""
        # Texts that have grown beyond a length are computed again, if `LongTexts.anew` says so.
        border = self._border
        for sequence in reversed(self.running.copy()):
            if sequence.prompt <= border < len(sequence.tokens):
                sequence.prompt = len(sequence.tokens)
                self.running.remove(sequence)
                self._put_back(sequence)
        chunks = self._add_drafts(self._continue_sequences())
        budget = self.limits.pass_tokens
        for sequence in tuple(self.running):
            if budget and len(sequence.tokens) - sequence.computed > 1 and sequence in self.running:
                begun = self._begin_prompt(sequence, budget, alone=not chunks)
                if begun is not None:
                    chunks.append(begun)
                    budget -= begun.tokens
        while budget and self._admit(budget):
            begun = self._begin_prompt(self.running[-1], budget, alone=True)
            assert begun is not None, "a request that was let in has room for a token at least"
            chunks.append(begun)
            budget -= begun.tokens
        return chunks

    @property
    def _border(self) -> float:
        """The most tokens of a text before it is computed again."""
        long_texts = self.limits.long_texts
        if long_texts is not None and long_texts.anew:
            return long_texts.beyond
        return math.inf

    def _put_back(self, sequence: Sequence) -> None:
        """Put a sequence that ran first in the queue, without blocks."""
        self.pool.close(sequence.blocks)
        sequence.blocks = SequenceBlocks()
        sequence.computed = 0
        sequence.drafter_computed = 0
        self.waiting.appendleft(sequence)

    def _continue_sequences(self) -> list[ScheduledChunk]:
        chunks: list[ScheduledChunk] = []
        for sequence in tuple(self.running):
            length = len(sequence.tokens)
            if length - sequence.computed != 1:
                continue
            if not self._make_room(sequence, length):
                break  # it was the youngest
            chunks.append(ScheduledChunk(sequence, 1))
        return chunks

    def _begin_prompt(self, sequence: Sequence, most: int, alone: bool) -> ScheduledChunk | None:
        """Plan the next chunk of a prompt, with blocks for it; None where others have to end first."""
        begin = sequence.computed
        length = len(sequence.tokens)
        last = min(length, begin + most)
        end = self.pool.reach(sequence.blocks, begin, last, length)
        if end == begin:
            if not alone or not self._make_room(sequence, begin + 1):
                return None
            end = self.pool.reach(sequence.blocks, begin, last, length)
        self.pool.grow(sequence.blocks, end, length)
        return ScheduledChunk(sequence, end - begin)

    def _add_drafts(self, chunks: list[ScheduledChunk]) -> list[ScheduledChunk]:
        """Add as many drafts as there is room for, and what drafts have missed; the most come first."""
        if not self.limits.draft_tokens or not chunks:
            return chunks
        texts = [each.sequence for each in chunks]
        wanted = [self._drafts_wanted(text) for text in texts]
        missed = [text.computed - text.drafter_computed if self.catches_up else 0 for text in texts]
        if self.ahead is not None:
            further = [max(1, self.expected.length(text) - text.computed) for text in texts]
            wanted = self.ahead.choose([text.hits for text in texts], wanted, missed, further)
        drafting = list[ScheduledChunk]()
        budget = self.limits.pass_tokens
        for text, most, lacking in zip(texts, wanted, missed, strict=True):
            computed = min(lacking, budget) if most else 0
            budget -= computed
            room = 0
            if most and computed == lacking:
                length = len(text.tokens)
                end = self.pool.reach(text.blocks, length, length + most)
                self.pool.grow(text.blocks, end)
                room = end - length
            drafting.append(ScheduledChunk(text, 1, room, computed))
        return sorted(drafting, key=lambda chunk: (-chunk.drafts, -chunk.missed))

    def _drafts_wanted(self, sequence: Sequence) -> int:
        """Count the drafts for a sequence if there are blocks for them and the token behind the last one.

        A sequence's very last token is not computed. A prompt may end in any chunk, and nothing is drafted behind it.
        """
        length = len(sequence.tokens)
        if not sequence.drafting or length == len(sequence.request.prompt):
            return 0
        most = min(self.limits.draft_tokens, self.limits.pass_tokens // self.limits.max_batch - 1)
        return max(0, min(most, self._longest(sequence) - length))

    def _longest(self, sequence: Sequence) -> int:
        """The most tokens of a text that are computed before it ends, or is computed again."""
        if sequence.prompt > self._border:
            return sequence.last - 1
        return int(min(sequence.last - 1, self._border))

    def passes_at_once(self, chunks: Several[ScheduledChunk], most: int) -> int:
        """Count the passes, up to so many, that need nothing of this scheduler but the first one's plan.

        Each adds the likeliest token to every text. There are blocks for all of them then.
        """
        if self.waiting or self.limits.draft_tokens:
            return 1
        if any(chunk.wanted != Wanted.BEST or chunk.tokens > 1 for chunk in chunks):
            return 1
        texts = [(chunk.sequence, len(chunk.sequence.tokens)) for chunk in chunks]
        most = max(1, min(most, *(1 + self._longest(text) - length for text, length in texts)))
        pool = self.pool
        while (
            sum(pool.count_lacking(text.blocks, length + most - 1) for text, length in texts) > pool.free
        ):
            most -= 1
        for text, length in texts:
            pool.grow(text.blocks, length + most - 1)
        return most

    def _make_room(self, sequence: Sequence, end: int) -> bool:
        """Give a running sequence blocks for its tokens up to `end`; False if it had to be preempted itself."""
        whole = len(sequence.tokens)
        while self.pool.count_lacking(sequence.blocks, end, whole) > self.pool.free:
            youngest = self.running.pop()
            self._put_back(youngest)
            self.tally.preempted += 1
            self.expected.note_failure()
            if youngest is sequence:
                return False
        self.pool.grow(sequence.blocks, end, whole)
        return True

    def _admit(self, budget: int) -> bool:
        """Let in the first of the queue if there is room for all its tokens, and for what all are expected to add."""
        pool = self.pool
        full = len(self.running) == self.limits.max_batch
        if full or not self.waiting or self._refused_at == pool.releases:
            return False
        sequence = self.waiting[0]
        unscored = sequence.unscored
        size = pool.block_tokens
        tokens = sequence.tokens
        long_texts = self.limits.long_texts
        root = ROOT
        if long_texts is not None:
            root = long_texts.root(sequence.prompt)
        prefix = pool.match(tokens, None if unscored is None else (unscored - 1) // size, root)
        computed = prefix.blocks * size
        length = len(sequence.tokens)
        blocks = pool.open(prefix)
        own = pool.count_lacking(blocks, min(length, computed + budget), length)
        own = max(own, pool.still_to_come(blocks, max(length, self.expected.length(sequence))))
        if self.running and own + sum(map(self._to_come, self.running)) > pool.free:
            pool.close(blocks)
            self._refused_at = pool.releases
            return False
        sequence.blocks = blocks
        sequence.computed = computed
        if sequence.admitted is None:
            sequence.admitted = time.monotonic()
            sequence.cached = sequence.computed
            self.tally.prompt_tokens += len(sequence.tokens)
            self.tally.cached_tokens += sequence.computed
        self.running.append(self.waiting.popleft())
        return True

    def _to_come(self, sequence: Sequence) -> int:
        """Count the blocks a running sequence is expected to need yet; one at least, if it can come to need one."""
        further = len(sequence.tokens) + self.pool.block_tokens
        tokens = min(sequence.last - 1, max(further, self.expected.length(sequence)))
        return self.pool.still_to_come(sequence.blocks, tokens)

    def advance(
        self,
        chunks: Several[ScheduledChunk],
        chosen: Several[Several[Choice]],
        scores: Several[Several[TokenLogprob]] = (),
    ) -> list[Output]:
        """Note that a pass has been computed.

        Args:
            chunks: of the pass, as planned.
            chosen: the next tokens of every chunk that wants one, in their order, and how likely they were: accepted
                drafts, and one more; or those of passes at once. UNDEFINED ends the request, and behind drafts, which
                may be to blame, its drafting.
            scores: of every chunk with targets, how likely these are; NaN ends the request, too.
        """
        outputs: list[Output] = []
        found = iter(chosen)
        scored = iter(scores)
        for chunk in chunks:
            sequence = chunk.sequence
            wanted = chunk.wanted
            completes = chunk.completes
            sequence.drafter_computed += chunk.missed
            prompt = tuple(next(scored)) if chunk.targets is not None else ()
            choices = list(next(found)) if wanted else []
            if self.ahead is not None and choices:
                self.ahead.note_verified(sequence.hits, chunk.drafts, len(choices) - 1)
            if chunk.drafts:
                outputs += self._take_over(chunk, choices)
                continue
            if self.limits.looked_up and completes and choices:  # room for drafts that were not found
                self.pool.shrink(sequence.blocks, len(sequence.tokens))
            if any(token == UNDEFINED for token, _ in choices[:1]) or any(
                math.isnan(one.logprob) for one in prompt
            ):
                self.pool.forget(sequence.blocks)  # nobody shares what predicts nothing
                outputs.append(self._finish(sequence, "undefined"))
                continue
            sequence.computed += chunk.tokens
            self.pool.learn(sequence.blocks, sequence.tokens, sequence.computed)
            self.pool.leave_behind(sequence.blocks, sequence.computed)
            if prompt:
                assert sequence.unscored is not None
                further = sequence.unscored + len(prompt)
                sequence.unscored = further if further < len(sequence.request.prompt) else None
            if choices:
                outputs.append(self._append(sequence, choices[0], prompt))
                outputs += self._take_further(sequence, choices[1:])
            elif completes:  # and nothing is to be added
                outputs.append(self._finish(sequence, "length", prompt=prompt))
            elif prompt:
                outputs.append(_output(sequence, None, prompt=prompt))
        return outputs

    def _take_over(self, chunk: ScheduledChunk, choices: list[Choice]) -> list[Output]:
        """Add accepted drafts and the token behind them, up to the one that ends the request."""
        sequence = chunk.sequence
        sequence.drafter_computed = sequence.computed + min(chunk.drafts, len(choices))
        defined = list(takewhile(lambda choice: choice[0] != UNDEFINED, choices))
        sequence.drafting = len(defined) == len(choices)
        sequence.drafted += chunk.drafts
        self.tally.drafted += chunk.drafts
        outputs: list[Output] = []
        for place, choice in enumerate(defined, start=1):
            accepted = place < len(choices)
            sequence.computed += 1  # the token before this one
            sequence.accepted += accepted
            self.tally.accepted += accepted
            self.pool.learn(sequence.blocks, sequence.tokens, sequence.computed)
            outputs.append(self._append(sequence, choice, ()))
            if outputs[-1].finish_reason is not None:
                return outputs
        self.pool.shrink(sequence.blocks, len(sequence.tokens))
        self.pool.leave_behind(sequence.blocks, sequence.computed)
        return outputs

    def _take_further(self, sequence: Sequence, choices: list[Choice]) -> list[Output]:
        """Add the tokens of further passes that were computed at once, up to the one that ends the request."""
        outputs: list[Output] = []
        for choice in choices:
            if sequence not in self.running:
                return outputs
            if choice[0] == UNDEFINED:
                self.pool.forget(sequence.blocks)
                return [*outputs, self._finish(sequence, "undefined")]
            sequence.computed += 1  # the token before this one
            self.pool.learn(sequence.blocks, sequence.tokens, sequence.computed)
            self.pool.leave_behind(sequence.blocks, sequence.computed)
            outputs.append(self._append(sequence, choice, ()))
        return outputs

    def _append(self, sequence: Sequence, choice: Choice, prompt: tuple[TokenLogprob, ...]) -> Output:
        sequence.tokens.append(choice[0])
        self.tally.new_tokens += 1
        if choice[0] in self.limits.ends and not sequence.request.sampling.ignore_end:
            return self._finish(sequence, "stop", choice, prompt)
        if len(sequence.tokens) == sequence.last:
            return self._finish(sequence, "length", choice, prompt)
        return _output(sequence, None, choice, prompt)

    def _finish(
        self,
        sequence: Sequence,
        reason: Ending,
        choice: tuple[int | None, TokenLogprob | None] = NOTHING,
        prompt: tuple[TokenLogprob, ...] = (),
    ) -> Output:
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self.pool.close(sequence.blocks)
        if sequence.admitted is not None:
            self.expected.note_end(sequence)
        self.tally.finished += 1
        return _output(sequence, reason, choice, prompt)


def _output(
    sequence: Sequence,
    reason: Ending | None,
    choice: tuple[int | None, TokenLogprob | None] = NOTHING,
    prompt: tuple[TokenLogprob, ...] = (),
) -> Output:
    cached = sequence.cached
    admitted = sequence.admitted
    drafts = (sequence.drafted, sequence.accepted)
    return Output(sequence.request.id, *choice, reason, cached, admitted, prompt, *drafts)
