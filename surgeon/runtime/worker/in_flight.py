"""What ranks with stretches of a model do: each computes what comes from the rank before, and sends it on.

Rank 0 has the scheduler, embeds tokens, and goes on with other texts, or with what a coda drafts, while the others
compute (batching/in_flight.py). The last rank says which rows count, and chooses what comes behind them: where tokens
are drawn, with the random number of the place, as without drafts. What a rank finds waiting it computes in one pass, if
it has single tokens only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from surgeon.runtime.batching.blocks import BlockPool
from surgeon.runtime.batching.in_flight import ChosenToken, Flight, InFlight, Verdicts, latest
from surgeon.runtime.batching.limits import Limits
from surgeon.runtime.batching.request import Request
from surgeon.runtime.batching.scheduler import Output
from surgeon.runtime.batching.sequence import Row, ScheduledChunk, Wanted
from surgeon.runtime.comm.ring import Arrived, Ring
from surgeon.runtime.model.paged_cache import PagedCache
from surgeon.runtime.model.rank_model import Results
from surgeon.runtime.model.sampling import Sampler
from surgeon.runtime.model.stretch import StretchEngine
from surgeon.runtime.worker.messages import Account, Progress, Recorded, Report
from surgeon.runtime.worker.rank import Rank

SEED_BITS = 63


class News(NamedTuple):
    """From rank 0, with a pass: requests that are new, and those that have ended."""

    new: list[Request]
    ended: list[int]


class TrialAsked(NamedTuple):
    """From rank to rank: send an `Account`, with a trial of passes over so many texts of so many tokens."""

    report: Report
    texts: int
    tokens: int


class FlightLeader:
    """Rank 0's side of the work on some requests."""

    def __init__(self, engine: StretchEngine, cache: PagedCache, blocks: int, limits: Limits, ring: Ring) -> None:
        self.engine = engine
        self.cache = cache
        self.scheduler = InFlight(BlockPool(blocks, windows=cache.windows), limits)
        self._ring = ring
        self._random = Random()
        self._sampler = Sampler(engine.plan.vocabulary, engine.device)  # of what a coda drafts
        self._drawn = set[int]()  # requests of which tokens are drawn
        self._news = News([], [])
        self._releases = 0  # of blocks, when the newest pass was sent
        self._most, self._longest = 1, 2  # texts that ran together, and tokens of one

    def record_ahead(self) -> Iterator[Recorded]:
        """Nothing: passes are recorded when they come."""
        return iter(())

    def submit(self, request: Request) -> None:
        """Take a request, as `Scheduler.submit` does; without a seed it is given one, for drafts and model alike."""
        sampling = request.sampling
        if sampling.draws and sampling.seed is None:
            request = replace(request, sampling=replace(sampling, seed=self._random.getrandbits(SEED_BITS)))
        self.scheduler.submit(request)
        self._news.new.append(request)
        if not sampling.greedy:
            self._drawn.add(request.id)
            self._sampler.add(request)

    def cancel(self, request: int) -> Output | None:
        """End a request; None if it is not open."""
        output = self.scheduler.cancel(request)
        if output is not None:
            self._forget(output)
        return output

    def _forget(self, output: Output) -> None:
        self._news.ended.append(output.request)
        self._drawn.discard(output.request)
        self._sampler.remove(output.request)

    def step(self) -> list[Output]:
        """Take in what has arrived, and send a pass; waits only where there is none to send."""
        outputs = self._take_in(wait=False)
        chunks = self.scheduler.plan()
        if chunks:
            outputs += self._send(chunks)
        elif not outputs:
            outputs = self._take_in(wait=True)
        self.engine.counts.new += sum(output.token is not None for output in outputs)
        for output in outputs:
            if output.finish_reason is not None:
                self._forget(output)
        return outputs

    def _take_in(self, wait: bool) -> list[Output]:
        outputs: list[Output] = []
        while (arrived := self._ring.receive(wait and not outputs)) is not None:
            for answer in arrived.message:
                found = self.scheduler.arrived(answer)
                outputs += found
                if found and answer.request in self._drawn:
                    self._sampler.settle(answer.request, answer.choice)
        return outputs

    def _send(self, chunks: list[ScheduledChunk]) -> list[Output]:
        """Compute a pass, send it on, and draft behind it."""
        running = self.scheduler.running
        self._most = max(self._most, len(running))
        self._longest = max(self._longest, *(len(chunk.sequence.tokens) for chunk in chunks))
        rows = [chunk.row() for chunk in chunks]
        drafting = [chunk for chunk in chunks if self.scheduler.drafts_behind(chunk)]
        ends = torch.tensor([len(row.tokens) for row in rows]).cumsum(0) - 1
        stream, behind = self.engine.onward(rows, self.cache)
        releases, self._releases = self._releases, self.scheduler.pool.releases
        flight = Flight([chunk.sequence.request.id for chunk in chunks], rows, releases == self._releases)
        self._ring.send((flight, self._news), stream)
        self._news = News([], [])
        if behind is not None and drafting:
            asked = [at for at, chunk in enumerate(chunks) if chunk in drafting]
            self._draft([chunks[at] for at in asked], behind[ends[asked]])
        return self.scheduler.sent(chunks)

    def _draft(self, chunks: list[ScheduledChunk], behind: Tensor) -> None:
        """A token behind each chunk, by the stream behind the coda, (chunks, hidden)."""
        drawn = [at for at, chunk in enumerate(chunks) if chunk.wanted == Wanted.LOGITS]
        greedy = [at for at, chunk in enumerate(chunks) if chunk.wanted == Wanted.BEST]
        tokens = dict[int, int]()
        if greedy:
            # Any token, if the logits are not finite.
            best = (max(0, int(token)) for token in self.engine.drafted(behind[greedy], greedy=True))
            tokens |= zip(greedy, best, strict=True)
        if drawn:
            requests = [chunks[at].sequence.request.id for at in drawn]
            logits = self.engine.drafted(behind[drawn], greedy=False)
            tokens |= zip(drawn, self._sampler.draft(requests, logits), strict=True)
        for at, token in tokens.items():
            self.scheduler.add_draft(chunks[at].sequence, token)

    def progress(self, outputs: list[Output]) -> Progress:
        """What the starting process is told."""
        return Progress.of(outputs, self.scheduler, self.engine.figures)

    def report(self, message: Report) -> None:
        """Have all other ranks send an account, one after the other, each with a trial that nobody else disturbs."""
        self.engine.figures.alone = self.engine.alone(self._most, self._longest)
        self._ring.send((TrialAsked(message, self._most, self._longest), None))

    def end(self) -> None:
        self._ring.send((None, None))


