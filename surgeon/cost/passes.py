"""One forward pass on described hardware: what computing and reducing each node takes, for the clocks of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from surgeon.cost.clocks import Burst, Costs, RankClock, Swap, Transfer, meet
from surgeon.cost.collectives import Operation, Wiring
from surgeon.cost.kernels import Kernel, RankSpeed, burst
from surgeon.cost.work import Forward, Item, RankWork
from surgeon.language.program import Fork, Step
from surgeon.runtime.comm.collectives import Counts
from surgeon.runtime.comm.quantised import Compression, Packing
from surgeon.runtime.plan.placement import Group, Work, step_parts

CANDIDATE = 16  # bytes of a rank's best token of a text: its logit and its number
# Estimates: how often compression reads or writes each number of what it packs, and of what it unpacks, in kernels that
# do all of it at once; and in how many of them.
PACKING, UNPACKING = (6.0, 2), (3.0, 1)


class Timed(NamedTuple):
    """What a rank does of a step, and the collectives inside it."""

    items: list[Burst | Swap]
    sent: Counts


@dataclass(frozen=True)
class Setting:
    """What passes of one kind have in common.

    Attributes:
        work: by rank, every step's, with a number that is the same of steps that cost the same.
        connected: whether ranks wait for each other at all.
        compress: what reductions are sent as, if not as they are.
        graphs: whether passes are captured graphs.
    """

    rank_work: RankWork
    work: Sequence[Sequence[tuple[Work, int]]]
    speed: RankSpeed
    wires: Wiring
    connected: bool = True
    compress: Compression | None = None
    graphs: bool = False

    def burst(self, kernels: Sequence[Kernel]) -> Burst:
        """Kernels that run one after the other."""
        return burst(kernels, self.speed, self.graphs)

    def timed(self, items: Sequence[Item], tokens: int) -> Timed:
        """Kernels as one burst between every two exchanges."""
        found: list[Burst | Swap] = []
        sent, kernels = Counts(), list[Kernel]()
        for item in items:
            if isinstance(item, Kernel):
                kernels.append(item)
            elif self.connected:
                found.append(self.burst(kernels))
                kernels = []
                inside = self.transfer(item.operation, self.operand(tokens, item.width), item.group, sent)
                found.append(Swap(item.group, inside))
        return Timed([*found, self.burst(kernels)] if kernels else found, sent)

    def operand(self, tokens: int, width: int) -> Tensor:
        """Something to be sent, without values."""
        return torch.empty(tokens, width, dtype=getattr(torch, self.rank_work.plan.dtype), device="meta")

    def transfer(self, operation: Operation, part: Tensor, group: Group, counts: Counts | None = None) -> Transfer:
        """A collective of a rank's part.

        Args:
            counts: where to count it.
        """
        if self.compress is None or operation == "all-gather":
            return self._exact(operation, part.nbytes, group, counts)
        packing = Packing(self.compress, part.shape, part.dtype)
        sent = self._exact("all-gather", packing.nbytes, group, counts)
        before, after = (
            self.burst([Kernel("pack", "copy", 0.0, often * moved, launches=launches)])
            for moved, (often, launches) in ((part.nbytes, PACKING), (len(group) * part.nbytes, UNPACKING))
        )
        return replace(sent, before=before, after=after)

    def _exact(self, operation: Operation, size: int, group: Group, counts: Counts | None) -> Transfer:
        if counts is not None:
            counts.all_reduces += operation == "all-reduce"
            counts.all_gathers += operation == "all-gather"
            counts.bytes += size
        return self.wires.transfer(operation, size, group)

    def vocabulary(self, operation: Operation, size: int, clocks: Sequence[RankClock], counts: Counts) -> None:
        """A collective of all ranks, exact and hidden behind nothing."""
        if self.connected and len(clocks) > 1:
            sent = self._exact(operation, size, tuple(range(len(clocks))), counts)
            meet(clocks, [sent] * len(clocks))


@dataclass
class PassCosts(Costs):
    """What takes how long in one pass.

    Attributes:
        layers, vocabulary: collectives that rank 0 has started.
    """

    setting: Setting
    forward: Forward
    layers: Counts = field(default_factory=Counts)
    vocabulary: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        self._next = [count() for _ in self.setting.work]
        self._known: dict[object, Timed] = {}
        self._reductions: dict[object, tuple[Transfer, Counts]] = {}

    def leave_attention(self) -> None:
        self.forward = self.forward.ending
        self._known.clear()

    def items(self, rank: int, step: Step) -> Sequence[Burst | Swap]:
        work, like = self.setting.work[rank][next(self._next[rank])]
        assert work.step is step, f"the executor is at {step}, the rank's work at {work.step}"
        if like not in self._known:
            computed = self.setting.rank_work.items(work, self.forward)
            self._known[like] = self.setting.timed(computed, self.forward.tokens)
        items, sent = self._known[like]
        if rank == 0:
            self.layers += sent
        return items

    def part(self, node: Step | Fork, group: Group) -> Tensor:
        width = self.setting.rank_work.reduced(node, isinstance(node, Fork) or _whole(node, group))
        return self.setting.operand(self.forward.tokens, width)

    def finish(self, step: Step, group: Group) -> Burst | None:
        kernels = [] if _whole(step, group) else self.setting.rank_work.finish(step, self.forward)
        return self.setting.burst(kernels) if kernels else None

    def transfers(self, part: Tensor, group: Group) -> Sequence[Transfer]:
        if not self.setting.connected:
            return ()
        key = part.shape, group
        if key not in self._reductions:
            sent = Counts()
            self._reductions[key] = self.setting.transfer("all-reduce", part, group, sent), sent
        transfer, sent = self._reductions[key]
        if group[0] == 0:
            self.layers += sent
        return [transfer] * len(group)

    def embed(self, clocks: Sequence[RankClock]) -> None:
        """Before the program: rows of the embedding, and their sum over the ranks, which have some rows each."""
        plan, numbers = self.setting.rank_work.plan, self.setting.rank_work.numbers
        values = self.forward.tokens * plan.hidden
        self._all(clocks, [numbers.copy("embedding", 2 * values)])
        self.setting.vocabulary("all-reduce", numbers.size * values, clocks, self.vocabulary)

    def choose(self, clocks: Sequence[RankClock]) -> None:
        """Behind it: every text's last token through the final norm and the head, and the best of all ranks' logits."""
        plan, numbers, texts = self.setting.rank_work.plan, self.setting.rank_work.numbers, self.forward.texts
        rows = -(-plan.vocabulary // plan.ranks)
        norm, head = numbers.copy("norm", 2 * texts * plan.hidden), numbers.product("head", texts, rows, plan.hidden)
        self._all(clocks, [norm, head, numbers.copy("best", texts * rows)])
        self.setting.vocabulary("all-gather", CANDIDATE * texts, clocks, self.vocabulary)

    def _all(self, clocks: Sequence[RankClock], kernels: Sequence[Kernel]) -> None:
        for clock in clocks:
            clock.spend(self.setting.burst(kernels))


def _whole(step: Step, group: Group) -> bool:
    """Whether each rank of a group computes whole sublayers of a step."""
    return all(part == step.sublayers[index] for index, part in step_parts(step, 0, len(group)))


def one_token(setting: Setting, items: Sequence[Item]) -> float:
    """Seconds that a rank takes for what it does of one token, with ranks that do the same."""
    clock = RankClock()
    for item in setting.timed(items, 1).items:
        if isinstance(item, Burst):
            clock.spend(item)
        else:
            meet([clock], [item.transfer])
    return max(clock.now, clock.host)
