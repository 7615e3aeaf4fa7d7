"""Small things timed on ranks: collectives by what is sent, and operations so short that only launching them counts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from surgeon.runtime.comm.collectives import Alone, Counts
from surgeon.runtime.model.linear import Linear, LowRank
from surgeon.runtime.model.low_rank import Gathered, Sharing
from surgeon.runtime.worker.rank import Rank

SMALL = 8  # features of a product that takes no time
CHAIN = 100  # operations in a captured graph


@dataclass(frozen=True)
class ExchangeTimes:
    """One collective on one rank, in seconds.

    Attributes:
        starting: until the rank can go on; of every time it was done.
        waiting: for the result, right after that.
    """

    starting: list[float]
    waiting: list[float]


@torch.inference_mode()
def time_exchanges(rank: Rank, sizes: list[int], times: int) -> dict[int, ExchangeTimes]:
    """Runs on a rank: sum float32 numbers over all ranks, over and over.

    Args:
        sizes: in bytes, of each rank's operand.
        times: for each size.
    """
    return {size: _time(rank, size, times) for size in sizes}


def _time(rank: Rank, size: int, times: int) -> ExchangeTimes:
    tensor, counts = torch.ones(size // 4, device=rank.device), Counts()
    found = ExchangeTimes([], [])
    for turn in range(times + 1):
        operand = tensor.clone()  # it belongs to the collective
        _synchronize(rank)
        began = time.perf_counter()
        wait = rank.collectives.all_reduce(operand, counts)
        started = time.perf_counter()
        wait()
        _synchronize(rank)
        ended = time.perf_counter()
        if turn:  # the first one connects, and allocates
            found.starting.append(started - began)
            found.waiting.append(ended - started)
    return found


@dataclass(frozen=True)
class LaunchTimes:
    """Seconds of operations that compute next to nothing; of every time it was done.

    Attributes:
        product: a matrix product, as the runtime calls it.
        join: what maps by two factors take besides their products.
        gathered: and what they take more where ranks share out the first ones, without the collective.
        operation: a sum of two tensors.
        graph: one operation of a captured graph; none where there are no graphs.
    """

    product: list[float]
    join: list[float]
    gathered: list[float]
    operation: list[float]
    graph: list[float]


@torch.inference_mode()
def time_launches(rank: Rank, times: int) -> LaunchTimes:
    """Runs on a rank: launch small operations, some at a time."""
    x = torch.ones(1, SMALL, device=rank.device)
    linear = Linear([torch.ones(SMALL, SMALL, device=rank.device)], [None])
    roles = ["q", "k", "v"]
    weight = torch.ones(SMALL, SMALL, device=rank.device)
    tensors = {f"{role}.{which}.weight": weight for role in roles for which in ("first", "second")}
    factored = LowRank(tensors, roles)
    shared = Gathered(tensors, roles, Sharing(Alone, Counts))
    found = LaunchTimes([], [], [], [], [])
    replay = _captured(lambda: x + x) if rank.device.type == "cuda" else None
    for _ in range(times):
        found.product.append(_each(rank, lambda: linear(x)))
        products = (1 + len(roles)) * found.product[-1]
        found.join.append(max(0.0, _each(rank, lambda: factored(x)) - products))
        found.gathered.append(max(0.0, _each(rank, lambda: shared(x)) - products - found.join[-1]))
        found.operation.append(_each(rank, lambda: x + x))
        if replay is not None:
            found.graph.append(_each(rank, replay) / CHAIN)
    return found


def _each(rank: Rank, launch: Callable[[], object]) -> float:
    """Seconds of one of a number of launches."""
    _synchronize(rank)
    began = time.perf_counter()
    for _ in range(CHAIN):
        launch()
    _synchronize(rank)
    return (time.perf_counter() - began) / CHAIN


def _captured(launch: Callable[[], object]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CHAIN):
            launch()
    return graph.replay


def _synchronize(rank: Rank) -> None:
    if rank.device.type == "cuda":
        torch.cuda.synchronize(rank.device)
