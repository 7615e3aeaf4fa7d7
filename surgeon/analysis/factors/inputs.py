"""What the matrices of a program's sublayers get as inputs, summed up over a text, node by node.

Streams of all tokens are held before one node at a time, so that a model of any size is gone through once, with what is
summed up for the matrices of one node in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgeon.analysis.engine.machine import PlanMachine
from surgeon.analysis.engine.memory import windows_in_a_walk
from surgeon.analysis.engine.walk import not_finite, walks
from surgeon.analysis.factors.factor_plan import Target
from surgeon.language.execute import State, advance, land
from surgeon.language.program import WRITING, Node, Program, Sublayer
from surgeon.models.edited_layers import ModelMachine
from surgeon.models.families import Family, family_of
from surgeon.models.weights import FactorSource
from surgeon.models.weights.whitening import SecondMoment

Renaming = Callable[[Sublayer], Sublayer]
Seen = Callable[[Target, Tensor], None]  # gets the inputs, (..., in), of a matrix


class InputSums:
    """Sums over the inputs of one matrix, or of several that read the same.

    Attributes:
        moment: Z'Z, Z the inputs; None if it is not asked for.
        cross: X'Z, X the inputs of the same tokens in another run; None if there is none.
        size: of each input, summed over tokens, (in,), float64.
        samples: tokens.
    """

    def __init__(self, features: int, device: torch.device, moment: bool, cross: bool) -> None:
        self.moment = SecondMoment(features, device) if moment else None
        self.cross = torch.zeros(features, features, dtype=torch.float64, device=device) if cross else None
        self.size = torch.zeros(features, dtype=torch.float64, device=device)
        self.samples = 0

    def add(self, inputs: Tensor, others: Tensor | None = None) -> None:
        """Take in a batch, (..., in), and the other run's."""
        rows = inputs.detach().flatten(0, -2).double()
        self.size += rows.abs().sum(0)
        self.samples += len(rows)
        if self.moment is not None:
            self.moment.add(inputs)
        if self.cross is not None:
            assert others is not None
            self.cross.addmm_(others.detach().flatten(0, -2).to(rows).T, rows)


@dataclass
class _Part:
    """Windows that run together."""

    ids: Tensor
    machine: PlanMachine
    state: State


class ProgramRun:
    """All windows of a text before the same node of a program.

    Attributes:
        place: the number of the next node.

    Args:
        ids: (windows, tokens), all of them real tokens.
        beside: bytes of what is held beside the streams.
        memory: a limit in bytes on the memory of the whole process.
        factors: of matrices that the program has a rank for.

    Raises:
        ValueError: if the embedded tokens are not finite, or the memory limit is too small.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        program: Program,
        ids: Tensor,
        beside: int = 0,
        memory: int | None = None,
        factors: FactorSource | None = None,
    ) -> None:
        self.nodes, self.place = program.nodes, 0
        self.family: Family = family_of(model.config)
        streams = ids.numel() * int(model.config.hidden_size) * max(4, model.dtype.itemsize)
        at_once = windows_in_a_walk(model, ids, beside=beside + streams, memory=memory)
        parts = walks(model, ids, at_once, factors)
        # Not the walks themselves, which would hold the embedded stream to the end.
        self.parts = [_Part(walk.ids, walk.machine, State(walk.start)) for walk in parts]

    @torch.inference_mode()
    def see(self, part: _Part, run_as: Renaming, targets: Collection[Target], seen: Seen) -> State:
        """The state of a part after the next node, whose matrices' inputs are shown; the part stays where it is.

        Args:
            run_as: the sublayer that runs in place of another, of fewer ranks.
            targets: whose inputs are shown.

        Raises:
            ValueError: naming the matrix whose inputs are not finite.
        """
        machine = _Tapping(part.machine, run_as, targets, seen)
        return advance(part.state, self.nodes[self.place], machine)

    @torch.inference_mode()
    def step(self, states: list[State] | None = None) -> None:
        """Go on behind the next node, with the states that `see` gave, or by running it as it is.

        Raises:
            ValueError: naming the node whose outputs are not finite.
        """
        node = self.nodes[self.place]
        for index, part in enumerate(self.parts):
            part.state = advance(part.state, node, part.machine) if states is None else states[index]
            if not land(part.state).stream.isfinite().all():
                raise not_finite(node)
        self.place += 1


def targets_in(node: Node, targets: Collection[Target]) -> list[Target]:
    """Those of the targets whose sublayers, or slices of them, are in a node."""
    inside = {replace(sublayer, piece=None) for sublayer in Program((node,)).sublayers()}
    return [target for target in targets if target.sublayer in inside]


def reads_stream(target: Target) -> bool:
    """Whether a matrix reads the stream, as q and up do, and not what its sublayer has computed."""
    return target.role not in WRITING


class _Tapping(ModelMachine):
    """Runs sublayers as others say, and shows what their matrices get.

    Of a slice, inputs are shown of the whole sublayer, run on the slice's stream.
    """

    def __init__(self, machine: PlanMachine, run_as: Renaming, targets: Collection[Target], seen: Seen) -> None:
        super().__init__(machine.layers, machine.arguments)
        self.slots, self.run_as, self.seen = machine, run_as, seen
        self.targets = targets
        self.watched: list[Target] = []
        self.hooks = ExitStack()

    def slot_of(self, attention: Sublayer) -> int:
        return self.slots.slot_of(attention)

    def sublayer(self, sublayer: Sublayer, stream: Tensor) -> Tensor:
        whole = replace(sublayer, piece=None)
        self.watched = [target for target in self.targets if target.sublayer == whole]
        if sublayer.piece is None or not self.watched:
            return self._run(self.run_as(sublayer), stream)
        self._run(self.run_as(whole), stream)
        self.watched = []
        return self._run(self.run_as(sublayer), stream)

    def _run(self, sublayer: Sublayer, stream: Tensor) -> Tensor:
        with self.hooks:
            return super().sublayer(sublayer, stream)

    def owner(self, sublayer: Sublayer) -> nn.Module:
        owner, spec = super().owner(sublayer), self.layers.family.spec(sublayer.kind)
        for target in self.watched:
            module = owner.get_submodule(spec.projection(target.role).path)
            hook = module.register_forward_pre_hook(partial(_show, target, self.seen))
            self.hooks.callback(hook.remove)
        return owner


def _show(target: Target, seen: Seen, module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
    """What a module's hook does."""
    del module
    (inputs,) = arguments
    if not inputs.isfinite().all():
        raise ValueError(f"the inputs of {target} hold NaN or infinity; check the weights of what comes before it")
    seen(target, inputs)
