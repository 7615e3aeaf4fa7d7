"""Running the tasks of a shared plan on a `transformers` model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgeon.analysis.engine.prefixes import PlanStates, Register, States
from surgeon.analysis.engine.sharing import Extend, Join, Reach, RunStep, SharedPlan, Take, sublayers_in
from surgeon.checkpoint.load import streamed_layers
from surgeon.language.execute import Partial, State, advance, fork_output, land
from surgeon.language.program import Fork, Program
from surgeon.language.sublayer import KINDS, Sublayer
from surgeon.models.edit import decoder_inputs, decoder_layers
from surgeon.models.edited_layers import EditedLayers, ModelMachine
from surgeon.models.families import family_of
from surgeon.models.weights import FactorSource, ModelWeights, Tensors, module_with, stored_tensors

# A stand-in for the layers sees the decoder's arguments; one thread at a time can put it there.
_LOOKING = Lock()


class PlanMachine(ModelMachine):
    """Runs any program's sublayers on an unedited model, without a cache; averages and slices live while they run."""

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        cache_bytes: int = 0,
        factors: FactorSource | None = None,
    ) -> None:
        with _LOOKING:
            self.stream, arguments = decoder_inputs(model, input_ids)
            super().__init__(_OnDemand(model, cache_bytes, factors), arguments)

    def slot_of(self, attention: Sublayer) -> int:
        return attention.layers[0]


@dataclass
class RunningAverages:
    """Averages of whole sublayers, made of the sum of the last one of their kind, where they go on from it.

    Sums are those of `surgeon.models.weights.mean`, layer by layer in order, so the averages are the same to the last
    bit. One sum for each kind of sublayer is kept; the weights must stay as they are meanwhile.
    """

    weights: ModelWeights
    # By kind the layers, and by path from the layer their sums, in float32 or wider, and the stored dtypes.
    _sums: dict[str, tuple[tuple[int, ...], Tensors, dict[str, torch.dtype]]] = field(
        default_factory=dict
    )

    def tensors(self, sublayer: Sublayer) -> Tensors:
        """An average's tensors by path from the layer, as the layers store theirs, in memory of their own.

        Args:
            sublayer: of several layers, whole, without ranks.
        """
        self.weights.units(sublayer)
        layers, sums, dtypes = self._sums.get(sublayer.kind, ((), {}, {}))
        if not layers or layers != sublayer.layers[: len(layers)]:
            layers = sublayer.layers[:1]
            stored = stored_tensors(Sublayer(sublayer.kind, layers), self.weights)
            sums = {
                path: one.to(torch.promote_types(one.dtype, torch.float32))
                for path, one in stored.items()
            }
            dtypes = {path: one.dtype for path, one in stored.items()}
        for layer in sublayer.layers[len(layers) :]:
            for path, summed in sums.items():
                part = self.weights.tensor(f"{self.weights.family.layers}.{layer}.{path}")
                summed.add_(part.to(summed.device, dtypes[path]))
        self._sums[sublayer.kind] = sublayer.layers, sums, dtypes
        count = len(sublayer.layers)
        return {path: (summed / count).to(dtypes[path]) for path, summed in sums.items()}


class _OnDemand(EditedLayers):
    """Derives averages, slices and factors on demand and keeps none: a scan uses each once.

    Streamed weights make every other sublayer streamed; the last used ones are kept, as memory allows.
    """

    keeps_derived = False

    def __init__(self, model: PreTrainedModel, cache_bytes: int, factors: FactorSource | None) -> None:
        layers = decoder_layers(model)
        family = family_of(model.config)
        assert isinstance(layers, nn.ModuleList)
        super().__init__(
            layers, model.config, family, Program.dense(len(layers), family.steps_per_layer), factors
        )
        self.streamed = streamed_layers(model)
        self.cache: OrderedDict[Sublayer, nn.Module] = OrderedDict()
        self.cache_bytes = cache_bytes
        self.averages: RunningAverages | None = None

    def derive(self, sublayer: Sublayer) -> nn.Module:
        plain = sublayer.piece is None and not sublayer.ranks and not self.holds_factors
        if len(sublayer.layers) == 1 or not plain or self.streamed is not None:
            return super().derive(sublayer)
        weights = self.weights()
        if self.averages is None:
            self.averages = RunningAverages(weights)
        spec = self.family.spec(sublayer.kind, sublayer.layers[0])
        layer = self.layer(sublayer.layers[0])
        return module_with(self.averages.tensors(sublayer), layer, spec, weights.head_dim)

    def owner(self, sublayer: Sublayer) -> nn.Module:
        if self.is_derived(sublayer):
            return self.derive(sublayer)
        if self.streamed is None:
            return super().owner(sublayer)
        if sublayer not in self.cache:  # those used longest ago give way to it
            size = {kind: self.streamed.sublayer_bytes(kind) for kind in KINDS}
            while (
                self.cache
                and sum(size[one.kind] for one in self.cache) > self.cache_bytes - size[sublayer.kind]
            ):
                self.cache.popitem(last=False)
            self.cache[sublayer] = self.derive(sublayer)
        self.cache.move_to_end(sublayer)
        return self.cache[sublayer]

    def view_weights(self) -> ModelWeights:
        if self.streamed is None:
            return super().view_weights()
        return self.streamed.weights(self.family.head_dim(self.config), self.factors)


@torch.inference_mode()
def run_plan(
    plan: SharedPlan,
    machine: PlanMachine,
    ran: Callable[[int], Any] = lambda _: None,
    states: States | None = None,
    cached: PlanStates | None = None,
) -> Iterator[tuple[Program, Tensor]]:
    """Run the plan, yielding each program with the stream after it, (windows, tokens, hidden), as it is reached."""
    if states is None:
        registers = States(plan)
    else:
        registers = states
    registers[0] = State(machine.stream)
    for task, freed in zip(plan.tasks, plan.frees, strict=True):
        if isinstance(task, Reach):
            yield task.program, land(_state(registers, task.source)).stream
        elif isinstance(task, Take):
            assert cached is not None
            registers[task.target] = cached.take(task)
        else:
            registers[task.target] = result = _result(task, registers, machine)
            if cached is not None and isinstance(result, State):
                cached.offer(task.target, result)
            ran(sublayers_in(task))
        for register in freed:
            del registers[register]


def _result(task: RunStep | Extend | Join, registers: States, machine: PlanMachine) -> Register:
    """The state after a task, or its running sum of what branches add."""
    before = _state(registers, task.source)
    if isinstance(task, RunStep):
        state = advance(before, task.step, machine)
        if task.land:
            return land(state)
        return state
    start = land(before)
    if task.total is None:
        total = None
    else:
        total = registers[task.total]
    assert not isinstance(total, State)
    if isinstance(task, Extend):
        added = fork_output(Fork((task.branch,)), start.stream, machine)
        if total is None:
            return added
        return total + added
    assert total is not None
    state = State(start.stream, machine.reduce(Partial(total)), start.added)
    if task.land:
        return land(state)
    return state


def _state(registers: States, register: int) -> State:
    state = registers[register]
    assert isinstance(state, State)
    return state
