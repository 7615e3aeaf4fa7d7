"""The executor on clocks instead of tensors: the time of a program, given the times of its parts.

The one executor runs the program with a clock for each rank, so that hiding, pairs and meetings follow from the same
rules as on ranks. With c seconds of computation per step and d per reduction, a dense program costs c + d per step, and
a ladder's period is max(c, (c + d) / 2). Two halves that take turns, of c / 2 each, have a period of max(c, c / 2 + d).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Protocol

import torch
from torch import Tensor

from surgeon.language.execute import Branch, Machine, Partial, Pending, State, in_turn, land
from surgeon.language.program import Fork, Program, Step
from surgeon.runtime.plan.placement import Group, assigned_branches


@dataclass(frozen=True)
class Burst:
    """Computing of a rank that waits for no other.

    Attributes:
        seconds: of computing.
        gaps: seconds in between in which nothing is computed.
        host: seconds of launching, while the device may still be busy with what came before.
        lag: seconds from the first launch until it can have ended.
    """

    seconds: float
    gaps: float = 0.0
    host: float = 0.0
    lag: float = 0.0


@dataclass(frozen=True)
class Transfer:
    """One collective, as one rank sees it.

    Attributes:
        shared: seconds from when all ranks have begun until all can have the result; the next one of this kind waits.
        line: seconds that it keeps the rank's own line busy, from when this rank has begun.
        delay: seconds that it ends behind that.
        writing, reading: seconds in which this rank cannot compute: before it begins, and when it lands.
        host: seconds that the host takes to start it.
        before, after: the rank's bursts before it begins and when it lands.
        contention: the part of a rank's speed that it takes meanwhile.
        group: the ranks in it, of one inside a step.
    """

    shared: float = 0.0
    line: float = 0.0
    delay: float = 0.0
    writing: float = 0.0
    reading: float = 0.0
    host: float = 0.0
    before: Burst | None = None
    after: Burst | None = None
    contention: float = 0.0
    group: Group = ()

    @property
    def seconds(self) -> float:
        return self.writing + max(self.shared + self.reading, self.line + self.delay)


class Costs(Protocol):
    """Times of a program's parts, asked for in the executor's order."""

    def leave_attention(self) -> None:
        """Behind the last attention, costs may be others."""
        return

    def items(self, rank: int, step: Step) -> Sequence[Burst | Transfer]:
        """Bursts that a rank computes of a step, and exchanges in between."""

    def part(self, node: Step | Fork, group: Group) -> Tensor:
        """Something of the shape and dtype that a group reduces of a node."""

    def finish(self, step: Step, group: Group) -> Burst | None:
        """Burst in which each rank of a group makes something of a step's sum before it is added."""

    def transfers(self, part: Tensor, group: Group) -> Sequence[Transfer]:
        """The reduction of a part, as each rank of a group sees it; nothing where ranks do not wait for each other."""


# Times at which a rank can read a collective's result: by the shared channel, and by its own line.
Arrival = tuple[float, float]


@dataclass
class RankClock:
    """The time on a rank, and how it was spent.

    Attributes:
        now: when the device has done what it was given.
        host: when the host has launched it.
        line, channel: until when its own line, and what it shares with others, are taken.
        busy: until when a collective in flight slows it down, and by how much.
        compute, launches, exposed: seconds of computing, of waiting for the host, of waiting for collectives.
        communication: seconds of collectives, hidden or not.
    """

    now: float = 0.0
    host: float = 0.0
    line: float = 0.0
    channel: float = 0.0
    busy: tuple[float, float] = (0.0, 0.0)
    compute: float = 0.0
    launches: float = 0.0
    exposed: float = 0.0
    communication: float = 0.0

    def spend(self, burst: Burst | None) -> None:
        if burst is None:
            return
        seconds = burst.seconds
        until, share = self.busy
        if share and until > self.now:
            meanwhile = (until - self.now) * (1 - share)  # what is done of it until the collective ends
            if seconds <= meanwhile:
                seconds = seconds / (1 - share)
            else:
                seconds = seconds + (until - self.now) * share
        end = max(self.now + seconds + burst.gaps, self.host + burst.lag)
        self.compute += seconds
        self.launches += max(0.0, end - self.now - seconds)
        self.host += burst.host
        self.now = end

    def land(self, transfer: Transfer, arrival: Arrival) -> None:
        """Wait for a collective, and take its result."""
        shared, line = arrival
        self.wait(shared)
        self.wait(self.now + transfer.reading)  # while it may be on the rank's line still
        self.wait(line)
        self.spend(transfer.after)

    def wait(self, when: float) -> None:
        self.exposed += max(0.0, when - self.now)
        self.now = max(self.now, when)


