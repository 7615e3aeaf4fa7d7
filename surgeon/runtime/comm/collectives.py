"""Collectives: a small interface that counts calls and bytes, and its implementations.

A rank has one `Collectives` per group of ranks. They are asynchronous: `all_reduce` starts one and returns a function
that waits for it, so that several can be in flight. `Compressed`, `EmulatedLink` and, for GPUs, those of
`shared_memory.py` wrap others.

An emulated link has the cost of slower wires, measured where there are none. Only waiting is emulated. A transfer takes
its time from when it is started, so that what a rank computes meanwhile hides it, as on a real link.

`Peers` are the ranks that a rank exchanges tensors with.
"""

from __future__ import annotations

import math
import operator
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]  # torch does export them

from surgeon.machine import parse_size, show_size
from surgeon.processes.rendezvous import StoreAddress
from surgeon.runtime.comm.wires import WIRES
from surgeon.runtime.plan.placement import Group

# Longer than any prefill; a rank that dies is noticed by the process that started it long before.
TIMEOUT = timedelta(minutes=10)
Wait = Callable[[], Tensor]  # for what travels; gives what has come of it


@dataclass
class Counts:
    """Collectives that one rank has started, and the bytes of their operands on this rank."""

    all_reduces: int = 0
    all_gathers: int = 0
    bytes: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*map(operator.add, vars(self).values(), vars(other).values()))


class Collectives(ABC):
    """One rank's connection to the ranks of a group.

    Attributes:
        rank: this rank.
        group: the ranks of the group, this one among them.
        capturable: whether a CUDA graph can hold them: they wait on the device only, never in this process.
        recordable: whether sums can be part of a recording (kernels/recording.py), which knows no other waiting.
    """

    capturable = False
    recordable = False

    def __init__(self, rank: int, group: Group) -> None:
        self.rank = rank
        self.group = group
        self._subgroups: dict[Group, Collectives] = {}

    def all_reduce(self, tensor: Tensor, counts: Counts, at_once: bool = False) -> Wait:
        """Start summing a tensor over the group; waiting on the result gives the sum.

        Every rank of the group calls this with the same shape and dtype, in the same order. The tensor belongs to the
        collective from then on.

        Args:
            counts: where to count the call, if anything is sent.
            at_once: whether the result is waited for before anything else is computed.
        """
        if len(self.group) == 1:
            return lambda: tensor
        counts.all_reduces += 1
        counts.bytes += tensor.nbytes
        return self._all_reduce(tensor, at_once)

    def all_gather(self, tensor: Tensor, counts: Counts) -> Tensor:
        """Join the group's tensors, all of one shape, along a new first dimension in the order of the ranks."""
        return self.start_all_gather(tensor, counts, at_once=True)()

    def start_all_gather(self, tensor: Tensor, counts: Counts, at_once: bool = False) -> Wait:
        """Start to join them; waiting on the result gives the joined tensors."""
        if len(self.group) == 1:
            return lambda: tensor[None]
        counts.all_gathers += 1
        counts.bytes += tensor.nbytes
        return self._all_gather(tensor, at_once)

    @property
    def exact(self) -> Collectives:
        """Collectives of the same ranks without loss of precision."""
        return self

    def subgroup(self, group: Group) -> Collectives:
        """The connection to some ranks of this group only.

        Every rank of this group asks for the same subgroups in the same order, those it is not in among them.
        """
        if group == self.group:
            return self
        if group not in self._subgroups:
            self._subgroups[group] = self._connect(group)
        return self._subgroups[group]

    @abstractmethod
    def _connect(self, group: Group) -> Collectives: ...

    @abstractmethod
    def _all_reduce(self, tensor: Tensor, at_once: bool) -> Wait: ...

    @abstractmethod
    def _all_gather(self, tensor: Tensor, at_once: bool) -> Wait: ...


class Around(Collectives):
    """Other collectives of the same ranks, which do all that is not done otherwise here."""

    def __init__(self, inner: Collectives) -> None:
        super().__init__(inner.rank, inner.group)
        self.inner = inner
        self.capturable = inner.capturable
        self.recordable = inner.recordable

    def around(self, inner: Collectives) -> Collectives:
        """Make the same around others, of these ranks or of some of them."""
        other = copy(self)
        other.group = inner.group
        other._subgroups = {}
        other.inner = inner
        return other

    @property
    def exact(self) -> Collectives:
        exact = self.inner.exact
        if exact is self.inner:
            return self
        return self.around(exact)

    def _connect(self, group: Group) -> Collectives:
        return self.around(self.inner.subgroup(group))

    def _all_reduce(self, tensor: Tensor, at_once: bool) -> Wait:
        return self.inner._all_reduce(tensor, at_once)

    def _all_gather(self, tensor: Tensor, at_once: bool) -> Wait:
        return self.inner._all_gather(tensor, at_once)


