"""Ranks with stretches of a model: each computes what comes from the rank before, and sends it on.

Rank 0 has the scheduler, embeds tokens, and goes on with other texts, or with a coda's drafts, while the others compute
(batching/in_flight.py). The last rank sends the stream back to it, by which it chooses tokens. Streams of the first
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

from surgeon.processes.sockets import address_of, watch_over
from surgeon.runtime.batching.blocks import BlockPool
from surgeon.runtime.batching.in_flight import InFlight
from surgeon.runtime.batching.request import Choice
from surgeon.runtime.batching.scheduler import Limits, Output
from surgeon.runtime.batching.sequence import Row, ScheduledChunk, Wanted, asked_of
from surgeon.runtime.batching.sequence import Sequence as Text
from surgeon.runtime.batching.windows import Windows
from surgeon.runtime.comm.collectives import Alone
from surgeon.runtime.comm.pipes import Ring
from surgeon.runtime.model.dynamic import DynamicPasses
from surgeon.runtime.model.engine import RankEngine
from surgeon.runtime.model.paged_cache import PagedCache
from surgeon.runtime.model.rank_model import Results
from surgeon.runtime.plan.memory import cache_groups
from surgeon.runtime.plan.specification import Plan
from surgeon.runtime.worker.leader import Account, Leader, Report
from surgeon.runtime.worker.rank import Rank
from surgeon.runtime.worker.ranks import Ranks

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


ROWS = 1024  # of tokens, whose stream lies always in the same memory, which recorded passes have the address of


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
    def onward(self, rows: list[Row], cache: PagedCache, stream: Tensor | None = None) -> tuple[Tensor, Tensor]:
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

    def __init__(self, engine: StretchEngine, cache: PagedCache, blocks: int, limits: Limits, ring: Ring) -> None:
        super().__init__(engine, cache, blocks, limits, ring)
        self.scheduler = InFlight(BlockPool(blocks, windows=cache.windows), limits, engine.model.coda is not None)
        self._ring = ring
        self._flights = deque[tuple[list[Text], list[Row]]]()  # passes on their way: whose rows, and these

    def step(self) -> list[Output]:
        """Send a pass, or take in the oldest one where as many are on their way as may be, or none is to be sent."""
        if len(self._flights) < self.scheduler.limits.stretches:
            chunks = self.scheduler.plan()
        else:
            chunks = []
        if chunks:
            outputs = self._send(chunks)
        else:
            outputs = self._take_in()
        self._note(outputs)
        return outputs

    def _send(self, chunks: list[ScheduledChunk]) -> list[Output]:
        """Compute a pass, send it on, and draft behind it."""
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