def pass_seconds(program: Program, clocks: list[RankClock], *costs: Costs) -> None:
    """Run a program on ranks' clocks."""
    machines = [SimulatedRanks(clocks, tuple(range(len(clocks))), one) for one in costs]
    states = in_turn(
        program.nodes[: program.attended_nodes], [State(torch.zeros(1))] * len(machines), machines
    )
    for one in costs:
        one.leave_attention()
    for state in in_turn(program.nodes[program.attended_nodes :], states, machines):
        land(state)


def exchange(clocks: Sequence[RankClock], transfers: Sequence[Transfer]) -> list[Arrival]:
    """Begin a collective on all ranks of a group."""
    begun = list[float]()
    for clock, transfer in zip(clocks, transfers, strict=True):
        clock.spend(transfer.before)
        clock.wait(clock.now + transfer.writing)
        clock.host += transfer.host
        begun.append(max(clock.now, clock.host))
    if any(t.shared for t in transfers):
        start = max(*begun, *(clock.channel for clock in clocks))
    else:
        start = max(begun)
    arrivals = []
    for clock, transfer, own in zip(clocks, transfers, begun, strict=True):
        clock.line = max(clock.line, own) + transfer.line
        arrival = start + transfer.shared, clock.line + transfer.delay
        if transfer.shared:
            clock.channel = max(arrival)
        if transfer.contention:
            clock.busy = max(arrival), transfer.contention
        clock.communication += transfer.seconds
        arrivals.append(arrival)
    return arrivals


def meet(clocks: Sequence[RankClock], transfer: Transfer) -> None:
    """Have all ranks of a group wait for a collective."""
    for clock, arrival in zip(clocks, exchange(clocks, [transfer] * len(clocks)), strict=True):
        clock.land(transfer, arrival)


@dataclass(eq=False)
class SimulatedRanks(Machine):
    """A group of ranks on which time passes and nothing else happens."""

    clocks: Sequence[RankClock]
    group: Group
    costs: Costs

    def compute(self, step: Step, stream: Tensor) -> Partial:
        by_rank = {rank: self.costs.items(rank, step) for rank in self.group}
        for turn in zip_longest(*by_rank.values()):  # those that exchange something are at the same item
            inside: dict[Group, Transfer] = {}
            for rank, item in zip(by_rank, turn, strict=True):
                if isinstance(item, Transfer):
                    inside[item.group] = item
                else:
                    self.clocks[rank].spend(item)
            for group, transfer in inside.items():
                meet([self.clocks[rank] for rank in group], transfer)
        burst = self.costs.finish(step, self.group)

        def finish(_: Tensor) -> Tensor:
            for rank in self.group:
                self.clocks[rank].spend(burst)
            return stream

        return Partial(self.costs.part(step, self.group), finish)

    def reduce(self, partial: Partial) -> Pending:
        part, finish = partial
        assert finish is not None
        clocks = [self.clocks[rank] for rank in self.group]
        transfers = self.costs.transfers(part, self.group) if len(clocks) > 1 else ()
        if not transfers:
            return lambda: finish(part)
        arrivals = exchange(clocks, transfers)

        def wait() -> Tensor:
            for clock, transfer, arrival in zip(clocks, transfers, arrivals, strict=True):
                clock.land(transfer, arrival)
            return finish(part)

        return wait

    def assign(self, fork: Fork) -> Iterable[tuple[Branch, Machine]]:
        assigned = dict.fromkeys(assigned_branches(fork, rank, self.group) for rank in self.group)
        for branches, group in assigned:
            for branch in branches:
                yield branch, SimulatedRanks(self.clocks, group, self.costs)

    def join(self, fork: Fork, added: Tensor) -> Partial:
        return Partial(self.costs.part(fork, self.group), lambda _: added)
