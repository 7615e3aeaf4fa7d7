"""Functions that the tests run on ranks; ranks import them by name."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from surgeon.runtime.batching.blocks import blocks_for
from surgeon.runtime.batching.request import Request, Row, Stats, Wanted
from surgeon.runtime.batching.scheduler import Limits
from surgeon.runtime.comm.collectives import Collectives, Counts
from surgeon.runtime.comm.shared_memory import SharedMemoryCollectives
from surgeon.runtime.model import linear
from surgeon.runtime.model.engine import RankEngine
from surgeon.runtime.model.paged_cache import PagedCache
from surgeon.runtime.model.rank_model import Results
from surgeon.runtime.model.recorded import RecordedDecode
from surgeon.runtime.plan.specification import Plan
from surgeon.runtime.worker.rank import Rank
from surgeon.runtime.worker.worker import ENGINE, Leader, follow


def cache_bytes(cache: PagedCache) -> int:
    """Of keys and values, or of what they are rebuilt of."""
    return cache.stored.nbytes + sum(slot.nbytes for slot in cache.low_rank.values())


def logits_in_chunks(
    rank: Rank, plan: Plan, chunks: list[Tensor]
) -> tuple[Tensor, list[Counts], Counts]:
    """All logits of some texts given in several chunks, the layers' collectives by chunk, the vocabulary's of all."""
    engine = RankEngine(plan, rank.collectives, rank.device)
    prefill, found, counts = engine.figures.prefill, [], []
    for logits in chunked_logits(engine, chunks):
        found.append(logits)
        counts.append(prefill.layers)
        prefill.layers = Counts()
    return torch.cat(found, 1), counts, prefill.vocabulary


def logits_as_timed(
    rank: Rank, plan: Plan, chunks: list[Tensor], seconds: list[list[float]]
) -> tuple[Tensor, list[Counts], Counts]:
    """What `logits_in_chunks` gives where measuring says how long each way takes that is tried.

    Args:
        seconds: of each rank, in the order in which they are asked for.
    """
    said = iter(seconds[rank.rank])
    with patch.object(linear, "time_of", lambda *_: next(said)):
        found = logits_in_chunks(rank, plan, chunks)
    assert next(said, None) is None, "something was not measured"
    return found


def held(rank: Rank, plan: Plan) -> tuple[set[int], int, int]:
    """The stored layers that a rank has weights of, the attentions that it caches, and their numbers per token."""
    engine = RankEngine(plan, rank.collectives, rank.device)
    program = engine.model.program
    layers = {layer for sublayer, *_ in program.sublayers for layer in sublayer.layers}
    cache = engine.new_cache(1)
    return (
        layers,
        len(program.attentions()),
        cache_bytes(cache) // cache.tokens // cache.stored.element_size(),
    )


def chunked_logits(engine: RankEngine, chunks: list[Tensor]) -> Iterator[Tensor]:
    """Logits (texts, tokens, vocabulary) of some texts of one length, by chunk."""
    texts, start = len(chunks[0]), 0
    blocks = blocks_for(sum(chunk.shape[1] for chunk in chunks))
    cache = engine.new_cache(texts * blocks)
    for chunk in chunks:
        rows = [
            Row(start, tokens.tolist(), ([(text * blocks, blocks)],), Wanted.NOTHING)
            for text, tokens in enumerate(chunk)
        ]
        yield engine.logits(rows, cache).unflatten(0, chunk.shape)
        start += chunk.shape[1]


@dataclass
class Completed:
    """What a scheduler has done, and the tokens of its requests."""

    tally: Stats
    blocks: int
    free: int
    tokens: dict[int, list[int]]


def complete_twice(
    rank: Rank, first: list[Request], then: list[Request], blocks: int, limits: Limits
) -> Completed | None:
    """Work on some requests, and when they have ended on others, with the same cache."""
    engine: RankEngine = rank.engines[ENGINE]
    cache = engine.new_cache(blocks)
    if rank.rank:
        follow(rank, engine, cache)
        return None
    leader, tokens = Leader(engine, cache, blocks, limits, rank.sender), dict[int, list[int]]()
    for requests in (first, then):
        for request in requests:
            leader.submit(request)
        while not leader.scheduler.idle:
            for output in leader.step():
                assert output.token is not None
                tokens.setdefault(output.request, []).append(output.token)
    rank.sender.send(None)
    pool = leader.scheduler.pool
    return Completed(leader.scheduler.tally, pool.blocks, pool.free, tokens)


def sums_in_flight(rank: Rank, sizes: list[int], dtype: torch.dtype, depth: int) -> list[Tensor]:
    """Reduce tensors of these sizes, up to `depth` in flight at once and asked for newest first."""
    counts, results = Counts(), []
    for first in range(0, len(sizes), depth):
        waits = [
            rank.collectives.all_reduce(part(rank.rank, size, dtype), counts)
            for size in sizes[first : first + depth]
        ]
        results += reversed([wait().clone() for wait in reversed(waits)])
    assert counts.all_reduces == len(sizes)
    return results


def part(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """What a rank contributes: small integers, whose sums are exact in every dtype."""
    return ((torch.arange(size) * (rank + 1) + rank) % 13).to(dtype)


def gathered(rank: Rank, size: int, dtype: torch.dtype) -> Tensor:
    return rank.collectives.all_gather(part(rank.rank, size, dtype), Counts())


def group_sums(rank: Rank, groups: list[tuple[int, ...]], rounds: int) -> list[Tensor]:
    """This rank's sums in each of its groups, over and over, with the whole group's in between."""
    connected: list[Collectives] = [rank.collectives.subgroup(group) for group in groups]
    found = []
    for _ in range(rounds):
        for group, collectives in zip(groups, connected, strict=True):
            if rank.rank in group:
                found.append(collectives.all_reduce(torch.tensor([float(rank.rank)]), Counts())())
        found.append(rank.collectives.all_reduce(torch.tensor([1.0]), Counts())())
    return found


def staggered_sums(rank: Rank, rounds: int) -> float:
    """Sums to which the ranks come late in turn, so that each of them waits for each other one."""
    total = 0.0
    for number in range(rounds):
        if number % rank.settings.options.ranks == rank.rank:
            time.sleep(0.01)
        total += float(rank.collectives.all_reduce(torch.full((3,), float(number)), Counts())()[0])
    return total


def fail(rank: Rank, who: int, how: str) -> None:
    """One rank fails in some way while the others wait for it in a collective."""
    if rank.rank == who:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            os._exit(3)
        if how == "value":
            raise ValueError("7 is too many; use 6")
        raise RuntimeError("something broke\nin two lines")
    rank.collectives.all_reduce(torch.ones(2), Counts())()


def sleep(rank: Rank, seconds: float, folder: Path) -> None:
    """Say so with a file, then sleep."""
    (folder / f"{rank.rank}.asleep").touch()
    time.sleep(seconds)


@dataclass
class Whereabouts:
    """Where a rank runs: session, group of processes, cores, and whether its collectives think these too few."""

    session: int
    group: int
    cores: set[int]
    crowded: bool


def faults(_: Rank) -> int:
    """Pages that the system brings to a pass with tensors like those of some before it.

    The fewest of several passes count: what another thread allocates meanwhile may lie between free memory of one.
    """
    counts = []
    for _again in range(5):
        before = getrusage(RUSAGE_SELF).ru_minflt
        tensors = [torch.ones(4 << 20) for _ in range(3)]
        del tensors
        counts.append(getrusage(RUSAGE_SELF).ru_minflt - before)
    return min(counts)


def whereabouts(rank: Rank) -> Whereabouts:
    collectives = rank.collectives
    assert isinstance(collectives, SharedMemoryCollectives)
    return Whereabouts(os.getsid(0), os.getpgid(0), os.sched_getaffinity(0), collectives.crowded)


def process_id(_: Rank) -> int:
    return os.getpid()


def continue_texts(rank: Rank, plan: Plan, prompts: Tensor, new_tokens: int) -> Continued:
    """Continue some texts greedily, all in every pass, their blocks scattered over the cache."""
    engine = RankEngine(plan, rank.collectives, rank.device)
    return continued(engine, prompts, new_tokens)


@dataclass
class Continued:
    """What texts were continued with.

    Attributes:
        tokens: (texts, new tokens).
        logits: that they were chosen by, (new tokens, texts, vocabulary).
        numbers: that the cache holds of each token.
        layers: collectives of the last pass.
    """

    tokens: Tensor
    logits: Tensor
    numbers: float
    layers: Counts


def continued(engine: RankEngine, prompts: Tensor, new_tokens: int) -> Continued:
    """Continue texts of one length: the first half of every prompt in a pass of its own, then the other half."""
    texts, length = prompts.shape
    blocks = blocks_for(length + new_tokens)
    cache, start, newest, found = (
        engine.new_cache(texts * blocks, texts),
        0,
        prompts[:, : length // 2],
        list[Tensor](),
    )
    runs = [([(block * texts + text, 1) for block in range(blocks)],) for text in range(texts)]
    while len(found) <= new_tokens:
        rows = [
            Row(start, row.tolist(), own, Wanted.LOGITS) for row, own in zip(newest, runs, strict=True)
        ]
        engine.figures.decode.layers = Counts()
        logits = engine.step(rows, cache).logits
        assert logits is not None
        start += newest.shape[1]
        newest = prompts[:, start:] if start < length else logits.argmax(-1, keepdim=True)
        found.append(logits.clone())
    numbers = cache_bytes(cache) / cache.tokens / cache.stored.element_size()
    chosen = torch.stack(found[1:])  # the first pass ends inside the prompts
    return Continued(chosen.argmax(-1).T, chosen, numbers, engine.figures.decode.layers)


def continued_both_ways(rank: Rank, plan: Plan) -> tuple[Tensor, Tensor, list[Counts], dict[int, str]]:
    """Logits of some texts, continued by recorded passes and by others, what these sent, and why none was recorded."""
    logits, counts, problems = [], [], dict[int, str]()
    for way in ("auto", "dynamic"):
        engine = RankEngine(replace(plan, decoding=way), rank.collectives, rank.device)
        cache, found = engine.new_cache(12), []
        cache.stored.fill_(0.5)  # what texts hold before their first token here
        for number in range(9):  # of one, two and three texts
            blocks = [([(4 * text, 4)],) for text in range(1 + number % 3)]
            rows = [
                Row(number, [text + number], runs, Wanted.LOGITS) for text, runs in enumerate(blocks)
            ]
            made = engine.step(rows, cache).logits
            assert made is not None
            found.append(made)
        logits.append(torch.cat(found))
        counts.append(engine.figures.prefill.layers + engine.figures.decode.layers)
        if isinstance(engine.ways[0], RecordedDecode):
            problems = engine.ways[0].problems
        elif way == "auto":
            problems = {0: "nothing is recorded"}
    return logits[0], logits[1], counts, problems


def greedy(engine: RankEngine, prompt: list[int], new_tokens: int) -> list[int]:
    """Continue one text with the most likely tokens, the same on every rank: without a scheduler or rank 0."""
    found: list[int] = []
    blocks = blocks_for(len(prompt) + new_tokens)
    cache, start, newest = engine.new_cache(blocks), 0, prompt
    while len(found) < new_tokens:
        best = engine.step([Row(start, newest, ([(0, blocks)],), Wanted.BEST)], cache).best
        start, newest = start + len(newest), best
        found += best
    return found


class Halved(NamedTuple):
    """Passes of one rank, computed in one piece and in halves: what came out, what the layers sent, what is cached."""

    results: list[list[Results]]
    sent: list[Counts]
    cached: list[Tensor]
    halved: list[int]


def in_halves(rank: Rank, plan: Plan, passes: list[list[Row]], blocks: int) -> Halved:
    """Compute some passes both ways."""
    found = Halved([], [], [], [])
    for way in ("off", "on"):
        engine = RankEngine(replace(plan, halves=way), rank.collectives, rank.device)
        cache = engine.new_cache(blocks)
        cache.stored.fill_(0.5)
        found.results.append([engine.step(rows, cache) for rows in passes])
        phases = engine.figures.prefill, engine.figures.decode
        found.sent.append(phases[0].layers + phases[1].layers)
        found.halved.append(sum(phase.halved for phase in phases))
        found.cached.append(cache.stored)
    return found
