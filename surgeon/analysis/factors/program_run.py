"""A program on a text, node by node: inputs of its matrices, and its predictions from some node on.

Streams of all tokens are held before one node at a time, so that a model of any size is gone through once, with sums
for the matrices of one node in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgeon.analysis.engine.machine import PlanMachine, not_finite, walks, windows_in_a_walk
from surgeon.analysis.factors.matrices import Matrix
from surgeon.language.execute import State, advance, land
from surgeon.language.program import Node, Program
from surgeon.language.sublayer import Sublayer
from surgeon.models.edit import ModelMachine
from surgeon.models.weights import FactorSource
from surgeon.models.weights.decompose import SecondMoment
from surgeon.quality.head import OutputHead, join_measures
from surgeon.quality.summary import Values

Renaming = Callable[[Sublayer], Sublayer]
# Receives a matrix and its inputs, (..., in); for experts also the routing (EXPERTS).
Seen = Callable[..., None]
# The role under which a mixture's experts together receive their inputs.
EXPERTS = "experts"
S = TypeVar("S", bound=Any)  # sums over inputs, with a method `add`


class InputSums:
    """Sums over the inputs of one matrix, or of several that read the same.

    Attributes:
        moment: Z'Z, Z the inputs; None if it is not asked for.
        cross: X'Z, X the inputs of the same tokens in another run; None if there is none.
        sizes: L2 norms of so many features beside each other (`width`), summed over tokens, (in / width,), float64.
        squares: of each feature, summed over tokens, (in,), float64.
        samples: tokens.
    """

    def __init__(
        self,
        features: int,
        device: torch.device,
        moment: bool = False,
        cross: bool = False,
        width: int = 1,
    ) -> None:
        self.width = width
        self.moment = SecondMoment(features, device) if moment else None
        self.cross = (
            torch.zeros(features, features, dtype=torch.float64, device=device) if cross else None
        )
        self.sizes = torch.zeros(features // width, dtype=torch.float64, device=device)
        self.squares = torch.zeros(features, dtype=torch.float64, device=device)
        self.samples = 0

    def add(self, inputs: Tensor, others: Tensor | None = None) -> None:
        """Take in a batch, (..., in), and the other run's."""
        rows = inputs.detach().flatten(0, -2).double()
        self.sizes += rows.unflatten(1, (-1, self.width)).norm(dim=2).sum(0)
        self.squares += rows.square().sum(0)
        self.samples += len(rows)
        if self.moment is not None:
            self.moment.add(inputs)
        if self.cross is not None:
            assert others is not None
            self.cross.addmm_(others.detach().flatten(0, -2).to(rows).T, rows)


@dataclass
class RunPart:
    """Windows that run together."""

    ids: Tensor
    machine: PlanMachine
    state: State


