"""Functions that the tests of collectives run on ranks; ranks import them by name."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from surgeon.runtime.comm import shared_memory as symmetric_memory
from surgeon.runtime.comm.collectives import Collectives, Compressed, Counts, TorchCollectives
from surgeon.runtime.comm.shared_memory import BySize, SymmetricSum, side_stream, ways_through_memory
from surgeon.runtime.model.engine import RankEngine
from surgeon.runtime.plan.specification import Plan
from surgeon.runtime.worker.rank import Rank
from tests.runtime.on_ranks import part


def noise(rank: int, shape: tuple[int, ...]) -> Tensor:
    """What a rank contributes: random numbers, with some features far larger than the others."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(rank))
    values[..., 3 + rank] *= 50
    return values


def compressed_sums(rank: Rank, kind: str, shape: tuple[int, ...]) -> tuple[list[Tensor], Counts]:
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


def waited_for_at_once(rank: Rank, plans: list[Plan]) -> list[tuple[int, int]]:
    """How many sums of a pass of each plan are waited for at once, and how many are started and go on meanwhile."""
    found, whole = [], dist.all_reduce
    for plan in plans:
        engine, kinds = RankEngine(plan, rank.collectives, rank.device), list[bool]()

        def counted(
            *arguments: Any, async_op: bool = False, kinds: list[bool] = kinds, **options: Any
        ) -> Any:
            kinds.append(async_op)
            return whole(*arguments, async_op=async_op, **options)

        dist.all_reduce = counted
        try:
            engine.text_logits([1, 2, 3])
        finally:
            dist.all_reduce = whole
        found.append((kinds.count(False), kinds.count(True)))
    return found


class GlooWay:
    """Sums by gloo, in float32, and notes of what."""

    def __init__(self, name: str, most: int, inner: Collectives) -> None:
        self.name = name
        self.most = most
        self.inner = inner
        self.summed: list[tuple[int, bool]] = []

    def fits(self, tensor: Tensor) -> bool:
        return tensor.dtype == torch.float32 and tensor.nbytes <= self.most

    def __call__(self, tensor: Tensor, aside: bool) -> None:
        self.summed.append((tensor.nbytes, aside))
        tensor.copy_(self.inner.all_gather(tensor, Counts()).sum(0))


class Streams:
    """What `side_stream` takes for torch.cuda, on a CPU: it notes what it is asked to do."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def Stream(self, _: torch.device, priority: int = 0) -> Streams:
        self.asked.append(f"stream of priority {priority}")
        return self

    def current_stream(self, _: torch.device) -> Streams:
        return self

    def wait_stream(self, _: Streams) -> None:
        self.asked.append("behind the current one")

    def wait_event(self, _: str) -> None:
        self.asked.append("joined")

    @contextmanager
    def stream(self, _: Streams) -> Iterator[None]:
        self.asked.append("begin")
        yield
        self.asked.append("end")

    def record_event(self) -> str:
        self.asked.append("event")
        return "event"


Sums = tuple[list[Tensor], list[list[tuple[int, bool]]], list[str]]


def sums_by_size(rank: Rank, sizes: list[int], dtype: torch.dtype) -> Sums:
    """Sums of some numbers of each size, at once and two in flight; what each way had to do, and the streams."""
    inner, streams = rank.collectives, Streams()
    assert isinstance(inner, TorchCollectives)
    small, middle = GlooWay("small", 64, inner), GlooWay("middle", 256, inner)
    side = side_stream(torch.device("cpu"), streams)
    by_size = BySize(inner, [small, middle], side)
    counts = Counts()
    found = [by_size.all_reduce(part(rank.rank, size, dtype), counts, at_once=True)() for size in sizes]
    waits = [by_size.all_reduce(part(rank.rank, size, dtype), counts) for size in sizes]
    assert counts.all_reduces == 2 * len(sizes)
    streams.asked.append("computed meanwhile")
    return found + [wait() for wait in waits], [small.summed, middle.summed], streams.asked


class FakeMemory:
    """Stands for PyTorch's symmetric memory between ranks: something of it fails on one of them.

    A rank alone in the rendezvous waits for the others in vain, as it does on GPUs.
    """

    def __init__(self, rank: int, fails: str) -> None:
        self.fails = fails if rank == 1 else ""
        self.asked: list[str] = []

    def empty(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        self._ask("empty")
        return torch.empty(size, dtype=dtype, device=device)

    def rendezvous(self, room: Tensor, group: str) -> SimpleNamespace:  # noqa: ARG002
        dist.barrier()
        self._ask("rendezvous")
        return SimpleNamespace(multicast_ptr=0 if self.fails == "multicast" else 7)

    def _ask(self, what: str) -> None:
        self.asked.append(what)
        if self.fails == f"{what} {self.asked.count(what)}":
            raise RuntimeError(f"CUDA driver error: invalid argument in {what}\nof this machine")


class FileMemory:
    """Memory of all ranks that each of them can read, in files, as PyTorch's handle gives it."""

    def __init__(self, folder: str, ranks: int) -> None:
        self.rooms = [
            torch.from_file(f"{folder}/{rank}", shared=True, size=1024, dtype=torch.uint8)
            for rank in range(ranks)
        ]

    def barrier(self) -> None:
        dist.barrier()

    def get_buffer(self, rank: int, sizes: torch.Size, dtype: torch.dtype) -> Tensor:
        assert len(sizes) == 1
        return self.rooms[rank][: sizes[0] * dtype.itemsize].view(dtype)


def gathered_through_memory(rank: Rank, folder: str) -> list[Tensor]:
    """What ranks that share a GPU gather: some shapes and dtypes, over and over in the same room."""
    memory = FileMemory(folder, 2)
    way = SymmetricSum("one shot", 2, "0", (memory.rooms[rank.rank], torch.empty(0)), memory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(symmetric_memory.OVERLAPPING, "1")
        by_size = BySize(rank.collectives, [way], lambda compute: compute)
    assert by_size.capturable
    assert not rank.collectives.capturable
    counts = Counts()
    found = [
        by_size.all_gather(torch.full((2, 3), 10 * rank.rank + k, dtype=dtype), counts)
        for k in range(5)
        for dtype in (torch.float64, torch.int64, torch.bfloat16)
    ]
    return [*found, by_size.all_gather(torch.empty(0, 3), counts)]


def ways_agreed_on(rank: Rank, fails: str) -> tuple[list[str], list[str]]:
    """The ways through symmetric memory that a rank has, and what it asked of that memory."""
    memory = FakeMemory(rank.rank, fails)
    assert isinstance(rank.collectives, TorchCollectives)
    ways = ways_through_memory(rank.collectives, rank.device, memory)
    return [way.name for way in ways], memory.asked


def asked_for_memory(rank: Rank, gpus: int = 2, shared: bool = False) -> bool:
    """Whether a rank whose GPUs reach each other tries symmetric memory, as its environment has it.

    Args:
        shared: whether PyTorch lets ranks share one.
    """
    collectives: Any = rank.collectives
    asked: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: gpus)
        patch.setattr(torch.cuda, "can_device_access_peer", lambda *_: True)
        patch.setenv(symmetric_memory.OVERLAPPING, str(int(shared)))
        patch.setattr(symmetric_memory, "ways_through_memory", lambda *_: asked.append(True) or [])
        assert symmetric_memory.with_symmetric_memory(collectives, rank.device) is collectives
    return bool(asked)
