"""The matrices of a model's layers, and their inputs on a text, node by node of a program.

Streams of all tokens are held before one node at a time, so that a model of any size is gone through once, with sums
for the matrices of one node in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgeon.analysis.engine.machine import PlanMachine, not_finite, walks, windows_in_a_walk
from surgeon.errors import did_you_mean
from surgeon.language.execute import State, advance, land
from surgeon.language.program import Node, Program
from surgeon.language.sublayer import KINDS, ROLES, WRITING, Sublayer
from surgeon.models.edit import decoder_layers
from surgeon.models.edited_layers import ModelMachine
from surgeon.models.families import Family, family_of
from surgeon.models.weights import Dense, FactorSource, ModelWeights, ModuleStore
from surgeon.quality.head import OutputHead, join_measures
from surgeon.quality.summary import Values

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, order=True)
class Matrix:
    """A matrix of a model's layer, or of a sublayer of a program.

    Attributes:
        sublayer: not a slice; with all its ranks where a program has some for it.
        role: q, k, v, o, gate, up or down.
    """

    sublayer: Sublayer
    role: str

    @classmethod
    def of(cls, layer: int, role: str) -> Matrix:
        """Name a matrix of a layer as it is stored."""
        (kind,) = (kind for kind in KINDS if role in ROLES[kind])
        return cls(Sublayer(kind, (layer,)), role)

    def __str__(self) -> str:
        plain = len(self.sublayer.layers) == 1 and not self.sublayer.ranks
        return f"{self.role} of {f'layer {self.layer}' if plain else self.sublayer}"

    @property
    def layer(self) -> int:
        return self.sublayer.layers[0]

    @property
    def inputs(self) -> tuple[Sublayer, bool]:
        """Equal for matrices of equal inputs: the sublayer, and whether they read the stream, as q and up do."""
        return self.sublayer, self.role not in WRITING


class Matrices:
    """Reads and replaces the matrices of an unedited model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.family = family_of(model.config)
        layers = decoder_layers(model)
        assert isinstance(layers, nn.ModuleList)
        self.layers = layers
        store = ModuleStore(layers, f"{self.family.layers}.")
        self.weights = ModelWeights(store, self.family, self.family.head_dim(model.config))

    def module(self, matrix: Matrix) -> nn.Module:
        """The linear module that holds a matrix, perhaps with others packed beside it."""
        spec = self.family.spec(matrix.sublayer.kind, matrix.layer)
        return self.layers[matrix.layer].get_submodule(spec.projection(matrix.role).path)

    def read(self, matrix: Matrix) -> Tensor:
        return self.stored(matrix).whole()

    @contextmanager
    def replaced(self, matrix: Matrix, values: Tensor) -> Iterator[None]:
        """Run with another matrix, (out, in), in place of this one; the model's own parameter is back afterwards."""
        module = self.module(matrix)
        own = self._weight(matrix)
        place = self.stored(matrix)
        changed = (values.T if place.transposed else values).to(own).contiguous()
        if place.features is not None:
            changed = own.detach().index_copy(place.dim, place.features.to(own.device), changed)
        module.weight = nn.Parameter(changed, requires_grad=False)
        try:
            yield
        finally:
            module.weight = own

    def check(self, matrices: Sequence[Matrix]) -> None:
        """Refuse matrices that are no plain linear ones, not in memory, or not finite, by ValueError."""
        from transformers.pytorch_utils import Conv1D

        for matrix in matrices:
            module = self.module(matrix)
            plain = isinstance(module, nn.Linear | Conv1D) and type(module.weight) is nn.Parameter
            if not plain or {name for name, _ in module.named_parameters()} - {"weight", "bias"}:
                kind = type(module).__name__
                raise ValueError(
                    f"{matrix} is a {kind}, not a plain linear module; load the model without it"
                )
            if self._weight(matrix).is_meta:
                raise ValueError(
                    f"{matrix} is not in memory, where its weights have to be; load the model without offloading, on a "
                    "machine with more memory"
                )
            if not self.read(matrix).isfinite().all():
                raise ValueError(
                    f"{matrix} holds NaN or infinity; fetch or convert the checkpoint again"
                )

    def stored(self, matrix: Matrix) -> Dense:
        """The place of its values in the module's weight."""
        stored = self.weights.matrix(matrix.sublayer, matrix.role)
        assert isinstance(stored, Dense)
        return stored

    def _weight(self, matrix: Matrix) -> nn.Parameter:
        weight = self.module(matrix).weight
        assert isinstance(weight, nn.Parameter)
        return weight


def choose_weights(family: Family, names: Sequence[str] | None) -> tuple[str, ...]:
    """The roles asked for, in the order of programs, or all; ValueError if the family has no such one."""
    inside = {
        projection.role
        for spec in family.specs()
        for projection in spec.projections
        if not projection.stacked
    }
    known = [role for kind in KINDS for role in ROLES[kind] if role in inside]
    for name in names or ():
        if name not in known:
            raise ValueError(f"{family.name} has no weight {name!r}; {did_you_mean(name, known)}")
    if names is not None and not names:
        raise ValueError(f"no weight is named; name some of {', '.join(known)}, as in q,k")
    return tuple(role for role in known if names is None or role in names)


def find_matrices(family: Family, layers: range, weights: Sequence[str]) -> list[Matrix]:
    """List these weights of the layers that have them, in the order of their use; experts' are left out."""
    return [
        Matrix.of(layer, projection.role)
        for layer in layers
        for kind in KINDS
        for projection in family.spec(kind, layer).projections
        if projection.role in weights and not projection.stacked
    ]


Renaming = Callable[[Sublayer], Sublayer]
# Receives a matrix and its inputs, (..., in); for experts also the routing (EXPERTS).
Seen = Callable[..., None]
# The role under which a mixture's experts together receive their inputs.
EXPERTS = "experts"
S = TypeVar("S", bound=Any)  # sums over inputs, with a method `add`


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

        def seen(matrix: Matrix, inputs: Tensor, *routed: Tensor) -> None:
            if matrix not in sums:
                sums[matrix] = new(matrix, inputs)
            sums[matrix].add(inputs, *routed)

        self.step([self.see(part, matrices, seen) for part in self.parts])

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
        return join_measures([known.quality for known in self.predictions])[0]

    def quality(self, run: ProgramRun) -> tuple[Values, Values]:
        """Negative log-likelihood of another, and its divergence from this one, (windows,) each, nats per token."""
        parts = zip(run.rest(), self.predictions, strict=True)
        return join_measures([self.head.compare(stream, known) for (_, stream), known in parts])


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
        if sublayer.piece is None or not self.watched:
            return self._run(self.run_as(sublayer), stream)
        self._run(self.run_as(whole), stream)
        self.watched = []
        return self._run(self.run_as(sublayer), stream)

    def _run(self, sublayer: Sublayer, stream: Tensor) -> Tensor:
        with self.hooks:
            return super().sublayer(sublayer, stream)

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