class ProgramRun:
    """All windows of a text before the same node of a program.

    Attributes:
        nodes: of the program.
        place: the number of the next node.

    Args:
        model: the layers that it is stored as.
        ids: (windows, tokens), all of them real tokens.
        beside: bytes that are held beside the streams.
        memory: a limit in bytes on the memory of the whole process.
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
        self.nodes = program.nodes
        self.place = 0
        streams = ids.numel() * int(model.config.hidden_size) * max(4, model.dtype.itemsize)
        at_once = windows_in_a_walk(model, ids, beside=beside + streams, memory=memory)
        parts = walks(model, ids, at_once, factors)
        # Not the walks themselves, which would hold the embedded stream to the end.
        self.parts = [RunPart(walk.ids, walk.machine, State(walk.start)) for walk in parts]

    @torch.inference_mode()
    def see(
        self, part: RunPart, matrices: Collection[Matrix], seen: Seen, run_as: Renaming | None = None
    ) -> State:
        """The state of a part after the next node, whose matrices' inputs are shown; the part stays where it is.

        Args:
            run_as: the sublayer that runs in place of another, of fewer ranks.
        """
        machine = _Tapping(part.machine, run_as or (lambda sublayer: sublayer), matrices, seen)
        return advance(part.state, self.nodes[self.place], machine)

    @torch.inference_mode()
    def step(self, states: list[State] | None = None) -> None:
        """Go on behind the next node, with the states that `see` gave, or by running it as it is."""
        node = self.nodes[self.place]
        for index, part in enumerate(self.parts):
            part.state = advance(part.state, node, part.machine) if states is None else states[index]
            if not land(part.state).stream.isfinite().all():
                raise not_finite(node)
        self.place += 1

    def sum_inputs(
        self, matrices: Collection[Matrix], sums: dict[Matrix, S], new: Callable[[Matrix, Tensor], S]
    ) -> None:
        """Go on behind the next node, and add its matrices' inputs to their sums, which are made when they are new."""

        def add_inputs(matrix: Matrix, inputs: Tensor, *routed: Tensor) -> None:
            if matrix not in sums:
                sums[matrix] = new(matrix, inputs)
            sums[matrix].add(inputs, *routed)

        self.step([self.see(part, matrices, add_inputs) for part in self.parts])

    @torch.inference_mode()
    def rest(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Run all nodes from the next one on: token ids and the stream after the program, some windows at a time.

        Place and streams stay, so that it can be called again with other weights.
        """
        for part in self.parts:
            state = part.state
            for node in self.nodes[self.place :]:
                state = advance(state, node, part.machine)
            yield part.ids, land(state).stream


class ReferenceText:
    """A program's predictions on a text, some windows at a time, to compare changed ones with."""

    def __init__(self, model: PreTrainedModel, run: ProgramRun) -> None:
        self.head = OutputHead(model)
        self.predictions = [self.head.reference(stream, ids) for ids, stream in run.rest()]

    def nll(self) -> Values:
        """Negative log-likelihood of the reference, (windows,), nats per token."""
        return join_measures([prediction.quality for prediction in self.predictions])[0]

    def quality(self, run: ProgramRun) -> tuple[Values, Values]:
        """Negative log-likelihood of another, and its divergence from this one, (windows,) each, nats per token."""
        parts = zip(run.rest(), self.predictions, strict=True)
        return join_measures(
            [self.head.compare(stream, prediction) for (_, stream), prediction in parts]
        )


def matrices_in(node: Node, matrices: Collection[Matrix]) -> list[Matrix]:
    """Keep the matrices whose sublayers, or slices of them, are in a node."""
    inside = {replace(sublayer, piece=None) for sublayer in Program((node,)).sublayers()}
    return [matrix for matrix in matrices if matrix.sublayer in inside]


class _Tapping(ModelMachine):
    """Runs sublayers as others tell, and shows the inputs of their matrices.

    Of a slice, inputs are shown of the whole sublayer, run on the slice's stream.
    """

    def __init__(
        self, machine: PlanMachine, run_as: Renaming, matrices: Collection[Matrix], seen: Seen
    ) -> None:
        super().__init__(machine.layers, machine.arguments)
        self.slots = machine
        self.run_as = run_as
        self.seen = seen
        self.matrices = matrices
        self.watched: list[Matrix] = []
        self.hooks = ExitStack()

    def slot_of(self, attention: Sublayer) -> int:
        return self.slots.slot_of(attention)

    def sublayer(self, sublayer: Sublayer, stream: Tensor) -> Tensor:
        whole = replace(sublayer, piece=None)
        self.watched = [matrix for matrix in self.matrices if matrix.sublayer == whole]
        if sublayer.piece is not None and self.watched:
            with self.hooks:
                super().sublayer(self.run_as(whole), stream)
            self.watched = []
        with self.hooks:
            return super().sublayer(self.run_as(sublayer), stream)

    def owner(self, sublayer: Sublayer) -> nn.Module:
        owner = super().owner(sublayer)
        spec = self.layers.family.spec(sublayer.kind, sublayer.layers[0])
        for matrix in self.watched:
            # Some readers take the routing, others do not.
            if matrix.role == EXPERTS and spec.mixture is not None:
                if spec.mixture.weighs_inputs:
                    path = spec.module
                else:
                    path = spec.mixture.experts
            else:
                path = spec.projection(matrix.role).path
            hook = owner.get_submodule(path).register_forward_pre_hook(partial(_show, matrix, self.seen))
            self.hooks.callback(hook.remove)
        return owner


def _show(matrix: Matrix, seen: Seen, module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
    del module
    inputs, *routed = arguments
    if not inputs.isfinite().all():
        raise ValueError(
            f"the inputs of {matrix} hold NaN or infinity; check the weights of what comes before it"
        )
    seen(matrix, inputs, *routed)
