"""Collectives between ranks of one machine through memory that all of them see: of CPUs, or of GPUs.

A rank that starts a reduction writes its part into a slot, says so, and goes on; to wait is to look until all have
written, then to add the parts up in the order of the ranks (so that every rank gets the same bits). Two CPU ranks need
some microseconds where sockets take milliseconds.

GPUs sum through memory that each of them can reach (`torch.distributed._symmetric_memory`). An operand is copied into
it, and then every GPU adds up all of them (one shot), or its share of them, which the others then copy (two shots), or
has the switch add them up (multimem). No GPU has run them yet.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import Structure, addressof, c_char, c_int64, c_void_p
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from surgeon.machine import show_size, usable_cores
from surgeon.runtime.comm.collectives import TIMEOUT, Around, Collectives, Counts, TorchCollectives, Wait
from surgeon.runtime.kernels.functions import NOTES
from surgeon.runtime.kernels.recording import Recording
from surgeon.runtime.plan.placement import Group
from surgeon.words import first_line, join_words

SLOTS = 4  # reductions in flight; a ladder has two
# Per rank and slot, of which what is written to is taken; longer tensors travel in several pieces.
SLOT_BYTES = 1 << 21
LINE = 8  # words of 8 bytes in a cache line: every flag has its own

# Looking for the others: for about a millisecond where every rank has a core, hardly where ranks outnumber the cores,
# then sleeping. Giving way (sched_yield) instead costs a whole time slice of whoever else wants the core, even of the
# lowest priority: on two busy cores two ranks of 75M parameters took 160 ms per pass with it and 54 ms without, four
# ranks 200 and 165. Where waiting lasts longer than that, because whoever is waited for has no core, ranks look for a
# shorter and shorter time, so that it may have this one's. Sleeps grow with the time waited, so that a rank with
# nothing to do costs next to nothing and is late by a twentieth at most.
SPINS = 20_000
FEWEST_SPINS = 200
SPIN_SECONDS = 0.001  # that the former take, about
SLEEP_SECONDS = 0.00002
LONGEST_SLEEP_SECONDS = 0.005
LATENESS = 0.05


def create_memory(ranks: int) -> int:
    """Make memory without a name for so many ranks, which goes when the last process that has its descriptor ends."""
    if hasattr(os, "memfd_create"):  # Linux: not subject to the size of /dev/shm
        descriptor = os.memfd_create("surgeon-collectives")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    contiguous_groups = ranks * (ranks - 1) // 2
    # Nothing is taken until it is written to.
    os.ftruncate(descriptor, contiguous_groups * _region_bytes(ranks))
    return descriptor


def _region_bytes(ranks: int) -> int:
    flags = 2 * SLOTS * ranks * LINE * 8
    return (
        -(-flags // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY + SLOTS * ranks * SLOT_BYTES
    )


class Exchanges(Structure):
    """A rank's view of a region for recorded sums (kernels/exchange.h explains the fields)."""

    _fields_ = (
        ("started", c_int64),
        ("failed", c_int64),
        ("words", c_void_p),
        ("room", c_void_p),
        *((name, c_int64) for name in ("slots", "room_bytes", "line", "ranks", "members", "member")),
        *((f"{name}_microseconds", c_int64) for name in ("spin", "fewest", "most")),
        ("timeout_seconds", c_int64),
    )


