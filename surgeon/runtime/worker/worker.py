"""What ranks do while a model answers requests: rank 0 decides what each pass computes, and all compute it together.

Rank 0 has the scheduler. Before every pass it looks whether the starting process has sent something, plans, and sends
the rows to the other ranks, which know nothing but those. Tokens are chosen on rank 0 and go to the others as part of
the next rows. What each pass brings for the requests is sent to the starting process in one message.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice, takewhile
from operator import eq

from surgeon.processes.watchdog import Pulse
from surgeon.runtime.batching.blocks import BlockPool
from surgeon.runtime.batching.limits import Limits
from surgeon.runtime.batching.request import Choice, Request
from surgeon.runtime.batching.scheduler import Output, Scheduler
from surgeon.runtime.batching.sequence import Row, ScheduledChunk, Wanted
from surgeon.runtime.comm.pipes import Sender
from surgeon.runtime.model.engine import Figures, RankEngine
from surgeon.runtime.model.paged_cache import PagedCache
from surgeon.runtime.model.rank_model import Results
from surgeon.runtime.model.sampling import Sampler
from surgeon.runtime.model.stretch import StretchEngine
from surgeon.runtime.plan.mixtures import ExpertTimes
from surgeon.runtime.plan.specification import Plan
from surgeon.runtime.worker.in_flight import FlightLeader, relay
from surgeon.runtime.worker.messages import Account, Cancel, Progress, Recorded, Report
from surgeon.runtime.worker.rank import Rank

RECORDING_SECONDS = 60.0
ENGINE = "engine"  # the name under which a rank keeps the engine of a single model


class Drafting(tuple[Row, ...]):
    """To every rank but the first: the rows of a pass that drafts tokens; other rows come as a list."""


class RowsToRecord(tuple[Row, ...]):
    """To every rank but the first: the rows of a pass that is only to be recorded."""


def load(rank: Rank, plan: Plan, name: str = ENGINE) -> ExpertTimes | None:
    """Runs on a rank: load its slices of a model, and keep the engine under a name; how experts are shared, if open."""
    engine = (
        StretchEngine(plan, rank.rank, rank.device)
        if plan.stretches
        else RankEngine(plan, rank.collectives, rank.device, rank.engines.values())
    )
    keep(rank, name, engine)
    return engine.expert_times


def keep(rank: Rank, name: str, engine: RankEngine) -> None:
    """Keep an engine under a name on its rank, and spare passes the walks of Python's garbage collector through it."""
    if name in rank.engines:
        unload(rank, name)
    rank.engines[name] = engine
    gc.collect()
    gc.freeze()


def unload(rank: Rank, name: str = ENGINE) -> None:
    """Runs on a rank: forget an engine."""
    del rank.engines[name]
    gc.unfreeze()  # an engine refers to itself, and is looked for among all that there is
    gc.collect()
    gc.freeze()


def forget_cache(rank: Rank, name: str = ENGINE) -> None:
    """Runs on a rank: give back what an engine keeps for the next texts."""
    engine: RankEngine = rank.engines[name]
    engine.forget_cache()


def complete(
    rank: Rank, requests: list[Request], blocks: int, limits: Limits, name: str = ENGINE, grouped: bool = False
) -> tuple[list[Output], Figures]:
    """Runs on a rank: work on some requests until all have ended; rank 0 sends what passes bring, and returns all.

    Args:
        grouped: whether the blocks are those of groups of attentions, as in `serve`.
    """
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
    """Runs on a rank, for ever: work on the requests that the starting process sends.

    Args:
        pulse_seconds: how often to send a `Pulse`.
    """
    engine: RankEngine = rank.engines[ENGINE]
    cache = engine.new_cache(blocks, limits.max_batch * (1 + limits.draft_tokens), grouped=True)

    def pulse() -> None:  # whatever this rank is doing
        with suppress(OSError):  # the starting process has gone, and this one is about to
            while True:
                rank.notify(Pulse(rank.rank, engine.passes))
                time.sleep(pulse_seconds)

    threading.Thread(target=pulse, daemon=True).start()
    if rank.rank:
        follow(rank, engine, cache)
        return
    leader = leader_of(rank, engine, cache, blocks, limits)
    for recorded in leader.record_ahead():
        rank.notify(recorded)
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


def leader_of(rank: Rank, engine: RankEngine, cache: PagedCache, blocks: int, limits: Limits) -> Leader | FlightLeader:
    """Rank 0's side of the work on some requests."""
    if isinstance(engine, StretchEngine):
        assert rank.ring is not None, "ranks with stretches are connected before they work"
        return FlightLeader(engine, cache, blocks, limits, rank.ring)
    return Leader(engine, cache, blocks, limits, rank.sender)


def _obey(rank: Rank, leader: Leader | FlightLeader, message: Request | Cancel | Report) -> None:
    if isinstance(message, Request):
        leader.submit(message)
    elif isinstance(message, Cancel):
        if output := leader.cancel(message.request):
            rank.notify(leader.progress([output]))
    else:
        leader.report(message)
        rank.notify(Account(message.ticket, rank.rank, leader.engine.figures))


def follow(rank: Rank, engine: RankEngine, cache: PagedCache) -> None:
    """What all ranks but the first do: compute the rows they are sent, until there is nothing more."""
    if isinstance(engine, StretchEngine):
        relay(rank, engine, cache)
        return
    while (message := rank.receiver.receive()) is not None:
        if isinstance(message, Report):
            rank.notify(Account(message.ticket, rank.rank, engine.figures))
        else:
            compute = {Drafting: engine.draft, RowsToRecord: engine.record_ahead}.get(type(message))
            if compute is None:
                engine.step(list(message), cache)
            else:
                compute(list(message), cache)
            engine.pause()  # only rank 0 knows what is a wait for work