def relay(rank: Rank, engine: StretchEngine, cache: PagedCache) -> None:
    """What all ranks but the first do: compute what comes, and send it on, until there is nothing more."""
    assert rank.ring is not None, "ranks with stretches are connected before they work"
    ring, last = rank.ring, engine.plan.predicts
    judge, waiting = Judge(engine, cache), Waiting(ring)
    while True:
        message, news, stream = waiting.next()
        if isinstance(message, Flight):
            assert news is not None
            assert stream is not None
            if last:
                if answers := judge.answers(message, news, stream):
                    ring.send(answers)
            else:
                engine.arrive(stream)
                ring.send((message, news), engine.onward(message.rows, cache)[0])
            engine.pause()
            continue
        if isinstance(message, TrialAsked):
            engine.figures.alone = engine.alone(message.texts, message.tokens)
            rank.notify(Account(message.report.ticket, rank.rank, engine.figures))
        if not last:
            ring.send((message, None))
        if message is None:
            return


class Waiting:
    """What has come to a rank and has not been computed."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._arrived: list[Arrived] = []

    def next(self) -> tuple[Flight | TrialAsked | None, News | None, Tensor | None]:
        """The next message, with its stream if it is a pass; passes with single tokens that have come are one."""
        while (arrived := self._ring.receive(wait=not self._arrived)) is not None:
            self._arrived.append(arrived)
        first = self._arrived[0].message[0]
        count = 1
        if isinstance(first, Flight) and first.joinable:
            while count < len(self._arrived) and self._joinable(self._arrived[count].message[0]):
                count += 1
        together, self._arrived = self._arrived[:count], self._arrived[count:]
        if not isinstance(first, Flight):
            return first, None, None
        news = [one.message[1] for one in together]
        if count == 1:
            return first, news[0], together[0].stream
        flight, kept = latest([one.message[0] for one in together])
        stream = torch.cat([one.stream for one in together if one.stream is not None])[kept]
        all_news = News([each for one in news for each in one.new], [each for one in news for each in one.ended])
        return flight, all_news, stream

    @staticmethod
    def _joinable(message: Flight | TrialAsked | None) -> bool:
        return isinstance(message, Flight) and message.joinable and message.follows


class Judge:
    """The last rank's side: it computes the rows that may count, and chooses what comes behind those that do."""

    def __init__(self, engine: StretchEngine, cache: PagedCache) -> None:
        self._engine, self._cache = engine, cache
        self._verdicts = Verdicts()
        self._sampler = Sampler(engine.plan.vocabulary, engine.device)

    def answers(self, flight: Flight, news: News, stream: Tensor) -> list[ChosenToken]:
        """What has been chosen, in order, by a pass with the stream, (tokens, hidden), before this rank's stretch."""
        for request in news.new:
            if not request.sampling.greedy:
                self._sampler.add(request)
        found = self._compute(flight, stream)
        for ended in news.ended:
            self._verdicts.end(ended)
            self._sampler.remove(ended)
        return found

    def _compute(self, flight: Flight, stream: Tensor) -> list[ChosenToken]:
        kept = self._may_count(flight)
        if not kept:
            return []
        requests, rows = [flight.requests[place] for place in kept], [flight.rows[place] for place in kept]
        if len(kept) < len(flight.rows):
            stream = torch.cat([stream.split([len(row.tokens) for row in flight.rows])[place] for place in kept])
        self._engine.arrive(stream)
        results = self._engine.step(rows, self._cache)
        return self._chosen(requests, rows, results)

    def _may_count(self, flight: Flight) -> list[int]:
        """The places of rows that count, or will if those before them of the same text are followed by their tokens."""
        ends, kept = dict[int, int](), list[int]()
        for place, (request, row) in enumerate(zip(flight.requests, flight.rows, strict=True)):
            if ends.get(request) == row.start or (request not in ends and self._verdicts.counts(request, row)):
                ends[request] = row.start + len(row.tokens)
                kept.append(place)
        return kept

    def _chosen(self, requests: list[int], rows: list[Row], results: Results) -> list[ChosenToken]:
        """The token behind each row that counts; whether a text's row does, the token behind the one before says."""
        number = {Wanted.NOTHING: 0, Wanted.BEST: 0, Wanted.LOGITS: 0}
        left: list[tuple[int, Row, int]] = []  # with the row's number among those that want the same
        for request, row in zip(requests, rows, strict=True):
            left.append((request, row, number[row.wanted]))
            number[row.wanted] += 1
        answers: list[ChosenToken] = []
        while left:
            first = {request: (row, at) for request, row, at in reversed(left)}
            void = {request for request, (row, _) in first.items() if not self._verdicts.counts(request, row)}
            left = [one for one in left if one[0] not in void and one[1] is not first[one[0]][0]]
            asking = [
                (request, *one)
                for request, one in first.items()
                if request not in void and self._verdicts.asks(request, one[0])
            ]
            newest = [
                ChosenToken(request, row.start + len(row.tokens), (results.best[at], None))
                for request, row, at in asking
                if row.wanted == Wanted.BEST
            ]
            drawn = [(request, row, at) for request, row, at in asking if row.wanted == Wanted.LOGITS]
            if drawn and results.logits is not None:
                chosen = self._sampler.choose([one[0] for one in drawn], results.logits[[one[2] for one in drawn]])
                places = (row.start + len(row.tokens) for _, row, _ in drawn)
                newest += map(ChosenToken, (one[0] for one in drawn), places, chosen)
            for answer in newest:
                self._verdicts.choose(answer)
            answers += newest
        return answers
