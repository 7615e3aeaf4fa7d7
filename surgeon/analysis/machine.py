"""Running the tasks of a shared plan on a `transformers` model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgeon.analysis.sharing import Extend, Join, Plan, Reach, Run, Task, sublayers_in
from surgeon.execute import State, advance, fork_output, land
from surgeon.families import family_of
from surgeon.model import EditedLayers, ModelMachine, decoder_inputs, decoder_layers
from surgeon.program import Fork, Program, Sublayer
from surgeon.weights import derive_sublayer


class PlanMachine(ModelMachine):
    """Runs any program's sublayers on an unedited model, without a cache; averages and slices live while they run.

    Args:
        model: left as it is.
        input_ids: (windows, tokens), all of them real tokens.
    """

    def __init__(self, model: PreTrainedModel, input_ids: Tensor) -> None:
        self.stream, arguments = decoder_inputs(model, input_ids)
        super().__init__(_OnDemand(model), arguments)

    def slot_of(self, attention: Sublayer) -> int:
        return attention.layers[0]


class _OnDemand(EditedLayers):
    """Derives a sublayer when it is asked for, and keeps none: a scan uses each of them once."""

    def __init__(self, model: PreTrainedModel) -> None:
        layers, family = decoder_layers(model), family_of(model.config)
        assert isinstance(layers, nn.ModuleList)
        super().__init__(layers, model.config, family, Program.dense(len(layers), family.steps_per_layer))

    def owner(self, sublayer: Sublayer) -> nn.Module:
        if len(sublayer.layers) == 1 and sublayer.piece is None:
            return super().owner(sublayer)
        sources = [self.layer(k) for k in sublayer.layers]
        return derive_sublayer(sublayer, sources, self.family, self.config)


@torch.inference_mode()
def run_plan(
    plan: Plan, machine: PlanMachine, ran: Callable[[int], Any] = lambda _: None
) -> Iterator[tuple[Program, Tensor]]:
    """Run the plan, yielding each program with the stream after it, (windows, tokens, hidden), as it is reached.

    Args:
        ran: called after every task with the number of sublayers it ran.
    """
    registers: dict[int, Any] = {0: State(machine.stream)}
    for task, freed in zip(plan.tasks, plan.frees, strict=True):
        if isinstance(task, Reach):
            yield task.program, land(registers[task.source]).stream
        else:
            registers[task.target] = _result(task, registers, machine)
            ran(sublayers_in(task))
        for register in freed:
            del registers[register]


def _result(task: Task, registers: dict[int, Any], machine: PlanMachine) -> State | Tensor:
    """What a task leaves in its register: a state, or a running sum of what branches add."""
    if isinstance(task, Run):
        state = advance(registers[task.source], task.step, machine)
        return land(state) if task.land else state
    start = land(registers[task.source])
    if isinstance(task, Extend):
        added = fork_output(Fork((task.branch,)), start.stream, machine)
        return added if task.total is None else registers[task.total] + added
    assert isinstance(task, Join)
    state = State(start.stream, machine.reduce(registers[task.total]), start.added)
    return land(state) if task.land else state
