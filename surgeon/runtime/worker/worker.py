"""The ranks' work while a model answers requests: rank 0 plans each pass, and all compute it together.

Before every pass rank 0 looks for messages of the starting process, plans, and sends the rows to the other ranks, which
know nothing but those. Tokens are chosen on rank 0 and go to the others as part of the next rows. Results of each pass
are sent to the starting process in one message.
"""

from __future__ import annotations

import gc
import threading
import time
from contextlib import suppress

from surgeon.processes.children import Pulse
from surgeon.runtime.batching.request import Request
from surgeon.runtime.batching.scheduler import Limits, Output
from surgeon.runtime.model.engine import Figures, RankEngine
from surgeon.runtime.model.paged_cache import PagedCache
from surgeon.runtime.plan.specification import Plan
from surgeon.runtime.worker.leader import Account, Cancel, Leader, Report
from surgeon.runtime.worker.pipeline import PipelineLeader, StretchEngine, relay
from surgeon.runtime.worker.rank import Rank

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
        leader.report(message)
        rank.notify(Account(message.ticket, rank.rank, leader.engine.figures))


def follow(rank: Rank, engine: RankEngine, cache: PagedCache) -> None:
    """Compute the rows that rank 0 sends, until there is nothing more: the work of all other ranks."""
    if isinstance(engine, StretchEngine):
        relay(rank, engine, cache)
        return
    while (message := rank.receiver.receive()) is not None:
        if isinstance(message, Report):
            rank.notify(Account(message.ticket, rank.rank, engine.figures))
        else:
            compute, *what = message
            getattr(engine, compute)(*what, cache)
            engine.pause()  # only rank 0 knows what is a wait for work
