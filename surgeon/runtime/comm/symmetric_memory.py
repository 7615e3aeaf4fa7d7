"""Sums through memory of the GPUs of one machine that each of them can reach (`torch.distributed._symmetric_memory`).

An operand is copied into that memory, and then every GPU adds up all of them (one shot), or its share of them, which
the others then copy (two shots), or has the switch add them up (multimem). No GPU has run them yet.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from surgeon.errors import first_line
from surgeon.machine import show_size
from surgeon.runtime.comm.collectives import Around, Collectives, Counts, TorchCollectives, Wait

MOST_BYTES = 4 << 20
ONE_SHOT_BYTES = 256 << 10  # an estimate, for more than two ranks
DTYPES = torch.float32, torch.bfloat16  # of which these operations take operands
OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
# Takes an operand in symmetric memory, the group's name, and the result.
Operation = Callable[[Tensor, str, Tensor], object]


OPERATIONS: dict[str, Operation] = {
    "one shot": lambda operand, group, result: torch.ops.symm_mem.one_shot_all_reduce_out(
        operand, "sum", group, result
    ),
    "two shots": lambda operand, group, result: torch.ops.symm_mem.two_shot_all_reduce_out(
        operand, "sum", group, result
    ),
    "multimem": lambda operand, group, result: result.copy_(
        torch.ops.symm_mem.multimem_all_reduce_(operand, "sum", group)
    ),
}


@dataclass(frozen=True, eq=False)
class SymmetricSum:
    """One of these operations on the memory of a group: sums small operands in place, on the current stream."""

    name: str
    ranks: int
    group: str
    rooms: tuple[Tensor, Tensor]

    def fits(self, tensor: Tensor) -> bool:
        """Tell whether the operation takes its dtype and size."""
        return (
            tensor.dtype in DTYPES
            and tensor.nbytes <= MOST_BYTES
            and not tensor.nbytes % (16 * self.ranks)
        )

    def __call__(self, tensor: Tensor, aside: bool) -> None:
        """Sum one; those on the side stream have room of their own, because two may be summed at a time."""
        flat = tensor.view(-1)
        operand = self.rooms[aside][: tensor.nbytes].view(tensor.dtype)
        operand.copy_(flat)
        OPERATIONS[self.name](operand, self.group, flat)


class Bound(NamedTuple):
    """The way of operands up to so many bytes."""

    bytes: int
    way: SymmetricSum


def bounds(ways: Sequence[SymmetricSum], ranks: int) -> tuple[Bound, ...]:
    """Choose the way for operands up to each size, by how many bytes a rank reads.

    In one shot it reads n - 1 operands of n ranks, by a ring or in two shots 2 (n - 1) / n: as many where n is 2. With
    more ranks one shot pays as long as reading the rest takes less than for ranks to meet once more.
    """
    one_shot, *others = ways
    if ranks == 2:
        return (Bound(MOST_BYTES, one_shot),)
    return Bound(ONE_SHOT_BYTES, one_shot), Bound(MOST_BYTES, others[-1])


class SideStream:
    """A stream of a GPU beside the current one, before it where both have work."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._cuda = cuda
        self._stream = cuda.Stream(device, priority=-1)

    def start(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Compute something behind all that the current stream has to do so far; returns what joins it."""
        self._stream.wait_stream(self._cuda.current_stream(self._device))
        within: AbstractContextManager[None] = self._cuda.stream(self._stream)
        with within:
            compute()
            event = self._stream.record_event()
        return lambda: self._cuda.current_stream(self._device).wait_event(event)


class BySize(Around):
    """Other collectives, whose small sums go other ways."""

    def __init__(
        self,
        inner: Collectives,
        chosen: Sequence[Bound],
        side: SideStream,
        connect: Callable[[Collectives], Collectives] = lambda inner: inner,
    ) -> None:
        super().__init__(inner)
        self.chosen = tuple(chosen)
        self._side = side
        self._wrapped = connect

    def __str__(self) -> str:
        return ", ".join(
            [*(f"{way.name} up to {show_size(size)}" for size, way in self.chosen), "NCCL above"]
        )

    def around(self, inner: Collectives) -> Collectives:
        return self._wrapped(inner)

    def _way(self, tensor: Tensor) -> SymmetricSum | None:
        way = next((way for size, way in self.chosen if tensor.nbytes <= size), None)
        if way is not None and tensor.is_contiguous() and way.fits(tensor):
            return way
        return None

    def _all_reduce(self, tensor: Tensor, at_once: bool) -> Wait:
        way = self._way(tensor)
        if way is None:
            return self.inner._all_reduce(tensor, at_once)
        if at_once:
            way(tensor, False)
            return lambda: tensor
        join = self._side.start(lambda: way(tensor, True))

        def wait() -> Tensor:
            join()
            return tensor

        return wait


def with_symmetric_memory(inner: TorchCollectives, device: torch.device) -> Collectives:
    """Send small sums of ranks, all on one machine, through that memory where it can be had.

    Every rank of the group calls this at the same time. `SURGEON_SYMMETRIC_MEMORY=off` in the environment leaves it,
    and so does `NCCL_P2P_DISABLE=1`. With `TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1` ranks may share a GPU.
    """
    group = inner.group
    if inner.rank not in group or len(group) == 1:
        return inner
    gpus = range(torch.cuda.device_count())
    reached = all(
        torch.cuda.can_device_access_peer(device, other) for other in gpus if other != device.index
    )
    enough = len(gpus) >= len(group) or os.environ.get(OVERLAPPING) == "1"
    if not _holds_everywhere(inner, device, is_allowed(os.environ) and enough and reached):
        return inner
    ways = ways_through_memory(inner, device)
    if not ways:
        return inner

    def connect(some: Collectives) -> Collectives:
        if isinstance(some, TorchCollectives):
            return with_symmetric_memory(some, device)
        return some

    found = BySize(inner, bounds(ways, len(group)), SideStream(device), connect)
    if inner.rank == group[0]:
        print(f"sums of ranks {', '.join(map(str, group))}: {found}", file=sys.stderr, flush=True)
    return found


def is_allowed(environment: Mapping[str, str]) -> bool:
    """Tell whether GPUs may reach each other's memory, and may sum through it."""
    peers = (
        environment.get("NCCL_P2P_DISABLE", "0") == "0" and environment.get("NCCL_P2P_LEVEL") != "LOC"
    )
    return peers and environment.get("SURGEON_SYMMETRIC_MEMORY") != "off"


def ways_through_memory(
    inner: TorchCollectives, device: torch.device, memory: Any = None
) -> list[SymmetricSum]:
    """Prepare the operations that all ranks have, with memory for an operand of the current stream and one beside it.

    None where any rank cannot have or share such memory, which each then says. All agree after every step, so that none
    waits in the next one for another that has failed.
    """
    if memory is None:
        import torch.distributed._symmetric_memory as memory
    members: Any = inner.process_group or dist.group.WORLD
    rooms = list[Tensor]()
    handles = list[Any]()
    try:
        for _ in range(2):
            with _everywhere(inner, device):
                rooms.append(memory.empty(MOST_BYTES, dtype=torch.uint8, device=device))
        for room in rooms:
            with _everywhere(inner, device):
                handles.append(memory.rendezvous(room, members.group_name))
    except (
        RuntimeError
    ) as error:  # the driver or the machine does not let processes share memory of GPUs
        print(f"rank {inner.rank} sums by NCCL alone: {first_line(error)}", file=sys.stderr, flush=True)
        return []
    cast = _holds_everywhere(inner, device, bool(handles[-1].multicast_ptr))
    names = [each for each in OPERATIONS if cast or each != "multimem"]
    return [
        SymmetricSum(each, len(inner.group), members.group_name, (rooms[0], rooms[1])) for each in names
    ]


@contextmanager
def _everywhere(inner: TorchCollectives, device: torch.device) -> Iterator[None]:
    """Do something that fails here if it fails on any rank."""
    failure = None
    try:
        yield
    except RuntimeError as error:
        failure = error
    if not _holds_everywhere(inner, device, failure is None):
        raise failure or RuntimeError("other ranks have no memory to share")


def _holds_everywhere(inner: TorchCollectives, device: torch.device, here: bool) -> bool:
    total = inner.all_reduce(torch.tensor([float(here)], device=device), Counts(), True)()
    return total.item() == len(inner.group)
