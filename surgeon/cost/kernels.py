"""Kernels and collectives on paper.

A kernel takes as long as the larger of its arithmetic, at the share of the device's FLOP/s that products of so many
rows reach, and of its traffic, at the share of the memory's bandwidth that so many bytes reach (a roofline).

Collectives go by latency and bandwidth (alpha and beta). With n ranks, B bytes of one rank's operand, a the time of a
message and w the bandwidth that is reached:

    all-reduce   ring 2(n-1) a + 2(n-1)/n B/w    tree 2 log2(n) a + 2 B/w    one-shot a + (n-1) B/w    sharp a + B/w
    all-gather   ring  (n-1) a + (n-1) B/w       tree   log2(n) a + (n-1) B/w, one-shot and sharp a + (n-1) B/w

Each has a constant on top of that. Across nodes the ranks of each node first share out the sum (reduce-scatter), then
every rank sums its share with its peers on the other nodes, and the nodes gather it again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from surgeon.cost.clocks import Burst, Transfer
from surgeon.cost.hardware import Hardware, Host, Interconnect, Shares
from surgeon.runtime.comm.collectives import Link
from surgeon.runtime.plan.placement import Group

Nature = Literal["product", "attention", "copy"]


@dataclass(frozen=True)
class Kernel:
    """One launch.

    Attributes:
        name: by which a host may have its own launch time.
        nature: a matrix product, an attention over its cache, or reading and writing only.
        flops: floating-point operations, two for each multiply-add.
        moved: bytes read and written.
        rows: tokens of a product; of an attention, the new ones of a text.
        launches: how many kernels it takes.
    """

    name: str
    nature: Nature
    flops: float
    moved: float
    rows: float = 1
    launches: int = 1


@dataclass(frozen=True)
class RankSpeed:
    """A rank's share of a device in one dtype: peaks in FLOP/s and bytes/s, and the shares of them it reaches."""

    flops: float
    bandwidth: float
    shares: Shares
    host: Host

    @classmethod
    def of(cls, hardware: Hardware, dtype: str, ranks: int) -> RankSpeed:
        """Share a node among so many ranks."""
        if ranks > hardware.devices and not hardware.sharing:
            raise ValueError(f"{hardware.name} has {hardware.devices} devices in a node, not {ranks}")
        own = hardware.rank(-(-ranks // hardware.devices))
        return cls(hardware.device.peak(dtype), hardware.device.bandwidth, own.shares, own.host)

    def seconds(self, kernel: Kernel) -> float:
        """Seconds that a kernel runs, without its launch."""
        flops = self.shares.flops
        bandwidth = self.shares.bandwidth
        if kernel.nature == "attention":
            flops = self.shares.attention or flops
            bandwidth = self.shares.cache or bandwidth
        elif kernel.nature == "copy":
            bandwidth = self.shares.copies or bandwidth
        moving = kernel.moved / (self.bandwidth * bandwidth.at(max(kernel.moved, 1.0)))
        return max(moving, kernel.flops / (self.flops * flops.at(kernel.rows)) if kernel.flops else 0.0)


def burst(kernels: Sequence[Kernel], speed: RankSpeed, graphs: bool) -> Burst:
    """Run kernels one after the other, perhaps as part of a captured graph."""
    times = [speed.seconds(kernel) for kernel in kernels]
    host = speed.host
    if graphs:
        return Burst(sum(times), gaps=host.graph * sum(kernel.launches for kernel in kernels))
    launching = [
        kernel.launches * host.launch_seconds(kernel.name, kernel.nature, kernel.rows)
        for kernel in kernels
    ]
    if not host.asynchronous:
        return Burst(sum(times), gaps=sum(launching))
    lag = 0.0
    launched = 0.0
    left = sum(times)
    for own, seconds in zip(launching, times, strict=True):
        launched += own
        lag = max(lag, launched + left)
        left -= seconds
    return Burst(sum(times), host=launched, lag=lag)


Operation = Literal["all-reduce", "all-gather"]


# Of a collective: from when all ranks have begun, and in which a rank itself writes before that, and reads after it.
Seconds = tuple[float, float, float]


@dataclass(frozen=True)
class Wiring:
    """Connections of ranks.

    Attributes:
        within: between ranks of one node.
        across: between nodes; None if there is only one.
        node: ranks of a node.
        emulated: a link as `surgeon bench` emulates it, on top.
        graphs: whether collectives are part of a captured graph.
    """

    within: Interconnect | None
    across: Interconnect | None
    node: int
    host: Host
    emulated: Link | None = None
    graphs: bool = False

    def transfer(self, operation: Operation, size: int, group: Group) -> Transfer:
        """A collective of so many bytes of each rank, in a group of ranks."""
        line = delay = 0.0
        if self.emulated is not None:  # as `EmulatedLink` has ranks send
            others = len(group) - 1
            sent = (2 * others / len(group) if operation == "all-reduce" else others) * size
            line = sent / self.emulated.bandwidth
            delay = self.emulated.delay
        nodes = len({rank // self.node for rank in group})
        local = -(-len(group) // nodes)
        used = [self.within]
        inside = size
        ways = list[Seconds]()
        if nodes > 1:
            assert self.across is not None
            used.append(self.across)
            if operation == "all-gather":
                # Every node's part goes to all others, then around within each.
                ways.append(best(self.across, operation, size, nodes))
                inside = size * nodes
            else:
                ways.append(best(self.across, operation, -(-size // local), nodes))
        if nodes == 1 or (local > 1 and self.within is not None):
            assert self.within is not None
            ways.append(best(self.within, operation, inside, local))
        shared, writing, reading = (sum(each) for each in zip(*ways, strict=True))
        starting = self.host.graph if self.graphs else self.host.collective
        launched = self.host.asynchronous and not self.graphs  # by a host that goes ahead of the device
        return Transfer(
            shared=shared,
            line=line,
            delay=delay,
            host=starting if launched else 0.0,
            writing=writing if launched else writing + starting,
            reading=reading,
            contention=max((link.contention for link in used if link is not None), default=0.0),
        )


def best(link: Interconnect, operation: Operation, size: int, ranks: int) -> Seconds:
    """The link's fastest way."""
    others = ranks - 1
    levels = math.ceil(math.log2(ranks))
    # By kind: messages that wait for each other, and how often a rank's bytes are sent.
    if operation == "all-reduce":
        by_kind = {
            "ring": (2 * others, 2 * others / ranks),
            "tree": (2 * levels, 2),
            "one-shot": (1, others),
            "sharp": (1, 1),
        }
    else:
        by_kind = {
            "ring": (others, others),
            "tree": (levels, others),
            "one-shot": (1, others),
            "sharp": (1, others),
        }
    ways = list[Seconds]()
    for algorithm in link.algorithms:
        base = algorithm.base.at(ranks)
        hop = algorithm.hop.at(ranks)
        once = size / (link.bandwidth * algorithm.share.at(ranks))  # seconds of sending an operand once
        if algorithm.kind == "shared-memory":
            ways.append((0.0, once, base + hop * others + ranks * once))
        else:
            messages, sent = by_kind[algorithm.kind]
            ways.append((base + messages * hop + sent * once, 0.0, 0.0))
    return min(ways, key=sum)
