"""The ranks' work while a model answers requests: rank 0 plans each pass, and all compute it together.

Before every pass rank 0 looks for messages of the starting process, plans, and sends the rows to the other ranks, which
know nothing but those. Tokens are chosen on rank 0 and go to the others as part of the next rows. Results of each pass
are sent to the starting process in one message.

In a pipeline ranks have stretches of a model: each computes what comes from the rank before, and sends it on. Rank 0
has the scheduler, embeds tokens, and goes on with other texts, or with a coda's drafts, while the others compute
(`InFlight`). The last rank sends the stream back to it, by which it chooses tokens. Streams of the first
rank's stretch pass through the layers of its coda as well, so that both have cached the same tokens.
"""

from __future__ import annotations

import gc
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import accumulate, islice, takewhile
from multiprocessing.connection import Client, Listener
from operator import eq
from typing import NamedTuple

import torch
from torch import Tensor

from surgeon.processes.children import Pulse
from surgeon.processes.torchrun import address_of, watch_over
from surgeon.runtime.batching.blocks import BlockPool
from surgeon.runtime.batching.request import (
    UNDEFINED,
    Choice,
    Request,
    Row,
    ScheduledChunk,
    Wanted,
    asked_of,
)
from surgeon.runtime.batching.request import Sequence as Text
from surgeon.runtime.batching.scheduler import Limits, Output, Scheduler
from surgeon.runtime.comm.collectives import Alone
from surgeon.runtime.model.engine import Figures, RankEngine
from surgeon.runtime.model.paged_cache import PagedCache
from surgeon.runtime.model.rank_model import DynamicPasses, Results
from surgeon.runtime.model.sampling import Sampler
from surgeon.runtime.plan.memory import cache_groups
from surgeon.runtime.plan.specification import Plan
from surgeon.runtime.worker.rank import Rank, Ring, Sender
from surgeon.runtime.worker.ranks import Ranks


class Cancel(NamedTuple):
    """To rank 0: end a request."""

    request: int


class Report(NamedTuple):
    """To every rank: send an `Account`."""

    ticket: int


class Progress(NamedTuple):
    """From rank 0, at the start and after every pass and cancellation.

    Attributes:
        stats: the fields of `Stats`, in their order.
    """

    outputs: list[Output]
    stats: tuple[int, ...]


class Account(NamedTuple):
    """From a rank: what its passes have cost."""

    ticket: int
    rank: int
    figures: Figures


RECORDING_SECONDS = 60.0
# That passes at once may take: for so long neither new requests nor cancellations are heard of.
AT_ONCE_SECONDS = 0.01