class Leader:
    """Rank 0's side of the work on some requests."""

    def __init__(self, engine: RankEngine, cache: PagedCache, blocks: int, limits: Limits, sender: Sender) -> None:
        self.engine = engine
        self.cache = cache
        draft = engine.plan.draft
        catches_up = draft is not None and draft.keeps_own
        self.scheduler = Scheduler(BlockPool(blocks, windows=cache.windows), limits, catches_up)
        self._sender = sender
        self._sampler = Sampler(engine.plan.vocabulary, engine.device)  # where the likeliest token is not enough

    def record_ahead(self, seconds: float = RECORDING_SECONDS) -> Iterator[Recorded]:
        """Have passes recorded that texts will come to, as many as the seconds suffice for; the rest when they come."""
        passes = self.engine.passes_to_record(self.cache, self.scheduler.limits.max_batch)
        end = time.monotonic() + seconds
        for done, rows in enumerate(passes, start=1):
            if time.monotonic() > end:
                return
            self._sender.send(RowsToRecord(rows))
            self.engine.record_ahead(rows, self.cache)
            yield Recorded(done, len(passes))

    def submit(self, request: Request) -> None:
        self.scheduler.submit(request)
        if not request.sampling.greedy:
            self._sampler.add(request)

    def cancel(self, request: int) -> Output | None:
        """End a request; None if it is not open."""
        self._sampler.remove(request)
        return self.scheduler.cancel(request)

    def step(self) -> list[Output]:
        """One pass on all ranks, the passes before it that draft tokens for it, and what it brings."""
        began = time.perf_counter()
        chunks = self.scheduler.plan()
        planned = time.perf_counter() - began  # with what is drafted, which may take long to choose
        if self.scheduler.limits.looked_up:
            chunks, drafts = self._look_up(chunks)
        else:
            drafts = self._draft(chunks)
        began = time.perf_counter() - planned
        pairs = zip(chunks, drafts, strict=True)
        if self.engine.coda is not None:
            rows = [chunk.row(drafted) for chunk, drafted in pairs]
        else:
            rows = [row for chunk, drafted in pairs for row in chunk.rows_apart(drafted)]
        self._sender.send(rows)
        results = self.engine.step(rows, self.cache)
        chosen = self._choose(chunks, drafts, results)
        if self.scheduler.ahead is not None:
            single = all(row.start and len(row.tokens) == 1 for row in rows)
            note = self.scheduler.ahead.note_pass if single else self.scheduler.ahead.prompts.note
            note(sum(len(row.tokens) for row in rows), time.perf_counter() - began)
        outputs = self.scheduler.advance(chunks, chosen, results.scores)
        self.engine.counts.new += sum(output.token is not None for output in outputs)
        for output in outputs:
            if output.finish_reason is not None:
                self._sampler.remove(output.request)
        return outputs

    def _draft(self, chunks: list[ScheduledChunk]) -> list[list[int]]:
        """The tokens drafted for each chunk; none for most, or those with the most of them come first.

        With a coda there is one more pass of a chunk in which nothing is drafted: its last token goes through the
        first rack. A draft with keys of its own has one of chunks that only make up for what it has missed.
        """
        drafts: list[list[int]] = [[] for _ in chunks]
        more = self.engine.coda is not None
        passes = [chunk.drafts + more if chunk.drafts else int(chunk.missed > 0) for chunk in chunks]
        for number in range(max(passes, default=0)):
            going = [place for place, most in enumerate(passes) if most > number]
            began = time.perf_counter()
            rows = [row for place in going for row in chunks[place].drafting_rows(drafts[place])]
            self._sender.send(Drafting(rows))
            results = self.engine.draft(rows, self.cache)
            asking = [place for place in going if chunks[place].drafts > number]
            drawn = [chunks[place] for place in asking if chunks[place].wanted == Wanted.LOGITS]
            tokens = {
                # Any token, if the logits are not finite.
                Wanted.BEST: iter(max(0, token) for token in results.best),
                Wanted.LOGITS: iter(() if results.logits is None else self._sampler.draft(ids(drawn), results.logits)),
            }
            for place in asking:
                drafts[place].append(next(tokens[chunks[place].wanted]))
            if (ahead := self.scheduler.ahead) is not None:
                count = sum(len(row.tokens) for row in rows)
                note = ahead.note_draft if count == len(rows) else ahead.note_missed
                note(count, time.perf_counter() - began)
        return drafts

    def _look_up(self, chunks: list[ScheduledChunk]) -> tuple[list[ScheduledChunk], list[list[int]]]:
        """The chunks with as many drafts as were found in their own texts, and these."""
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
        return [chunk._replace(drafts=len(found)) for chunk, found in zip(chunks, drafts, strict=True)], drafts

    def _choose(self, chunks: list[ScheduledChunk], drafts: list[list[int]], results: Results) -> list[list[Choice]]:
        """The next tokens of every chunk that wants one: the drafted ones that are right, and one more.

        That is UNDEFINED where the logits are not finite.
        """
        likeliest, judged = iter(results.best), iter(list[list[Choice]]())
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
        """What the starting process is told."""
        return Progress.of(outputs, self.scheduler, self.engine.figures)

    def report(self, message: Report) -> None:
        """Have all other ranks send an account."""
        self._sender.send(message)

    def end(self) -> None:
        self._sender.send(None)


def ids(chunks: Iterable[ScheduledChunk]) -> list[int]:
    """Those of their requests."""
    return [chunk.sequence.request.id for chunk in chunks]