class Compressed(Around):
    """Other collectives, whose reductions of floating-point numbers go by a wire; all-gathers stay as they are.

    Every rank sends its packed part to all others and adds up what arrives, its own part as the others see it, so that
    all have the same numbers. A reduction is counted as the all-gather of packed bytes that it is.

    Args:
        wire: one of WIRES.
    """

    def __init__(self, inner: Collectives, wire: str) -> None:
        super().__init__(inner)
        self.recordable = False
        self.wire = wire

    @property
    def exact(self) -> Collectives:
        return self.inner

    def all_reduce(self, tensor: Tensor, counts: Counts, at_once: bool = False) -> Wait:
        """Start summing a tensor over the group, approximately; waiting on the result gives the sum."""
        if len(self.group) == 1 or not tensor.is_floating_point():
            return self.inner.all_reduce(tensor, counts, at_once)
        wire = WIRES[self.wire]
        shape = tensor.shape
        dtype = tensor.dtype
        wait = self.inner.start_all_gather(wire.pack(tensor), counts, at_once)
        return lambda: wire.unpack(wait(), shape, dtype).sum(0).to(dtype)

    def _all_reduce(self, tensor: Tensor, at_once: bool) -> Wait:
        return self.all_reduce(tensor, Counts(), at_once)


class Unconnected(Collectives):
    """Ranks that never wait for each other and add nothing up: wrong results, as fast as can be.

    No way of connecting ranks is faster (the "upper bound" of Ladder Residual, table 2).
    """

    capturable = True
    recordable = True

    def all_reduce(self, tensor: Tensor, counts: Counts, at_once: bool = False) -> Wait:  # noqa: ARG002
        """Give this rank's own tensor."""
        return self._all_reduce(tensor, at_once)

    def start_all_gather(
        self,
        tensor: Tensor,
        counts: Counts,  # noqa: ARG002
        at_once: bool = False,
    ) -> Wait:
        """Give this rank's own tensor, once for each rank."""
        return self._all_gather(tensor, at_once)

    def _connect(self, group: Group) -> Collectives:
        return Unconnected(self.rank, group)

    def _all_reduce(self, tensor: Tensor, _: bool) -> Wait:
        return lambda: tensor

    def _all_gather(self, tensor: Tensor, _: bool) -> Wait:
        return lambda: tensor.expand(len(self.group), *tensor.shape)


class Alone(Unconnected):
    """A group of one rank: nothing is sent and nothing is counted."""

    def __init__(self) -> None:
        super().__init__(0, (0,))


class TorchCollectives(Collectives):
    """Collectives of `torch.distributed`: gloo, or NCCL on GPUs.

    NCCL computes sums that travel behind a late step by streams of high priority, others by the current one.
    """

    def __init__(
        self, rank: int, group: Group, process_group: Any = None, device: torch.device | None = None
    ) -> None:
        super().__init__(rank, group)
        self.process_group = process_group  # None is all ranks
        self.device = device
        self.capturable = device is not None

    @classmethod
    def connect(
        cls,
        backend: str,
        rank: int,
        ranks: int,
        rendezvous: Path | StoreAddress,
        device: torch.device | None = None,
    ) -> TorchCollectives:
        """Meet the other ranks by gloo or NCCL, at a new file (its path is never taken, unlike a port) or a store."""
        store: Any
        if isinstance(rendezvous, Path):
            store = FileStore(str(rendezvous), ranks)
        else:
            store = rendezvous.connect()
        bound = group_options(device if backend == "nccl" else None)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=ranks, timeout=TIMEOUT, **bound
        )
        return cls(rank, tuple(range(ranks)), device=bound.get("device_id"))

    def _connect(self, group: Group) -> Collectives:
        made = dist.new_group(list(group), **group_options(self.device))
        return TorchCollectives(self.rank, group, made, self.device)

    def _all_reduce(self, tensor: Tensor, at_once: bool) -> Wait:
        work: Any = dist.all_reduce(tensor, group=self.process_group, async_op=not at_once)
        return partial(_after, work, tensor)

    def _all_gather(self, tensor: Tensor, at_once: bool) -> Wait:
        gathered = tensor.new_empty(len(self.group), *tensor.shape)
        own = tensor.reshape(-1)
        work: Any = dist.all_gather_into_tensor(
            gathered.view(-1), own, group=self.process_group, async_op=not at_once
        )
        return partial(_after, work, gathered)


def _after(work: Any, result: Tensor) -> Tensor:
    if work is not None:
        work.wait()
    return result


def group_options(device: torch.device | None) -> dict[str, Any]:
    """Options of an NCCL group on a GPU, if any: connected at once, with streams of high priority."""
    if device is None:
        return {}
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    return {"device_id": device, "pg_options": options}


SPIN_SECONDS = 0.0002  # a sleep may end this much late


