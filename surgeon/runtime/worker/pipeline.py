"""What ranks with stretches of a model do: each computes what comes from the rank before, and sends it on.

Rank 0 has the scheduler, embeds tokens, and goes on with other texts, or with what a coda drafts, while the others
compute (batching/in_flight.py). The last rank sends the stream back to it, by which it chooses tokens as any rank 0
does. Passes come back in the order in which they were sent, and as many are on their way as there are ranks.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterator
from itertools import accumulate
from multiprocessing.connection import Listener
from typing import NamedTuple

from surgeon.runtime.batching.blocks import BlockPool
from surgeon.runtime.batching.in_flight import InFlight
from surgeon.runtime.batching.scheduler import Limits, Output
from surgeon.runtime.batching.sequence import Row, ScheduledChunk, Sequence, Wanted, asked_of
from surgeon.runtime.comm.ring import Address, Ring, joined, listener
from surgeon.runtime.model.paged_cache import PagedCache
from surgeon.runtime.model.stretch import StretchEngine
from surgeon.runtime.worker.leader import Leader
from surgeon.runtime.worker.messages import Account, Recorded, Report
from surgeon.runtime.worker.rank import Rank
from surgeon.runtime.worker.ranks import Ranks

LISTENER = "listener"


def connect(ranks: Ranks) -> None:
    """Connect each rank to the next one, and the last one to the first, by the options' link."""
    secret = secrets.token_bytes(32)
    addresses = ranks.call(listen, secret)
    ranks.call(join, addresses, secret)


def listen(rank: Rank, secret: bytes) -> Address:
    """Runs on a rank: begin to listen; where."""
    listening = listener(rank.settings.location.interface, secret)
    rank.engines[LISTENER] = listening
    address: Address = listening.address
    return address


def join(rank: Rank, addresses: list[Address], secret: bytes) -> None:
    """Runs on a rank that listens: connect."""
    listening: Listener = rank.engines.pop(LISTENER)
    rank.ring = joined(rank.rank, addresses, listening, secret, rank.settings.options.link)


class Flight(NamedTuple):
    """A pass on its way: rows, and whose they are."""

    texts: list[Sequence]
    rows: list[Row]


class PipelineLeader(Leader):
    """Rank 0's side of the work on some requests."""

    engine: StretchEngine
    scheduler: InFlight

    def __init__(self, engine: StretchEngine, cache: PagedCache, blocks: int, limits: Limits, ring: Ring) -> None:
        super().__init__(engine, cache, blocks, limits, ring)
        self.scheduler = InFlight(BlockPool(blocks, windows=cache.windows), limits, engine.coda is not None)
        self._ring = ring
        self._flights = deque[Flight]()

    def record_ahead(self, seconds: float = 0.0) -> Iterator[Recorded]:  # noqa: ARG002 - passes are computed as they come
        """Nothing."""
        return iter(())

    def step(self) -> list[Output]:
        """Send a pass, or take in the oldest one where as many are on their way as may be, or none is to be sent."""
        if len(self._flights) < self.scheduler.limits.stretches:
            chunks = self.scheduler.plan()
        else:
            chunks = []
        outputs = self._send(chunks) if chunks else self._take_in()
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
        self._flights.append(Flight([chunk.sequence for chunk in chunks], rows))
        outputs = self.scheduler.sent(chunks)
        if drafting:
            for sequence, token in zip(drafting, self.engine.drafted(behind[places]), strict=True):
                self.scheduler.add_draft(sequence, token)
        return outputs

    def _take_in(self) -> list[Output]:
        """The next tokens of the texts of the oldest pass, but of those rows that do not count."""
        flight = self._flights.popleft()
        _, stream = self._ring.receive()
        assert stream is not None, "every pass brings a stream"
        results = self.engine.results(stream, flight.rows)
        best = iter(results.best)
        drawn = iter(() if results.logits is None else results.logits.split(1))
        outputs = list[Output]()
        for text, row in zip(flight.texts, flight.rows, strict=True):
            counts = self.scheduler.counts(text, row)
            if row.wanted == Wanted.BEST:
                token = next(best)
                if counts:
                    outputs.append(self.scheduler.arrived(text, (token, None)))
            elif row.wanted == Wanted.LOGITS:
                logits = next(drawn)
                if counts:
                    outputs.append(self.scheduler.arrived(text, self._sampler.choose([text.request.id], logits)[0]))
        return outputs

    def end(self) -> None:
        """Take in what is on its way of texts that have ended, and end the other ranks' work."""
        while self._flights:
            self._take_in()
        super().end()


def relay(rank: Rank, engine: StretchEngine, cache: PagedCache) -> None:
    """What all ranks but the first do: compute what comes, and send it on, until there is nothing more."""
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
