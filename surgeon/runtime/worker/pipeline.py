"""Ranks with stretches of a model: each computes what comes from the rank before, and sends it on.

Rank 0 has the scheduler, embeds tokens, and goes on with other texts, or with a coda's drafts, while the others compute
(`InFlight`). The last rank sends the stream back to it, by which it chooses tokens. Streams of the first
rank's stretch pass through the layers of its coda as well, so that both have cached the same tokens.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from multiprocessing.connection import Client, Listener

import torch
from torch import Tensor

from surgeon.processes.torchrun import address_of, watch_over
from surgeon.runtime.batching.blocks import BlockPool, Windows
from surgeon.runtime.batching.request import UNDEFINED, Choice, Row, ScheduledChunk, Wanted, asked_of
from surgeon.runtime.batching.request import Sequence as Text
from surgeon.runtime.batching.scheduler import Limits, Output, Scheduler
from surgeon.runtime.comm.collectives import Alone
from surgeon.runtime.comm.pipes import Ring
from surgeon.runtime.model.engine import RankEngine
from surgeon.runtime.model.paged_cache import PagedCache
from surgeon.runtime.model.rank_model import DynamicPasses, Results
from surgeon.runtime.plan.memory import cache_groups
from surgeon.runtime.plan.specification import Plan
from surgeon.runtime.worker.leader import Account, Leader, Report
from surgeon.runtime.worker.rank import Rank
from surgeon.runtime.worker.ranks import Ranks


class InFlight(Scheduler):
    """Open requests whose passes follow one another: `plan` and `sent` are called in turn, `arrived` at any time.

    Args:
        drafts: whether a coda drafts.
    """

    def __init__(self, pool: BlockPool, limits: Limits, drafts: bool) -> None:
        super().__init__(pool, limits)
        self._drafts = drafts

    @property
    def window(self) -> int:
        """The number of tokens of a text that may be on their way."""
        if self._drafts:
            return -(-self.limits.stretches // max(1, len(self.running)))
        return 1

    def _continue_sequences(self) -> list[ScheduledChunk]:
        """The next texts that lack one token, with blocks for it; those whose next token is known come first."""
        ready = [
            one
            for one in self.running
            if len(one.tokens) - one.computed == 1 and one.unverified < self.window
        ]
        ready.sort(key=lambda sequence: sequence.unverified)
        chunks: list[ScheduledChunk] = []
        for sequence in ready[: -(-len(self.running) // self.limits.stretches)]:
            length = len(sequence.tokens)
            if sequence.unverified and self.pool.lacking(sequence.blocks, length) > self.pool.free:
                continue  # nobody is preempted for a draft
            if sequence not in self.running or not self._make_room(sequence, length):
                break
            chunks.append(ScheduledChunk(sequence, 1))
        return [chunk for chunk in chunks if chunk.sequence in self.running]

    def _put_back(self, sequence: Text) -> None:
        sequence.take_unverified()
        super()._put_back(sequence)

    def drafts_behind(self, chunk: ScheduledChunk) -> bool:
        """Tell whether a draft is to follow a planned chunk's last token."""
        sequence = chunk.sequence
        goes_on = len(sequence.tokens) < self._longest(sequence)
        return self.window > 1 and chunk.wanted == Wanted.BEST and goes_on

    def sent(self, chunks: Sequence[ScheduledChunk]) -> list[Output]:
        """Note that a planned pass is on its way; texts to which nothing is added end with it."""
        outputs: list[Output] = []
        for chunk in chunks:
            sequence = chunk.sequence
            ends = chunk.completes and not sequence.wanted
            sequence.computed += chunk.tokens
            self._share(sequence)
            if ends:
                outputs.append(self._finish(sequence, "length"))
        return outputs

    def counts(self, sequence: Text, row: Row) -> bool:
        """Tell whether a row brings the next token of its text: it ends with the newest certain one.

        One of another draft's place ends elsewhere, or has another token there; passes arrive in their order.
        """
        end = row.end
        is_open = sequence in self.running or sequence in self.waiting
        return is_open and end == sequence.known and sequence.tokens[row.start : end] == row.tokens

    def arrived(self, sequence: Text, choice: Choice) -> Output:
        """Take the next token of a text."""
        computed = sequence.computed
        drafts = sequence.take_unverified()
        if choice[0] == UNDEFINED:
            self.pool.forget(sequence.blocks)  # nobody shares what predicts nothing
            return self._finish(sequence, "undefined")
        right = drafts[:1] == [choice[0]]
        for counted in (sequence, self.tally):
            counted.drafted += bool(drafts)
            counted.accepted += right
        output = self._append(sequence, choice, ())
        if output.finish_reason is not None:
            return output
        if right:
            sequence.tokens += drafts[1:]
            sequence.unverified = len(drafts) - 1
            sequence.computed = computed
        if sequence in self.running:
            self._share(sequence)
        return output

    def _share(self, sequence: Text) -> None:
        """Let others share what is certain of a sequence, and give back what no window of it reaches."""
        computed = min(sequence.computed, sequence.known)
        self.pool.learn(sequence.blocks, sequence.tokens, computed)
        self.pool.leave_behind(sequence.blocks, computed)