@dataclass(frozen=True)
class Link:
    """A rank's link.

    Attributes:
        delay: seconds from a transfer's last byte being sent to its end, whatever its size.
        bandwidth: bytes per second that a rank can send.
    """

    delay: float = 0.0
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        if not 0 <= self.delay < math.inf:
            raise ValueError(f"the delay of a link must be at least 0 seconds, not {self.delay:g}")
        if not self.bandwidth > 0:
            raise ValueError(
                f"the bandwidth of a link must be above 0 bytes per second, not {self.bandwidth:g}"
            )

    def __str__(self) -> str:
        if self.delay >= 1e-3:
            delay = f"{1e3 * self.delay:g}ms"
        else:
            delay = f"{1e6 * self.delay:g}us"
        parts = [f"link of {delay}"] if self.delay else []
        if self.bandwidth < math.inf:
            parts += [f"{show_size(self.bandwidth)}/s"]
        return ", ".join(parts) or "link"


def parse_link(delay: str | None, bandwidth: str | None) -> Link | None:
    """Read a link such as "1ms" and "1GB" (or "1GB/s"); None if by nothing."""
    if delay is None and bandwidth is None:
        return None
    seconds = 0.0
    if delay is not None:
        seconds = parse_seconds(delay)
    return Link(seconds, math.inf if bandwidth is None else parse_size(bandwidth.removesuffix("/s")))


def parse_seconds(text: str) -> float:
    """Read a duration such as 1ms, 200us or 0.5s."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|ms|us)\s*", text)
    if match is None:
        raise ValueError(f"{text!r} is no delay; write e.g. 1ms, 200us or 0.5s")
    return float(match[1]) / {"s": 1, "ms": 1_000, "us": 1_000_000}[match[2]]


class SystemClock:
    """The machine's clock."""

    def now(self) -> float:
        return time.perf_counter()

    def wait_until(self, when: float) -> None:
        """Sleep for most of the time; the rest is too short for that."""
        asleep = when - self.now() - SPIN_SECONDS
        if asleep > 0:
            time.sleep(asleep)
        while self.now() < when:
            pass


@dataclass
class Line:
    """One rank's link in use: transfers in flight share the bandwidth, one after the other."""

    link: Link
    clock: SystemClock
    free_from: float = -math.inf

    def send(self, size: float) -> float:
        """Start a transfer of so many bytes now; returns when it ends."""
        self.free_from = max(self.clock.now(), self.free_from) + size / self.link.bandwidth
        return self.free_from + self.link.delay


class EmulatedLink(Around):
    """Other collectives, as if there were a link of a certain delay and bandwidth between the ranks.

    A rank of n sends 2 (n - 1) / n of its bytes in an all-reduce and n - 1 times its bytes in an all-gather, as around
    a ring. It waits in Python.
    """

    def __init__(self, inner: Collectives, link: Link, clock: SystemClock | None = None) -> None:
        super().__init__(inner)
        self.capturable = False
        self.recordable = False
        self.line = Line(link, clock or SystemClock())  # that other groups of the rank send through, too

    def _all_reduce(self, tensor: Tensor, _: bool) -> Wait:
        others = len(self.group) - 1
        end = self.line.send(2 * others / len(self.group) * tensor.nbytes)
        return self._ending_at(end, self.inner._all_reduce(tensor, False))

    def _all_gather(self, tensor: Tensor, _: bool) -> Wait:
        end = self.line.send((len(self.group) - 1) * tensor.nbytes)
        return self._ending_at(end, self.inner._all_gather(tensor, False))

    def _ending_at(self, end: float, wait: Wait) -> Wait:
        def wait_longer() -> Tensor:
            result = wait()
            self.line.clock.wait_until(end)
            return result

        return wait_longer


Sent = tuple[Counts, Counts]


@dataclass
class Phase:
    """The cost of forward passes of one kind, as one rank measured it.

    Attributes:
        tokens: that went through them; new: that they brought, on rank 0.
        halved: passes that were computed in two halves.
        layers, vocabulary: collectives of the program's steps and forks, and of the embedding and the output head.
    """

    seconds: float = 0.0
    passes: int = 0
    tokens: int = 0
    new: int = 0
    halved: int = 0
    layers: Counts = field(default_factory=Counts)
    vocabulary: Counts = field(default_factory=Counts)

    @contextmanager
    def apart(self) -> Iterator[Sent]:
        """Count the collectives of layers and vocabulary inside apart."""
        before = (self.layers, self.vocabulary)
        sent = (Counts(), Counts())
        self.layers, self.vocabulary = sent
        try:
            yield sent
        finally:
            self.layers, self.vocabulary = before

    def add(self, sent: Sent) -> None:
        """Count what was sent apart."""
        self.layers = self.layers + sent[0]
        self.vocabulary = self.vocabulary + sent[1]


class Peers:
    """One rank's connection to the ranks of a program, and the place where its use is counted.

    Attributes:
        everybody: all ranks of the program.
        collectives: of all of them, and of groups by `subgroup`.
        counts: of the passes computed now; may be replaced.
    """

    def __init__(self, collectives: Collectives) -> None:
        self.rank = collectives.rank
        self.everybody = collectives.group
        self.collectives = collectives
        self.counts = Phase()
