"""Functions that the tests run on ranks; ranks import them by name."""

from __future__ import annotations

import os
import signal
import time

import torch
from torch import Tensor

from surgeon.runtime.collectives import Collectives, Counts
from surgeon.runtime.engine import RankEngine
from surgeon.runtime.plan import Plan
from surgeon.runtime.rank import Rank


def logits_in_chunks(rank: Rank, plan: Plan, chunks: list[Tensor]) -> tuple[Tensor, list[Counts], Counts]:
    """All logits of a text given in several chunks, the layers' collectives by chunk, the vocabulary's of all."""
    engine = RankEngine(plan, rank.collectives, rank.device)
    cache = engine.new_cache(len(chunks[0]))
    logits, counts = [], []
    with torch.inference_mode():
        for chunk in chunks:
            before = engine.layers.copy()
            logits.append(engine.logits(chunk, cache))
            counts.append(engine.layers - before)
    return torch.cat(logits, 1), counts, engine.vocabulary


def sums_in_flight(rank: Rank, sizes: list[int], dtype: torch.dtype, depth: int) -> list[Tensor]:
    """Reduce tensors of these sizes, up to `depth` in flight at once and asked for newest first."""
    counts, results = Counts(), []
    for first in range(0, len(sizes), depth):
        waits = [
            rank.collectives.all_reduce(part(rank.rank, size, dtype), counts) for size in sizes[first : first + depth]
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
        if number % rank.settings.ranks == rank.rank:
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


def process_id(_: Rank) -> int:
    return os.getpid()