class Leader:
    """Rank 0's side of the work on some requests."""

    def __init__(
        self, engine: RankEngine, cache: PagedCache, blocks: int, limits: Limits, sender: Sender | Ring
    ) -> None:
        self.engine = engine
        self.cache = cache
        draft = engine.plan.draft
        catches_up = draft is not None and draft.keeps_own
        self.scheduler = Scheduler(BlockPool(blocks, windows=cache.windows), limits, catches_up)
        self.sender = sender
        # Used where the likeliest token is not enough.
        self._sampler = Sampler(engine.plan.vocabulary, engine.device)
        self._pass_seconds = AT_ONCE_SECONDS  # of the newest pass

    def record_ahead(self, seconds: float = RECORDING_SECONDS) -> None:
        """Record passes that texts will come to, as many as the seconds suffice for; the rest when they come."""
        most = self.scheduler.limits.max_batch
        passes = [rows for way in self.engine.ways for rows in way.passes_to_record(self.cache, most)]
        end = time.monotonic() + seconds
        for rows in passes:
            if time.monotonic() > end:
                return
            self.sender.send(("record_ahead", rows))
            self.engine.record_ahead(rows, self.cache)

    def submit(self, request: Request) -> None:
        self.scheduler.submit(request)
        if not request.sampling.greedy:
            self._sampler.add(request)

    def cancel(self, request: int) -> Output | None:
        """End a request; None if it is not open."""
        self._sampler.remove(request)
        return self.scheduler.cancel(request)

    def step(self) -> list[Output]:
        """Compute one pass on all ranks, after the passes that draft tokens for it, or several passes at once."""
        began = time.perf_counter()
        chunks = self.scheduler.plan()
        most = min(self.scheduler.limits.at_once, int(AT_ONCE_SECONDS / self._pass_seconds))
        passes = self.scheduler.passes_at_once(chunks, most) if most > 1 else 1
        if passes > 1:
            rows = [row for chunk in chunks for row in chunk.rows()]
            self.sender.send(("several", rows, passes))
            by_pass = self.engine.several(rows, passes, self.cache)
            self._pass_seconds = (time.perf_counter() - began) / passes
            by_text = zip(*by_pass, strict=True)
            outputs = self.scheduler.advance(
                chunks, [[(token, None) for token in text] for text in by_text]
            )
            self._note(outputs)
            return outputs
        planned = time.perf_counter() - began  # with what is drafted, which may take long to choose
        if self.scheduler.limits.looked_up:
            chunks, drafts = self._look_up(chunks)
        else:
            drafts = self._draft(chunks)
        began = time.perf_counter() - planned
        rows = [
            row for chunk, drafted in zip(chunks, drafts, strict=True) for row in chunk.rows(drafted)
        ]
        self.sender.send(("step", rows))
        results = self.engine.step(rows, self.cache)
        self._pass_seconds = time.perf_counter() - began
        chosen = self._choose(chunks, drafts, results)
        if self.scheduler.ahead is not None:
            tokens = sum(len(row.tokens) for row in rows)
            seconds = time.perf_counter() - began
            if all(row.continues for row in rows):
                self.scheduler.ahead.note_pass(tokens, seconds)
            else:
                self.scheduler.ahead.prompts.note(tokens, seconds)
        outputs = self.scheduler.advance(chunks, chosen, results.scores)
        self._note(outputs)
        return outputs

    def _note(self, outputs: list[Output]) -> None:
        self.engine.model.peers.counts.new += sum(output.token is not None for output in outputs)
        for output in outputs:
            if output.finish_reason is not None:
                self._sampler.remove(output.request)

    def _draft(self, chunks: list[ScheduledChunk]) -> list[list[int]]:
        """Draft tokens for each chunk; none for most, or those with the most of them come first.

        A draft with keys of its own has a pass of chunks that only make up for what it has missed.
        """
        drafts: list[list[int]] = [[] for _ in chunks]
        passes = [chunk.drafts or int(chunk.missed > 0) for chunk in chunks]
        for number in range(max(passes, default=0)):
            going = [place for place, most in enumerate(passes) if most > number]
            began = time.perf_counter()
            rows = [row for place in going for row in chunks[place].drafting_rows(drafts[place])]
            self.sender.send(("draft", rows))
            results = self.engine.draft(rows, self.cache)
            asking = [place for place in going if chunks[place].drafts > number]
            drawn = [chunks[place] for place in asking if chunks[place].wanted == Wanted.LOGITS]
            tokens = {
                # Any token, if the logits are not finite.
                Wanted.BEST: iter(max(0, token) for token in results.best),
                Wanted.LOGITS: iter(
                    () if results.logits is None else self._sampler.draft(ids(drawn), results.logits)
                ),
            }
            for place in asking:
                drafts[place].append(next(tokens[chunks[place].wanted]))
            if (ahead := self.scheduler.ahead) is not None:
                count = sum(len(row.tokens) for row in rows)
                seconds = time.perf_counter() - began
                if count == len(rows):
                    ahead.note_draft(count, seconds)
                else:
                    ahead.note_missed(count, seconds)
        return drafts

    def _look_up(self, chunks: list[ScheduledChunk]) -> tuple[list[ScheduledChunk], list[list[int]]]:
        """Look up drafts in the chunks' own texts, and give the chunks with as many as were found."""
        began = time.perf_counter()
        drafts = [
            chunk.sequence.lookup.drafts(chunk.sequence.tokens, chunk.drafts) if chunk.drafts else []
            for chunk in chunks
        ]
        for chunk, found in zip(chunks, drafts, strict=True):
            if chunk.wanted == Wanted.LOGITS:
                self._sampler.offer(chunk.sequence.request.id, found)
        if self.scheduler.ahead is not None and any(drafts):
            self.scheduler.ahead.note_draft(len(chunks), time.perf_counter() - began)
        return [
            chunk._replace(drafts=len(found)) for chunk, found in zip(chunks, drafts, strict=True)
        ], drafts

    def _choose(
        self, chunks: list[ScheduledChunk], drafts: list[list[int]], results: Results
    ) -> list[list[Choice]]:
        """Choose the next tokens of every chunk that wants one: the right drafts, and one more.

        UNDEFINED where the logits are not finite.
        """
        likeliest = iter(results.best)
        judged = iter(list[list[Choice]]())
        if results.logits is not None:
            wanting = (chunk for chunk in chunks if chunk.wanted == Wanted.LOGITS)
            judged = iter(self._sampler.judge(ids(wanting), results.logits))
        chosen: list[list[Choice]] = []
        for chunk, drafted in zip(chunks, drafts, strict=True):
            if chunk.wanted == Wanted.BEST:
                best = list(islice(likeliest, len(drafted) + 1))
                right = takewhile(bool, map(eq, best, drafted))
                chosen.append([(token, None) for token in best[: sum(right) + 1]])
            elif chunk.wanted == Wanted.LOGITS:
                chosen.append(next(judged))
        return chosen

    def progress(self, outputs: list[Output]) -> Progress:
        """Report to the starting process."""
        figures = self.engine.figures
        scheduler = self.scheduler
        phases = figures.prefill, figures.decode, figures.drafting
        tally = scheduler.tally
        tally.running = len(scheduler.running)
        tally.waiting = len(scheduler.waiting)
        tally.blocks = scheduler.pool.blocks
        tally.free_blocks = scheduler.pool.free
        tally.passes = sum(phase.passes for phase in phases)
        tally.drafting_passes = figures.drafting.passes
        return Progress(outputs, tuple(vars(tally).values()))  # a copy, in the shortest form

    def end(self) -> None:
        self.sender.send(None)