LISTENER = "listener"


def connect(ranks: Ranks) -> None:
    """Connect each rank to the next one, and the last one to the first, by the options' link."""
    secret = secrets.token_bytes(32)
    addresses = ranks.call(listen, secret)
    ranks.call(join, addresses, secret)


def listen(rank: Rank, secret: bytes) -> str | tuple[str, int]:
    """On a rank: listen for the one before, at a file of this machine or a port of the network interface."""
    interface = rank.settings.location.interface
    if interface is None:
        listening = Listener(family="AF_UNIX", authkey=secret)
    else:
        listening = Listener((address_of(interface), 0), family="AF_INET", authkey=secret)
    rank.engines[LISTENER] = listening
    address: str | tuple[str, int] = listening.address
    return address


def join(rank: Rank, addresses: list[str | tuple[str, int]], secret: bytes) -> None:
    """On a rank that listens: connect; rank 0 is connected to before it connects, so that all get on."""
    following = addresses[(rank.rank + 1) % len(addresses)]
    with rank.engines.pop(LISTENER) as listening:
        if rank.rank:
            onward = Client(following, authkey=secret)
        inward = listening.accept()
        if not rank.rank:
            onward = Client(following, authkey=secret)
    for connection in (onward, inward) if isinstance(following, tuple) else ():
        with socket.socket(fileno=os.dup(connection.fileno())) as connected:
            watch_over(connected)
    rank.ring = Ring(onward, inward, rank.settings.options.link)


# Rows of the stream's buffer, whose address recorded passes hold.
ROWS = 1024


