"""Functions that the tests of collectives run on ranks; ranks import them by name."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from surgeon.runtime.comm.collectives import Counts
from surgeon.runtime.comm.quantised import Compressed, Compression
from surgeon.runtime.worker.rank import Rank


def noise(rank: int, shape: tuple[int, ...]) -> Tensor:
    """What a rank contributes: random numbers, with some features far larger than the others."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(rank))
    values[..., 3 + rank] *= 50
    return values


def compressed_sums(rank: Rank, kind: Compression, shape: tuple[int, ...]) -> tuple[list[Tensor], Counts]:
    """Reductions through `Compressed`, three in flight: numbers, whole numbers, numbers again."""
    compressed, counts = Compressed(rank.collectives, kind), Counts()
    waits = [
        compressed.all_reduce(noise(rank.rank, shape), counts),
        compressed.all_reduce(torch.full((3,), rank.rank), counts),
        compressed.all_reduce(noise(rank.rank, shape), counts),
    ]
    return [wait() for wait in waits], counts


def seconds_of_sums(rank: Rank, rounds: int, compute_seconds: float, size: int = 8) -> float:
    """How long reductions take when something else takes so long between the start of each and waiting for it."""
    rank.collectives.all_reduce(torch.ones(1), Counts())()  # so that all begin together
    began = time.perf_counter()
    for _ in range(rounds):
        wait = rank.collectives.all_reduce(torch.ones(size), Counts())
        time.sleep(compute_seconds)
        wait()
    return time.perf_counter() - began


def processor_seconds(_: Rank) -> float:
    """Processor time that this rank has used so far."""
    return time.process_time()


def wait_for_a_late_rank(rank: Rank, seconds: float) -> float:
    """Processor time that a rank uses while rank 0 comes late to a reduction."""
    rank.collectives.all_reduce(torch.ones(1), Counts())()
    used = time.process_time()
    if rank.rank == 0:
        time.sleep(seconds)
    rank.collectives.all_reduce(torch.ones(1), Counts())()
    return time.process_time() - used


def unconnected(rank: Rank) -> tuple[Tensor, Tensor, Counts]:
    """A sum and a gathering of ranks that do not talk, and what was counted."""
    counts = Counts()
    own = torch.tensor([float(rank.rank)])
    collectives = rank.collectives.subgroup((0, 1))
    return collectives.all_reduce(own, counts)(), rank.collectives.all_gather(own, counts), counts
