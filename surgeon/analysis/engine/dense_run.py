"""A model's own program on some text, node by node, so that what comes before a changed layer is run once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgeon.analysis.engine.machine import PlanMachine
from surgeon.analysis.engine.memory import windows_in_a_walk
from surgeon.analysis.engine.walk import not_finite, walks
from surgeon.analysis.factors.matrices import Matrix
from surgeon.language.execute import State, advance, land
from surgeon.language.program import Program, Sublayer
from surgeon.models.edit import program_of
from surgeon.models.weights.whitening import SecondMoment


@dataclass
class _Part:
    """Windows that run together."""

    ids: Tensor
    machine: PlanMachine
    state: State


class DenseRun:
    """All windows of a text before the same node of the model's own program.

    Holds one stream of all tokens, and for two windows' shapes at most their masks and positions.

    Attributes:
        nodes: of the program.
        place: the number of the next node.

    Args:
        model: the layers that it is stored as.
        ids: (windows, tokens), all of them real tokens.
        program: over these layers; by default they run one after the other.

    Raises:
        ValueError: if the embedded tokens are not finite.
    """

    def __init__(self, model: PreTrainedModel, ids: Tensor, program: Program | None = None) -> None:
        self.nodes = (program or program_of(model)).nodes
        self.place = 0
        parts = walks(model, ids, windows_in_a_walk(model, ids))
        # Not the walks themselves, which would hold the embedded stream to the end.
        self._parts = [_Part(walk.ids, walk.machine, State(walk.start)) for walk in parts]

    def sublayers(self, place: int) -> tuple[Sublayer, ...]:
        """The sublayers of a node, of a fork those of all its branches."""
        return tuple(Program((self.nodes[place],)).sublayers())

    @torch.inference_mode()
    def step(self, watched: Mapping[Matrix, nn.Module] | None = None) -> dict[Matrix, SecondMoment]:
        """Run the next node, and give the second moments of what the watched modules, in it, get as inputs.

        Raises:
            ValueError: naming the matrix whose inputs, or the node whose outputs, are not finite.
        """
        moments: dict[Matrix, SecondMoment] = {}
        hooks = [
            module.register_forward_pre_hook(partial(_take_inputs, moments, matrix))
            for matrix, module in (watched or {}).items()
        ]
        node = self.nodes[self.place]
        try:
            for part in self._parts:
                part.state = land(advance(part.state, node, part.machine))
                if not part.state.stream.isfinite().all():
                    raise not_finite(node)
        finally:
            for hook in hooks:
                hook.remove()
        self.place += 1
        return moments

    @torch.inference_mode()
    def rest(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Run all nodes from the next one on: token ids and the stream after the program, some windows at a time.

        Neither the place nor the streams change, so that it can be called again with other weights.
        """
        for part in self._parts:
            state = part.state
            for node in self.nodes[self.place :]:
                state = advance(state, node, part.machine)
            yield part.ids, land(state).stream


def _take_inputs(
    moments: dict[Matrix, SecondMoment], matrix: Matrix, module: nn.Module, arguments: tuple[Tensor, ...]
) -> None:
    """What a module's hook does: add its inputs to a matrix's moment."""
    del module
    (inputs,) = arguments
    if not inputs.isfinite().all():
        raise ValueError(f"the inputs of {matrix} hold NaN or infinity; check the weights of what comes before it")
    if matrix not in moments:
        moments[matrix] = SecondMoment(inputs.shape[-1], inputs.device)
    moments[matrix].add(inputs)