class SharedMemoryCollectives(Collectives):
    """One rank's view of a group's region of the shared memory.

    A region holds, for each slot and rank, the number of the last exchange that the rank has written there, that of
    the last one it has read there, and room for one tensor.
    """

    recordable = True

    def __init__(
        self,
        rank: int,
        group: Group,
        descriptor: int,
        ranks: int,
        region: int = 0,
        crowded: bool | None = None,
    ) -> None:
        super().__init__(rank, group)
        self.descriptor = descriptor
        self.ranks = ranks
        self.crowded = crowded
        if crowded is None:
            self.crowded = ranks > usable_cores()
        self.most_spins = SPINS
        if self.crowded:
            self.most_spins = FEWEST_SPINS
        self.spins = self.most_spins  # as many as have paid lately
        self.regions_used = 1
        if rank in group:
            self.member = group.index(rank)
        else:
            self.member = -1
        size = _region_bytes(ranks)
        self.memory = mmap.mmap(descriptor, size, offset=region * size)
        self.words = memoryview(self.memory).cast("q")
        room = SLOTS * ranks * SLOT_BYTES
        self.room = torch.frombuffer(self.memory, dtype=torch.uint8, offset=size - room, count=room)
        memory = addressof(c_char.from_buffer(self.memory))
        most = round(1e6 * SPIN_SECONDS * self.most_spins / SPINS)
        fewest = round(1e6 * SPIN_SECONDS * FEWEST_SPINS / SPINS)
        layout = SLOTS, SLOT_BYTES, LINE, ranks, len(group), self.member
        waiting = most, fewest, most, round(TIMEOUT.total_seconds())
        self.exchanges = Exchanges(0, 0, memory, memory + size - room, *layout, *waiting)
        self.in_flight: list[Wait | None] = [None] * SLOTS
        self.views: dict[tuple[int, int, torch.dtype], list[Tensor]] = {}

    def _connect(self, group: Group) -> Collectives:
        assert len(self.group) == self.ranks, "only the group of all ranks knows which regions are taken"
        region = self.regions_used
        self.regions_used = self.regions_used + 1
        return SharedMemoryCollectives(
            self.rank, group, self.descriptor, self.ranks, region, self.crowded
        )

    def _all_reduce(self, tensor: Tensor, _: bool = False) -> Wait:
        recording = NOTES.get()
        if isinstance(recording, Recording):
            return self._note(recording, tensor, self._all_reduce, "finish_sum", tensor.shape)
        results = [self._start(piece, _add) for piece in _pieces(tensor)]
        return lambda: _join_pieces(results, 0).view(tensor.shape)

    def _all_gather(self, tensor: Tensor, _: bool = False) -> Wait:
        shape = len(self.group), *tensor.shape
        recording = NOTES.get()
        if isinstance(recording, Recording):
            return self._note(recording, tensor, self._all_gather, "finish_gather", shape)
        results = [self._start(piece, torch.stack) for piece in _pieces(tensor)]
        return lambda: _join_pieces(results, 1).view(shape)

    def _note(
        self,
        recording: Recording,
        tensor: Tensor,
        exchange: Callable[[Tensor], Wait],
        finishing: str,
        shape: Sequence[int],
    ) -> Wait:
        """Start an exchange of a pass that is recorded, and note it with the kernel that finishes it."""
        count = tensor.numel()
        if (
            tensor.dtype != torch.float32
            or tensor.nbytes > self.exchanges.room_bytes
            or not tensor.is_contiguous()
        ):
            recording.fail(f"an exchange of {tensor.nbytes} bytes of {tensor.dtype}")
        number = self.exchanges.started
        if self.in_flight[number % SLOTS] is not None:
            recording.fail(f"more than {SLOTS} exchanges in flight")
        recording.checks.add(self.check)
        recording.note("start_exchange", addressof(self.exchanges), tensor.data_ptr(), count)
        with recording.pause():
            wait = exchange(tensor)
        results: list[Tensor] = []

        def finish() -> Tensor:
            if not results:
                results.append(recording.empty(shape))
                back = self.exchanges.started - number
                with recording.pause():
                    results[0].copy_(wait())
                recording.note(finishing, addressof(self.exchanges), back, count, results[0].data_ptr())
            return results[0]

        return finish

    def _start(self, tensor: Tensor, combine: Callable[[list[Tensor]], Tensor]) -> Wait:
        """Write this rank's flat part; returns what waits until all have, and combines the parts."""
        number = self.exchanges.started
        self.exchanges.started = number + 1
        slot = number % SLOTS
        before = self.in_flight[slot]
        # Nobody has asked for its result yet, and others may be waiting for it to be read.
        if before is not None:
            before()
        self._wait_until_all(self._flag(slot, 0, read=True), number - SLOTS + 1)
        key = slot, tensor.numel(), tensor.dtype
        if key not in self.views:
            rooms = self.room.view(SLOTS, self.ranks, SLOT_BYTES)[
                slot, : len(self.group), : tensor.nbytes
            ]
            self.views[key] = [room.view(tensor.dtype) for room in rooms]
        views = self.views[key]
        views[self.member].copy_(tensor)
        fence()
        self.words[self._flag(slot, self.member)] = number + 1
        combined: list[Tensor] = []

        def result() -> Tensor:
            if not combined:
                self._wait_until_all(self._flag(slot, 0), number + 1)
                fence()
                combined.append(combine(views))
                fence()
                self.words[self._flag(slot, self.member, read=True)] = number + 1
                self.in_flight[slot] = None
            return combined[0]

        self.in_flight[slot] = result
        return result

    def _flag(self, slot: int, member: int, read: bool = False) -> int:
        """The word with the last exchange, counted from 1, that a member has written to a slot or read from it."""
        return ((read * SLOTS + slot) * self.ranks + member) * LINE

    def _wait_until_all(self, first_flag: int, number: int) -> None:
        words = self.words
        for member in range(len(self.group)):
            flag = first_flag + member * LINE
            spins = self.spins
            began = time.monotonic()
            while words[flag] < number and spins:
                spins -= 1
            if words[flag] < number:
                while words[flag] < number:
                    waited = time.monotonic() - began
                    if waited >= TIMEOUT.total_seconds():
                        raise self._in_vain(waited, member)
                    time.sleep(min(max(SLEEP_SECONDS, LATENESS * waited), LONGEST_SLEEP_SECONDS))
                longer = time.monotonic() - began < SPIN_SECONDS
                self.spins = max(
                    FEWEST_SPINS, min(2 * self.spins if longer else self.spins // 2, self.most_spins)
                )

    def check(self) -> None:
        """Raise TimeoutError if a sum of a recorded pass has waited in vain."""
        if self.exchanges.failed:
            raise self._in_vain(self.exchanges.timeout_seconds, self.exchanges.failed - 1)

    def _in_vain(self, waited: float, member: int) -> TimeoutError:
        return TimeoutError(
            f"rank {self.rank} has waited {waited:.0f} s for rank {self.group[member]}, in vain"
        )


def _add(parts: list[Tensor]) -> Tensor:
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    flat = tensor.reshape(-1)
    if flat.nbytes <= SLOT_BYTES:
        return (flat,)
    pieces: tuple[Tensor, ...] = flat.split(SLOT_BYTES // flat.element_size())
    return pieces


def _join_pieces(waits: Sequence[Wait], dim: int) -> Tensor:
    results = [wait() for wait in waits]
    if len(results) == 1:
        return results[0]
    return torch.cat(results, dim)


_LOCK = threading.Lock()


def fence() -> None:
    """Keep reads and writes before this from moving behind those after it, and the other way round.

    A lock is released with the one order and taken with the other, so that doing it twice keeps both; processors of the
    ARM family need it, those of the x86 family do not.
    """
    with _LOCK:
        pass
    with _LOCK:
        pass


MOST_BYTES = 4 << 20
ONE_SHOT_BYTES = 256 << 10  # an estimate, for more than two ranks
DTYPES = torch.float32, torch.bfloat16  # of which these operations take operands
TWO_SHOT_RANKS = 2, 4, 8  # PyTorch has no other kernel whose result lies apart from its operand
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
    """One of these operations on the memory of a group: sums small operands in place, on the current stream.

    Attributes:
        rooms: of the current stream and of the one beside it. Each is an allocation of its own: the words by which
            ranks wait for each other come with it, and kernels of two streams must not share these.
        handle: PyTorch's, of the current stream's room.
        most: bytes of an operand.
    """

    name: str
    ranks: int
    group: str
    rooms: tuple[Tensor, Tensor]
    handle: Any = None
    most: int = MOST_BYTES

    def fits(self, tensor: Tensor) -> bool:
        """Tell whether the operation takes it, by its layout, dtype and size."""
        return (
            tensor.is_contiguous()
            and tensor.dtype in DTYPES
            and tensor.nbytes <= self.most
            and not tensor.nbytes % (16 * self.ranks)
        )

    def __call__(self, tensor: Tensor, aside: bool) -> None:
        """Sum one; those on the side stream have room of their own, because two may be summed at a time."""
        flat = tensor.view(-1)
        operand = self.rooms[aside][: tensor.nbytes].view(tensor.dtype)
        operand.copy_(flat)
        OPERATIONS[self.name](operand, self.group, flat)

    def gather(self, tensor: Tensor) -> Tensor:
        """Copy what all ranks have, of any dtype, on the current stream."""
        operand = self.rooms[0][: tensor.nbytes].view(tensor.dtype)
        operand.copy_(tensor.reshape(-1))
        gathered = tensor.new_empty(self.ranks, *tensor.shape)
        self.handle.barrier()  # all have written
        for rank, part in enumerate(gathered.view(self.ranks, tensor.numel())):
            part.copy_(self.handle.get_buffer(rank, operand.shape, operand.dtype))
        self.handle.barrier()  # all have read
        return gathered


def by_bytes(ways: Sequence[SymmetricSum], ranks: int) -> list[SymmetricSum]:
    """Choose ways, each for operands up to a size, by how many bytes a rank reads.

    In one shot it reads n - 1 operands of n ranks, by a ring or in two shots 2 (n - 1) / n: as many where n is 2. With
    more ranks one shot pays as long as reading the rest takes less than for ranks to meet once more.
    """
    one_shot, *others = ways
    if ranks == 2:
        return [one_shot]
    return [replace(one_shot, most=ONE_SHOT_BYTES), *others[-1:]]


def side_stream(
    device: torch.device, cuda: Any = torch.cuda
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """A stream of a GPU beside the current one, before it where both have work.

    Returns:
        Computes something behind all that the current stream has to do so far, and returns what joins it.
    """
    stream = cuda.Stream(device, priority=-1)

    def start(compute: Callable[[], None]) -> Callable[[], None]:
        stream.wait_stream(cuda.current_stream(device))
        with cuda.stream(stream):
            compute()
            event = stream.record_event()
        return lambda: cuda.current_stream(device).wait_event(event)

    return start


class BySize(Around):
    """Other collectives, whose small sums go other ways.

    Where ranks share a GPU and the others are gloo's, a recorded pass has all that it sends go these ways.
    """

    def __init__(
        self,
        inner: Collectives,
        chosen: Sequence[SymmetricSum],
        aside: Callable[[Callable[[], None]], Callable[[], None]],
        connect: Callable[[Collectives], Collectives] = lambda inner: inner,
    ) -> None:
        super().__init__(inner)
        self.chosen = chosen
        self._aside = aside
        self._wrapped = connect
        self._gathers = not inner.capturable and shares_gpus()
        self.capturable = inner.capturable or self._gathers

    def __str__(self) -> str:
        above = "gloo above" if self._gathers else "NCCL above"
        return ", ".join([*(f"{way.name} up to {show_size(way.most)}" for way in self.chosen), above])

    def around(self, inner: Collectives) -> Collectives:
        return self._wrapped(inner)

    def _all_reduce(self, tensor: Tensor, at_once: bool) -> Wait:
        way = next((way for way in self.chosen if way.fits(tensor)), None)
        if way is None:
            return self.inner._all_reduce(tensor, at_once)
        if at_once:
            way(tensor, False)
            return lambda: tensor
        join = self._aside(lambda: way(tensor, True))

        def wait() -> Tensor:
            join()
            return tensor

        return wait

    def _all_gather(self, tensor: Tensor, at_once: bool) -> Wait:
        if not self._gathers or tensor.nbytes > MOST_BYTES:
            return self.inner._all_gather(tensor, at_once)
        gathered = self.chosen[0].gather(tensor)
        return lambda: gathered


def shares_gpus() -> bool:
    """Tell whether ranks may share a GPU in symmetric memory."""
    return os.environ.get(OVERLAPPING) == "1"


def with_symmetric_memory(inner: TorchCollectives, device: torch.device) -> Collectives:
    """Send small sums of ranks, all on one machine, through that memory where it can be had.

    Every rank of the group calls this at the same time. `SURGEON_SYMMETRIC_MEMORY=off` in the environment leaves it,
    and so does `NCCL_P2P_DISABLE=1`. With `TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1` ranks may share a GPU.

    Raises:
        RuntimeError: if they are to share one, and this memory cannot be had.
    """
    group = inner.group
    if inner.rank not in group or len(group) == 1:
        return inner
    gpus = range(torch.cuda.device_count())
    apart = [
        other
        for other in gpus
        if other != device.index and not torch.cuda.can_device_access_peer(device, other)
    ]
    enough = len(gpus) >= len(group) or shares_gpus()
    wanted = is_allowed(os.environ) and enough
    if wanted and apart:
        others = join_words(f"GPU {other}" for other in apart)
        print(
            f"rank {inner.rank} sums by NCCL alone: GPU {device.index} cannot reach the memory of {others}",
            file=sys.stderr,
            flush=True,
        )
    if not _holds_everywhere(inner, device, wanted and not apart):
        return inner
    ways = ways_through_memory(inner, device)
    if not ways:
        return inner

    def connect(some: Collectives) -> Collectives:
        if isinstance(some, TorchCollectives):
            return with_symmetric_memory(some, device)
        return some

    found = BySize(inner, by_bytes(ways, len(group)), side_stream(device), connect)
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
        if shares_gpus():  # who asked for it wants to know, and not the same by other ways
            raise
        print(f"rank {inner.rank} sums by NCCL alone: {first_line(error)}", file=sys.stderr, flush=True)
        return []
    cast = _holds_everywhere(inner, device, bool(handles[-1].multicast_ptr))
    names = [each for each in OPERATIONS if cast or each != "multimem"]
    if len(inner.group) not in TWO_SHOT_RANKS:
        names.remove("two shots")
    return [
        SymmetricSum(each, len(inner.group), members.group_name, (rooms[0], rooms[1]), handles[0])
        for each in names
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
