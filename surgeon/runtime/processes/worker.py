"""What ranks do while a model answers requests: rank 0 decides what each pass computes, and all compute it together.

Rank 0 has the scheduler. Before every pass it looks whether the starting process has sent something, plans, and sends
the rows to the other ranks, which know nothing but those. Tokens are chosen on rank 0 and go to the others as part of
the next rows. What each pass brings for the requests is sent to the starting process in one message.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

from surgeon.runtime.batching.blocks import BlockPool
from surgeon.runtime.batching.request import UNDEFINED, Request, TokenLogprob
from surgeon.runtime.batching.scheduler import Limits, Output, Scheduler
from surgeon.runtime.batching.sequence import ScheduledChunk, Wanted
from surgeon.runtime.comm.pipes import Sender
from surgeon.runtime.model.engine import Figures, RankEngine
from surgeon.runtime.model.paged_cache import PagedCache
from surgeon.runtime.model.sampling import Sampler
from surgeon.runtime.plan.specification import Plan
from surgeon.runtime.processes.rank import Rank
from surgeon.runtime.processes.watchdog import Pulse

ENGINE = "engine"  # the name under which a rank keeps the engine of a single model


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


def load(rank: Rank, plan: Plan, name: str = ENGINE) -> None:
    """Runs on a rank: load its slices of a model, and keep the engine under a name."""
    rank.kept[name] = RankEngine(plan, rank.collectives, rank.device)


def unload(rank: Rank, name: str = ENGINE) -> None:
    """Runs on a rank: forget an engine."""
    del rank.kept[name]


def complete(
    rank: Rank, requests: list[Request], blocks: int, limits: Limits, name: str = ENGINE
) -> tuple[list[Output], Figures]:
    """Runs on a rank: work on some requests until all have ended; rank 0 sends what passes bring, and returns all."""
    engine: RankEngine = rank.kept[name]
    engine.figures = Figures()
    engine.pause()
    cache = engine.reusable_cache(blocks)
    if rank.rank:
        follow(rank, engine, cache)
        return [], engine.figures
    leader = Leader(engine, cache, blocks, limits, rank.sender)
    for request in requests:
        leader.submit(request)
    outputs: list[Output] = []
    while not leader.scheduler.idle:
        outputs += (newest := leader.step())
        rank.notify(leader.progress(newest))
    rank.sender.send(None)
    return outputs, engine.figures


def serve(rank: Rank, blocks: int, limits: Limits, pulse_seconds: float, name: str = ENGINE) -> None:
    """Runs on a rank, for ever: work on the requests that the starting process sends.

    Args:
        pulse_seconds: how often to send a `Pulse`.
    """
    engine: RankEngine = rank.kept[name]
    cache = engine.new_cache(blocks, limits.max_batch)
    _send_pulses(rank, engine, pulse_seconds)
    if rank.rank:
        follow(rank, engine, cache)
        return
    leader, inbox = Leader(engine, cache, blocks, limits, rank.sender), rank.inbox()
    rank.notify(leader.progress([]))  # from here on, what is posted goes to the inbox
    while True:
        if leader.scheduler.idle:
            engine.pause()
            _obey(rank, leader, inbox.get())
        while not inbox.empty():
            _obey(rank, leader, inbox.get())
        if not leader.scheduler.idle:
            rank.notify(leader.progress(leader.step()))


def _send_pulses(rank: Rank, engine: RankEngine, seconds: float) -> None:
    """From now on, and whatever this rank is doing."""

    def send() -> None:
        with suppress(OSError):  # the starting process has gone, and this one is about to
            while True:
                rank.notify(Pulse(rank.rank, engine.passes))
                time.sleep(seconds)

    threading.Thread(target=send, daemon=True).start()


def _obey(rank: Rank, leader: Leader, message: Request | Cancel | Report) -> None:
    if isinstance(message, Request):
        leader.submit(message)
    elif isinstance(message, Cancel):
        if output := leader.cancel(message.request):
            rank.notify(leader.progress([output]))
    else:
        rank.sender.send(message)
        rank.notify(Account(message.ticket, rank.rank, leader.engine.figures))


def follow(rank: Rank, engine: RankEngine, cache: PagedCache) -> None:
    """What all ranks but the first do: compute the rows they are sent, until there is nothing more."""
    while (message := rank.receiver.receive()) is not None:
        if isinstance(message, Report):
            rank.notify(Account(message.ticket, rank.rank, engine.figures))
        else:
            engine.step(message, cache)
            engine.pause()  # only rank 0 knows what is a wait for work


class Leader:
    """Rank 0's side of the work on some requests."""

    def __init__(self, engine: RankEngine, cache: PagedCache, blocks: int, limits: Limits, sender: Sender) -> None:
        self.engine = engine
        self.cache = cache
        self.scheduler = Scheduler(BlockPool(blocks), limits)
        self._sender = sender
        self._samplers: dict[int, Sampler] = {}  # of the requests for which the likeliest token is not enough

    def submit(self, request: Request) -> None:
        """Take a request, as `Scheduler.submit` does."""
        self.scheduler.submit(request)
        if not request.sampling.greedy:
            self._samplers[request.id] = Sampler(request, self.engine.plan.vocabulary, self.engine.device)

    def cancel(self, request: int) -> Output | None:
        """End a request; None if it is not open."""
        self._samplers.pop(request, None)
        return self.scheduler.cancel(request)

    def step(self) -> list[Output]:
        """One pass on all ranks, and what it brings."""
        chunks = self.scheduler.plan()
        rows = [chunk.row() for chunk in chunks]
        self._sender.send(rows)
        results = self.engine.step(rows, self.cache)
        chosen = self._choose(chunks, results.best, results.logits)
        outputs = self.scheduler.advance(chunks, chosen, results.scores)
        for output in outputs:
            if output.finish_reason is not None:
                self._samplers.pop(output.request, None)
        return outputs

    def _choose(
        self, chunks: Iterable[ScheduledChunk], best: list[int], logits: Any
    ) -> list[tuple[int, TokenLogprob | None]]:
        """The next token of every chunk that wants one; UNDEFINED where the logits are not finite."""
        likeliest, given = iter(best), iter(() if logits is None else logits)
        finite = iter(() if logits is None else logits.amax(-1).isfinite().tolist())  # NaN is higher than any number
        chosen: list[tuple[int, TokenLogprob | None]] = []
        for chunk in chunks:
            if chunk.wanted == Wanted.BEST:
                chosen.append((next(likeliest), None))
            elif chunk.wanted == Wanted.LOGITS:
                row, sampler = next(given), self._samplers[chunk.sequence.request.id]
                chosen.append(sampler.choose(row) if next(finite) else (UNDEFINED, None))
        return chosen

    def progress(self, outputs: list[Output]) -> Progress:
        """What the starting process is told."""
        scheduler, pool, tally = self.scheduler, self.scheduler.pool, self.scheduler.tally
        phases = self.engine.figures.prefill, self.engine.figures.decode
        counts = [count for phase in phases for count in (phase.layers, phase.vocabulary)]
        return Progress(
            outputs,
            (
                len(scheduler.running),
                len(scheduler.waiting),
                pool.blocks,
                pool.free,
                tally.prompt_tokens,
                tally.cached_tokens,
                tally.new_tokens,
                tally.finished,
                tally.preempted,
                sum(phase.passes for phase in phases),
                sum(count.all_reduces for count in counts),
                sum(count.all_gathers for count in counts),
                sum(count.bytes for count in counts),
            ),
        )