class StretchEngine(RankEngine):
    """One rank's engine of a model whose ranks have stretches of its program.

    Attributes:
        is_last: whether the next rank is the first one, which asks for some places of the stream only.
    """

    def __init__(self, plan: Plan, rank: int, device: torch.device) -> None:
        super().__init__(plan.of_rank(rank)[0], Alone(), device)
        self.is_last = rank == plan.ranks - 1
        groups = cache_groups(plan)
        self._division = groups.slots[rank], groups.windows
        self._fixed = self.model.vocabulary.like.new_empty(ROWS if rank else 0, plan.hidden)

    def cache_division(self) -> tuple[Sequence[int], Windows]:
        """The division of the whole model, whose texts have the same blocks on all ranks."""
        return self._division

    @torch.inference_mode()
    def onward(
        self, rows: list[Row], cache: PagedCache, stream: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute one pass, which extends the cache; the first rank embeds its tokens, others are given a stream.

        Returns the stream behind this rank's stretch and that behind the coda, (tokens, hidden) each, the latter
        without numbers where there is no coda; the next pass overwrites both.
        """
        tokens = sum(len(row.tokens) for row in rows)
        way = self._way(rows) if tokens <= ROWS else self.ways[-1]
        if stream is not None:
            self.model.arriving = self._fixed[:tokens].copy_(stream) if tokens <= ROWS else stream
        with self._count(self._phase(rows), rows):
            found = way.logits(rows, cache)
        return found[:, : self.plan.hidden], found[:, self.plan.hidden :]

    @torch.inference_mode()
    def results(self, stream: Tensor, rows: list[Row]) -> Results:
        """Choose by the stream behind the whole program at the places that rows ask for, (places, hidden)."""
        return DynamicPasses(self.model).results(stream, rows, asked_of(rows))

    @torch.inference_mode()
    def drafted(self, behind: Tensor) -> list[int]:
        """The likeliest tokens by the stream behind the coda, (rows, hidden); any where the logits are not finite."""
        assert self.model.coda is not None, "only a coda drafts"
        best = self.model.coda.vocabulary.best(self.model.coda.logits(behind))
        return [max(0, int(token)) for token in best]


class PipelineLeader(Leader):
    """Rank 0's side of the work on some requests, in a pipeline."""

    engine: StretchEngine
    scheduler: InFlight

    def __init__(
        self, engine: StretchEngine, cache: PagedCache, blocks: int, limits: Limits, ring: Ring
    ) -> None:
        super().__init__(engine, cache, blocks, limits, ring)
        self.scheduler = InFlight(
            BlockPool(blocks, windows=cache.windows), limits, engine.model.coda is not None
        )
        self._ring = ring
        # Passes on their way: whose rows, and these.
        self._flights = deque[tuple[list[Text], list[Row]]]()

    def step(self) -> list[Output]:
        """Send a pass, or take in the oldest one where as many are on their way as may be, or none is to be sent."""
        chunks = list[ScheduledChunk]()
        if len(self._flights) < self.scheduler.limits.stretches:
            chunks = self.scheduler.plan()
        if not chunks:
            outputs = self._take_in()
            self._note(outputs)
            return outputs
        rows = [row for chunk in chunks for row in chunk.rows()]
        drafting = [chunk.sequence for chunk in chunks if self.scheduler.drafts_behind(chunk)]
        ends = accumulate(len(row.tokens) for row in rows)
        places = [end - 1 for end, chunk in zip(ends, chunks, strict=True) if chunk.sequence in drafting]
        stream, behind = self.engine.onward(rows, self.cache)
        self._ring.send(rows, stream)
        self._flights.append(([chunk.sequence for chunk in chunks], rows))
        outputs = self.scheduler.sent(chunks)
        if drafting:
            for sequence, token in zip(drafting, self.engine.drafted(behind[places]), strict=True):
                sequence.tokens.append(token)
                sequence.unverified += 1
        self._note(outputs)
        return outputs

    def _take_in(self) -> list[Output]:
        """Take the next tokens of the texts of the oldest pass, but of those rows that do not count."""
        texts, rows = self._flights.popleft()
        _, stream = self._ring.receive()
        results = self.engine.results(stream, rows)
        best = iter(results.best)
        drawn = iter(() if results.logits is None else results.logits.split(1))
        outputs = list[Output]()
        for text, row in zip(texts, rows, strict=True):
            choice: Choice = (0, None)
            counts = self.scheduler.counts(text, row)
            if row.wanted == Wanted.BEST:
                choice = (next(best), None)
            elif row.wanted == Wanted.LOGITS:
                logits = next(drawn)
                if counts:
                    choice = self._sampler.choose([text.request.id], logits)[0]
            if counts and row.wanted != Wanted.NOTHING:
                outputs.append(self.scheduler.arrived(text, choice))
        return outputs

    def end(self) -> None:
        """Take in the passes of texts that have ended, and end the other ranks' work."""
        while self._flights:
            self._take_in()
        super().end()


def relay(rank: Rank, engine: StretchEngine, cache: PagedCache) -> None:
    """Compute what comes, and send it on, until there is nothing more: the work of all ranks but the first."""
    assert rank.ring is not None, "ranks with stretches are connected before they work"
    last = engine.is_last
    while True:
        message, stream = rank.ring.receive()
        if isinstance(message, list):
            stream, _ = engine.onward(message, cache, stream)
            rank.ring.send(message, stream[asked_of(message).places] if last else stream)
            engine.pause()
            continue
        if isinstance(message, Report):
            rank.notify(Account(message.ticket, rank.rank, engine.figures))
        if not last:
            rank.ring.send(message)
        if message is None:
            return
