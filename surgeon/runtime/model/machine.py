"""How the one executor runs a program on a rank: its own part of every step, and collectives between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from surgeon.execute import Branch, Machine, Pending
from surgeon.program import Fork, Step
from surgeon.runtime.model.layers import Attention, Norm, Pass
from surgeon.runtime.plan.placement import Group, Part, Work, fork_share

if TYPE_CHECKING:
    from surgeon.runtime.model.program import Share


class RankMachine(Machine):
    """One forward pass on one rank, seen from a group of ranks it belongs to.

    A norm behind a sublayer (Gemma2) needs the sublayer's whole output. Where a rank computes whole sublayers it
    applies the norm itself, and the step is reduced like any other. Where it computes slices, the parts of the step's
    sublayers are reduced side by side, in one collective, and every rank then norms the sums and adds them.
    """

    def __init__(self, share: Share, shared: Pass, group: Group, work: Iterator[Work]) -> None:
        self.share = share
        self.shared = shared
        self.group = group
        self.work = work  # shared with the machines of forks: the executor comes to steps in this order
        self.counted_elsewhere = False
        self.norms_due: list[Norm] = []  # of the output that is reduced next, by sublayer

    def compute(self, step: Step, stream: Tensor) -> Tensor:
        work = next(self.work)
        assert work.step == step, f"the executor is at {step}, the rank's work at {work.step}"
        outputs = [self._output(part, stream) for part in work.parts]
        self.share.passes += 1 / len(self.share.work)
        if self.share.post_norms and not work.whole:
            return self._side_by_side(work, outputs)
        return reduce(torch.add, outputs)

    def _output(self, part: Part, stream: Tensor) -> Tensor:
        made = self.share.sublayers[part.sublayer]
        if isinstance(made, Attention):
            assert part.slot is not None
            output = made(stream, part.slot, self.shared)
        else:
            output = made(stream)
        norm = self.share.post_norms.get(part.sublayer)  # slices have none
        return output if norm is None else norm(output)

    def _side_by_side(self, work: Work, outputs: list[Tensor]) -> Tensor:
        """This rank's parts of the outputs of all the step's sublayers, (sublayers, tokens, hidden)."""
        self.norms_due = [self.share.post_norms[sublayer] for sublayer in work.step.sublayers]
        if len(self.norms_due) == 1:
            return outputs[0][None]
        stacked = outputs[0].new_zeros(len(self.norms_due), *outputs[0].shape)
        for part, output in zip(work.parts, outputs, strict=True):
            stacked[part.place] = output
        return stacked

    def reduce(self, output: Tensor) -> Pending:
        if len(self.group) == 1:
            return lambda: output
        if self.counted_elsewhere:
            output, self.counted_elsewhere = torch.zeros_like(output), False
        wait = self.share.groups[self.group].all_reduce(output, self.share.counts.layers)
        if not self.norms_due:
            return wait
        norms, self.norms_due = self.norms_due, []
        return lambda: reduce(torch.add, (norm(total) for norm, total in zip(norms, wait(), strict=True)))

    def assign(self, fork: Fork) -> Iterable[tuple[Branch, Machine]]:
        branches, group = fork_share(fork, self.share.rank, self.group)
        machine = self.share.machine(self.shared, group, self.work)
        # A group of several ranks has its branch's output on each of them; only the first adds it to the fork's sum.
        self.counted_elsewhere = group.index(self.share.rank) > 0
        return [(branch, machine) for branch in branches]