def ids(chunks: Iterable[ScheduledChunk]) -> list[int]:
    """The ids of their requests."""
    return [chunk.sequence.request.id for chunk in chunks]


class InFlight(Scheduler):
    """Open requests whose passes follow one another: `plan` and `note_sent` in turn, `take_next` at any time.

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
            if sequence.unverified and self.pool.count_lacking(sequence.blocks, length) > self.pool.free:
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

    def note_sent(self, chunks: Sequence[ScheduledChunk]) -> list[Output]:
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
        return (
            is_open and end == sequence.known_tokens and sequence.tokens[row.start : end] == row.tokens
        )

    def take_next(self, sequence: Text, choice: Choice) -> Output:
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
        computed = min(sequence.computed, sequence.known_tokens)
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
        # That of the whole model, whose texts have the same blocks on all ranks.
        groups = cache_groups(plan)
        self.division = groups.slots[rank], groups.windows
        self._fixed = self.model.vocabulary.like.new_empty(ROWS if rank else 0, plan.hidden)

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
        return DynamicPasses(self.model).results(stream, rows)

    @torch.inference_mode()
    def draft_tokens(self, behind: Tensor) -> list[int]:
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
        outputs = self.scheduler.note_sent(chunks)
        if drafting:
            for sequence, token in zip(drafting, self.engine.draft_tokens(behind[places]), strict=True):
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
                outputs.append(self.scheduler.take_next(text, choice))
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
            rank.ring.send(message, stream[asked_of(message)] if last else stream)
            engine.pause()
            continue
        if isinstance(message, Report):
            rank.notify(Account(message.ticket, rank.rank, engine.figures))
        if not last:
            rank.ring.send(message)
        if message is None:
            return


ENGINE = "engine"  # the name under which a rank keeps the engine of a single model


def load(rank: Rank, plan: Plan, name: str = ENGINE) -> None:
    """On a rank: load its slices of a model, and keep the engine under a name."""
    engine: RankEngine | StretchEngine
    if plan.stretches:
        engine = StretchEngine(plan, rank.rank, rank.device)
    else:
        engine = RankEngine(plan, rank.collectives, rank.device, rank.engines.values())
    keep(rank, name, engine)


def keep(rank: Rank, name: str, engine: RankEngine) -> None:
    """Keep an engine under a name on its rank, and spare passes the walks of Python's garbage collector through it."""
    if name in rank.engines:
        unload(rank, name)
    rank.engines[name] = engine
    gc.collect()
    gc.freeze()


