"""Collectives on paper: seconds by latency and bandwidth (alpha and beta), for each way of summing and gathering.

With n ranks, B bytes of one rank's operand, a the time of a message and w the bandwidth that is reached:

    all-reduce   ring 2(n-1) a + 2(n-1)/n B/w    tree 2 log2(n) a + 2 B/w    one-shot a + (n-1) B/w    sharp a + B/w
    all-gather   ring  (n-1) a + (n-1) B/w       tree   log2(n) a + (n-1) B/w, one-shot and sharp a + (n-1) B/w

Each has a constant on top of that. Across nodes the ranks of each node first share out the sum (reduce-scatter), then
every rank sums its share with its peers on the other nodes, and the nodes gather it again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from surgeon.cost.clocks import Transfer
from surgeon.cost.hardware import Algorithm, Host, Interconnect
from surgeon.runtime.comm.link import Link
from surgeon.runtime.plan.placement import Group

Operation = Literal["all-reduce", "all-gather"]


class Seconds(NamedTuple):
    """How long a collective takes.

    Attributes:
        shared: from when all ranks have begun.
        writing, reading: in which a rank itself is busy, before that and after it.
    """

    shared: float
    writing: float = 0.0
    reading: float = 0.0


@dataclass(frozen=True)
class Wiring:
    """What connects ranks.

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
        used = [self.within] if nodes == 1 else [self.within, self.across]
        seconds, writing, reading = self._seconds(operation, size, nodes, -(-len(group) // nodes))
        starting = self.host.graph if self.graphs else self.host.collective
        launched = self.host.asynchronous and not self.graphs  # by a host that goes ahead of the device
        return Transfer(
            shared=seconds,
            line=line,
            delay=delay,
            host=starting if launched else 0.0,
            writing=writing if launched else writing + starting,
            reading=reading,
            contention=max((link.contention for link in used if link is not None), default=0.0),
        )

    def _seconds(self, operation: Operation, size: int, nodes: int, local: int) -> Seconds:
        if nodes == 1:
            assert self.within is not None
            return best(self.within, operation, size, local)
        assert self.across is not None
        if operation == "all-gather":  # every node's part goes to all others, then around within each
            across = best(self.across, operation, size, nodes)
            inside = size * nodes
        else:
            across = best(self.across, operation, -(-size // local), nodes)
            inside = size
        if local == 1 or self.within is None:
            return across
        within = best(self.within, operation, inside, local)
        return Seconds(*(sum(both) for both in zip(across, within, strict=True)))


def best(link: Interconnect, operation: Operation, size: int, ranks: int) -> Seconds:
    """The fastest way that a link has."""
    return min((_seconds(each, link.bandwidth, operation, size, ranks) for each in link.algorithms), key=sum)


def _seconds(algorithm: Algorithm, bandwidth: float, operation: Operation, size: int, ranks: int) -> Seconds:
    base = algorithm.base.at(ranks)
    hop = algorithm.hop.at(ranks)
    once = size / (bandwidth * algorithm.share.at(ranks))  # seconds of sending an operand once
    if algorithm.kind == "shared-memory":
        return Seconds(0.0, once, base + hop * (ranks - 1) + ranks * once)
    others = ranks - 1
    levels = math.ceil(math.log2(ranks))
    # Messages that wait for each other, and how often a rank's bytes are sent.
    reduce = {
        "ring": (2 * others, 2 * others / ranks),
        "tree": (2 * levels, 2),
        "one-shot": (1, others),
        "sharp": (1, 1),
    }
    gather = {"ring": (others, others), "tree": (levels, others), "one-shot": (1, others), "sharp": (1, others)}
    messages, sent = (reduce if operation == "all-reduce" else gather)[algorithm.kind]
    return Seconds(base + messages * hop + sent * once)
