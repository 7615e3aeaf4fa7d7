"""The part of a program that one rank computes: its weights, the groups it reduces with, and how it runs.

What surrounds the program (embedding, cache, batches, output head) is not in it: this package's engine has its own,
and so has vLLM (vllm_plugin).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from surgeon.execute import State, advance, land
from surgeon.program import ATTENTION, Program, Sublayer
from surgeon.runtime.collectives import Collectives, Counts
from surgeon.runtime.layers import Attention, FeedForward, Norm, Pass
from surgeon.runtime.machine import RankMachine
from surgeon.runtime.placement import Group, Work, groups_within, rank_work
from surgeon.runtime.plan import Plan
from surgeon.runtime.sharding import Source


@dataclass
class Phase:
    """What forward passes of one kind have cost, as one rank measured it.

    Attributes:
        tokens: that went through them.
        layers: collectives of the program's steps and forks.
        vocabulary: collectives of the embedding and the output head.
    """

    seconds: float = 0.0
    passes: int = 0
    tokens: int = 0
    layers: Counts = field(default_factory=Counts)
    vocabulary: Counts = field(default_factory=Counts)


class Share:
    """What one rank computes of the plan's program.

    Every rank builds one from the same plan, and all of them then call the same methods in the same order.

    Attributes:
        counts: where collectives are counted now; may be replaced.
        passes: how many there have been; of the one being computed, the share of its steps that is done.
    """

    def __init__(self, plan: Plan, collectives: Collectives, device: torch.device) -> None:
        self.plan = plan
        self.collectives = collectives
        self.device = device
        self.counts = Phase()
        self.passes = 0.0
        self.program = Program.parse(plan.program)
        self.rank = collectives.rank
        self.groups: dict[Group, Collectives] = {collectives.group: collectives}
        for group in groups_within(self.program, plan.ranks):
            self.groups[group] = collectives.subgroup(group)
        self.work = rank_work(self.program, self.rank, plan.ranks)
        self.sublayers: dict[Sublayer, Attention | FeedForward] = {}
        self.post_norms: dict[Sublayer, Norm] = {}

    def load(self, source: Source) -> None:
        """The slices of this rank's work, and the norms behind the sublayers of every step it has a share in."""
        plan = self.plan
        for sublayer in {part.sublayer for work in self.work for part in work.parts}:
            tensors = source.sublayer(sublayer, plan.dtype)
            tensors = {name: tensor.to(self.device) for name, tensor in tensors.items()}
            spec = plan.family.spec(sublayer.kind)
            if sublayer.kind == ATTENTION:
                self.sublayers[sublayer] = Attention(tensors, spec, plan, plan.window(sublayer), plan.rotates(sublayer))
            else:
                self.sublayers[sublayer] = FeedForward(tensors, spec, plan)
        for sublayer in {sublayer for work in self.work for sublayer in work.step.sublayers}:
            for name, gain in source.post_norm(sublayer, plan.dtype).items():
                path = name.removesuffix(".weight")
                self.post_norms[sublayer] = Norm({name: gain.to(self.device)}, path, plan)

    def attentions(self) -> list[Sublayer]:
        """The attentions of this rank's work, by cache slot."""
        parts = [part for work in self.work for part in work.parts if part.slot is not None]
        return [part.sublayer for part in sorted(parts, key=lambda part: part.slot or 0)]

    def run(self, state: State, shared: Pass) -> State:
        """The state after the program; what its last node left pending may be on its way still."""
        machine = self.machine(shared, self.collectives.group, iter(self.work))
        for node in self.program.nodes:
            state = advance(state, node, machine)
        return state

    def stream_after(self, stream: Tensor, shared: Pass) -> Tensor:
        """The stream after the program, (tokens, hidden)."""
        return land(self.run(State(stream), shared)).stream

    def machine(self, shared: Pass, group: Group, work: Iterator[Work]) -> RankMachine:
        """What runs steps on a group of ranks."""
        return RankMachine(self, shared, group, work)
