"""The part of a program that one rank computes: its weights, the groups it reduces with, and how the executor runs it.

What surrounds the program (embedding, cache, batches, output head) is not in it: this package's engine has its own,
and so has vLLM (vllm_plugin).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import Tensor

from surgeon.execute import Branch, Machine, Partial, Pending, State, advance, land
from surgeon.program import ATTENTION, Fork, Program, Step, Sublayer
from surgeon.runtime.comm.collectives import Collectives, Counts
from surgeon.runtime.model.layers import Attention, FeedForward, Norm, Pass, torch_dtype
from surgeon.runtime.plan.placement import Group, Part, Work, assigned_branches, groups_within, rank_work
from surgeon.runtime.plan.specification import Plan
from surgeon.weights import ModelWeights


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


class RankProgram:
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

    def load(self, source: ModelWeights) -> None:
        """The slices of this rank's work, and the norms behind the sublayers of every step it has a share in."""
        plan = self.plan
        for sublayer in {part.sublayer for work in self.work for part in work.parts}:
            tensors = source.sublayer(sublayer, torch_dtype(plan))
            tensors = {name: tensor.to(self.device) for name, tensor in tensors.items()}
            spec = plan.family.spec(sublayer.kind)
            if sublayer.kind == ATTENTION:
                self.sublayers[sublayer] = Attention(tensors, spec, plan, plan.window(sublayer), plan.rotates(sublayer))
            else:
                self.sublayers[sublayer] = FeedForward(tensors, spec, plan)
        for sublayer in {sublayer for work in self.work for sublayer in work.step.sublayers}:
            if plan.family.spec(sublayer.kind).post_norm is not None:
                norms = {
                    name: tensor.to(self.device) for name, tensor in source.norms(sublayer, torch_dtype(plan)).items()
                }
                self.post_norms[sublayer] = Norm(norms, "post_norm", plan)

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


class RankMachine(Machine):
    """One forward pass on one rank, seen from a group of ranks it belongs to.

    A norm behind a sublayer (Gemma2) needs the sublayer's whole output. Where a rank computes whole sublayers it
    applies the norm itself, and the step is reduced like any other. Where it computes slices, the parts of the step's
    sublayers are reduced side by side, in one collective, and every rank then norms the sums and adds them.
    """

    def __init__(self, rank_program: RankProgram, shared: Pass, group: Group, work: Iterator[Work]) -> None:
        self.rank_program = rank_program
        self.shared = shared
        self.group = group
        self.work = work  # shared with the machines of forks: the executor comes to steps in this order

    def compute(self, step: Step, stream: Tensor) -> Partial:
        work = next(self.work)
        assert work.step == step, f"the executor is at {step}, the rank's work at {work.step}"
        outputs = [self._output(part, stream) for part in work.parts]
        self.rank_program.passes += 1 / len(self.rank_program.work)
        if self.rank_program.post_norms and not work.whole:
            return self._side_by_side(work, outputs)
        return Partial(reduce(torch.add, outputs))

    def _output(self, part: Part, stream: Tensor) -> Tensor:
        made = self.rank_program.sublayers[part.sublayer]
        if isinstance(made, Attention):
            assert part.slot is not None
            output = made(stream, part.slot, self.shared)
        else:
            output = made(stream)
        norm = self.rank_program.post_norms.get(part.sublayer)  # slices have none
        return output if norm is None else norm(output)

    def _side_by_side(self, work: Work, outputs: list[Tensor]) -> Partial:
        """This rank's parts of the outputs of the step's sublayers, (sublayers, tokens, hidden), and their norms."""
        norms = [self.rank_program.post_norms[sublayer] for sublayer in work.step.sublayers]

        def finish(totals: Tensor) -> Tensor:
            return reduce(torch.add, (norm(total) for norm, total in zip(norms, totals, strict=True)))

        if len(norms) == 1:
            return Partial(outputs[0][None], finish)
        stacked = outputs[0].new_zeros(len(norms), *outputs[0].shape)
        for part, output in zip(work.parts, outputs, strict=True):
            stacked[part.index] = output
        return Partial(stacked, finish)

    def reduce(self, partial: Partial) -> Pending:
        part, finish = partial
        if len(self.group) == 1:
            return lambda: part if finish is None else finish(part)
        wait = self.rank_program.groups[self.group].all_reduce(part, self.rank_program.counts.layers)
        return wait if finish is None else lambda: finish(wait())

    def assign(self, fork: Fork) -> Iterable[tuple[Branch, Machine]]:
        branches, group = self._assigned(fork)
        machine = self.rank_program.machine(self.shared, group, self.work)
        return [(branch, machine) for branch in branches]

    def join(self, fork: Fork, added: Tensor) -> Partial:
        # A group of several ranks has its branch's output on each of them; only the first adds it to the fork's sum.
        _, group = self._assigned(fork)
        return Partial(added if group[0] == self.rank_program.rank else torch.zeros_like(added))

    def _assigned(self, fork: Fork) -> tuple[tuple[Branch, ...], Group]:
        return assigned_branches(fork, self.rank_program.rank, self.group)