def unload(rank: Rank, name: str = ENGINE) -> None:
    """On a rank: forget an engine."""
    del rank.engines[name]
    gc.unfreeze()  # an engine refers to itself, and is looked for among all that there is
    gc.collect()
    gc.freeze()


def forget_cache(rank: Rank, name: str = ENGINE) -> None:
    """On a rank: give back what an engine keeps for the next texts."""
    engine: RankEngine = rank.engines[name]
    engine.forget_cache()


def complete(
    rank: Rank,
    requests: list[Request],
    blocks: int,
    limits: Limits,
    name: str = ENGINE,
    grouped: bool = False,
) -> tuple[list[Output], Figures]:
    """On a rank: work on some requests until all have ended; rank 0 sends the progress, and returns all outputs."""
    engine: RankEngine = rank.engines[name]
    engine.figures = Figures()
    engine.pause()
    cache = engine.reusable_cache(blocks, grouped)
    if rank.rank:
        follow(rank, engine, cache)
        return [], engine.figures
    leader = leader_of(rank, engine, cache, blocks, limits)
    for request in requests:
        leader.submit(request)
    outputs: list[Output] = []
    while not leader.scheduler.idle:
        outputs += (newest := leader.step())
        rank.notify(leader.progress(newest))
    leader.end()
    return outputs, engine.figures


def serve(rank: Rank, blocks: int, limits: Limits, pulse_seconds: float) -> None:
    """On a rank, for ever: work on the requests that the starting process sends."""
    engine: RankEngine = rank.engines[ENGINE]
    cache = engine.new_cache(blocks, limits.max_batch * (1 + limits.draft_tokens), grouped=True)

    def pulse() -> None:  # whatever this rank is doing
        with suppress(OSError):  # the starting process has gone, and this one is about to
            while True:
                rank.notify(Pulse(rank.rank, engine.model.program.passes))
                time.sleep(pulse_seconds)

    threading.Thread(target=pulse, daemon=True).start()
    if rank.rank:
        follow(rank, engine, cache)
        return
    leader = leader_of(rank, engine, cache, blocks, limits)
    leader.record_ahead()
    inbox = rank.inbox()
    rank.notify(leader.progress([]))  # from here on, what is posted goes to the inbox
    while True:
        if leader.scheduler.idle:
            engine.pause()
            _obey(rank, leader, inbox.get())
        while not inbox.empty():
            _obey(rank, leader, inbox.get())
        if not leader.scheduler.idle:
            rank.notify(leader.progress(leader.step()))


def leader_of(rank: Rank, engine: RankEngine, cache: PagedCache, blocks: int, limits: Limits) -> Leader:
    """Make rank 0's side of the work."""
    if isinstance(engine, StretchEngine):
        assert rank.ring is not None, "ranks with stretches are connected before they work"
        return PipelineLeader(engine, cache, blocks, limits, rank.ring)
    return Leader(engine, cache, blocks, limits, rank.sender)


def _obey(rank: Rank, leader: Leader, message: Request | Cancel | Report) -> None:
    if isinstance(message, Request):
        leader.submit(message)
    elif isinstance(message, Cancel):
        if output := leader.cancel(message.request):
            rank.notify(leader.progress([output]))
    else:
        leader.sender.send(message)
        rank.notify(Account(message.ticket, rank.rank, leader.engine.figures))


def follow(rank: Rank, engine: RankEngine, cache: PagedCache) -> None:
    """Compute the rows that rank 0 sends, until there is nothing more: the work of all other ranks."""
    if isinstance(engine, StretchEngine):
        relay(rank, engine, cache)
        return
    while (message := rank.receive()) is not None:
        if isinstance(message, Report):
            rank.notify(Account(message.ticket, rank.rank, engine.figures))
        else:
            compute, *what = message
            getattr(engine, compute)(*what, cache)
            engine.pause()  # only rank 0 knows what is a wait for work
