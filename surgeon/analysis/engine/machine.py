"""Running a `transformers` model: the tasks of a shared plan, or layer by layer, keeping each sublayer's output.

So many windows of text run together as fit beside each other into a limit of memory.

A program of its own is walked through as runs of whole layers, each with the stream that it reads: its own track's,
where it has tracks. A run is a stretch of neighbouring layers that one list of the program's nodes, its own or a
branch's, has whole and in order. The unedited program is one run of all layers; of native tracks every branch of every
block is one.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import reduce
from threading import Lock
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgeon.analysis.engine.prefixes import PlanStates, Register, States
from surgeon.analysis.engine.sharing import Extend, Join, Reach, RunStep, SharedPlan, Take, sublayers_in
from surgeon.language.execute import Branch, Partial, State, advance, fork_output, land
from surgeon.language.operations.applied import parts_of
from surgeon.language.program import Fork, Program
from surgeon.language.sublayer import ATTENTION, FEED_FORWARD, KINDS, Sublayer
from surgeon.machine import available_bytes, free_bytes, resident_bytes, show_size
from surgeon.models.edit import EditedLayers, ModelMachine, decoder_inputs, decoder_layers
from surgeon.models.families import family_of
from surgeon.models.weights import FactorSource, ModelWeights, Tensors, module_with, stored_tensors
from surgeon.opened import StreamedLayers, streamed_layers
from surgeon.quality.head import OutputHead

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


class _OnDemand(EditedLayers):
    """Derives averages, slices and factors on demand and keeps none: a scan uses each once.

    Averages of whole sublayers are made of the sum of the last one of their kind, where they go on from it. Streamed
    weights make every other sublayer streamed; the last used ones are kept, as memory allows.
    """

    def __init__(self, model: PreTrainedModel, cache_bytes: int, factors: FactorSource | None) -> None:
        layers = decoder_layers(model)
        family = family_of(model.config)
        assert isinstance(layers, nn.ModuleList)
        super().__init__(
            layers,
            model.config,
            family,
            Program.dense(len(layers), family.steps_per_layer),
            factors,
            keeps_derived=False,
        )
        self.streamed = streamed_layers(model)
        self.cache: OrderedDict[Sublayer, nn.Module] = OrderedDict()
        self.cache_bytes = cache_bytes
        # By kind the layers, and by path from the layer their sums, in float32 or wider, and the stored dtypes.
        self._sums: dict[str, tuple[tuple[int, ...], Tensors, dict[str, torch.dtype]]] = {}

    def derive(self, sublayer: Sublayer) -> nn.Module:
        plain = sublayer.piece is None and not sublayer.ranks and not self.holds_factors
        if len(sublayer.layers) == 1 or not plain or self.streamed is not None:
            return super().derive(sublayer)
        spec = self.family.spec(sublayer.kind, sublayer.layers[0])
        layer = self.layer(sublayer.layers[0])
        return module_with(self.average(sublayer), layer, spec, self.weights().head_dim)

    def average(self, sublayer: Sublayer) -> Tensors:
        """An average's tensors by path from the layer, as the layers store theirs, in memory of their own.

        Sums are those of `surgeon.models.weights.mean`, layer by layer in order, so the averages are the same to the
        last bit. The weights must stay as they are meanwhile.

        Args:
            sublayer: of several layers, whole, without ranks.
        """
        weights = self.weights()
        weights.units(sublayer)
        layers, sums, dtypes = self._sums.get(sublayer.kind, ((), {}, {}))
        if not layers or layers != sublayer.layers[: len(layers)]:
            layers = sublayer.layers[:1]
            stored = stored_tensors(Sublayer(sublayer.kind, layers), weights)
            sums = {
                path: one.to(torch.promote_types(one.dtype, torch.float32))
                for path, one in stored.items()
            }
            dtypes = {path: one.dtype for path, one in stored.items()}
        for layer in sublayer.layers[len(layers) :]:
            for path, summed in sums.items():
                part = weights.tensor(f"{self.family.layers}.{layer}.{path}")
                summed.add_(part.to(summed.device, dtypes[path]))
        self._sums[sublayer.kind] = sublayer.layers, sums, dtypes
        count = len(sublayer.layers)
        return {path: (summed / count).to(dtypes[path]) for path, summed in sums.items()}

    def owner(self, sublayer: Sublayer) -> nn.Module:
        if self.streamed is None or self.is_derived(sublayer):
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


# On a CPU 4,096 tokens of a small model were a third slower than 2 x 2,048: what a layer computes outgrows the cache.
TOKENS_AT_ONCE = {"cpu": 2048, "cuda": 32768}
LEAST_TOKENS = 256  # products of fewer tokens are slower for each of them
# Measured on the demo model: what is freed in between is not all given back, and libraries allocate on first use.
_SLACK = 1.5
_FIRST_USE = 40 << 20


def windows_at_once(
    model: PreTrainedModel,
    plan: SharedPlan,
    ids: Tensor,
    memory: int | None = None,
    batch: int | None = None,
) -> int:
    """Choose how many windows to run together, at most `batch`; ValueError if not even one fits into the limit.

    Args:
        memory: a limit in bytes on the memory of the whole process, model and libraries included.
    """
    return _largest_batch(model, ids, lambda tokens: working_bytes(model, plan, tokens), memory, batch)


def windows_in_a_walk(
    model: PreTrainedModel, ids: Tensor, streams: int = 2, beside: int = 0, memory: int | None = None
) -> int:
    """Choose how many windows to run together in a walk through the unedited model; errors as `windows_at_once`."""
    beside += cache_bytes(model)
    return _largest_batch(
        model, ids, lambda tokens: beside + _computing_bytes(model, streams, tokens), memory
    )


def cache_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights that a walk keeps of those read when needed: two neighbouring layers, used again and again."""
    streamed = streamed_layers(model)
    if streamed is None:
        return 0
    return 2 * sum(streamed.sublayer_bytes(kind) for kind in KINDS)


def lanes_for(device: torch.device, window: int, windows: int) -> int:
    """Into how many parts to share out windows: on a CPU one for each thread that torch has, if they suffice."""
    if device.type != "cpu":
        return 1
    return max(1, min(torch.get_num_threads(), windows, window * windows // LEAST_TOKENS))


def _largest_batch(
    model: PreTrainedModel,
    ids: Tensor,
    needed: Callable[[int], int],
    memory: int | None,
    batch: int | None = None,
) -> int:
    """The most windows, of those that run fast together, that fit into memory; `needed` bytes for so many tokens."""
    window = ids.shape[1]
    most = batch or max(1, TOKENS_AT_ONCE.get(model.device.type, TOKENS_AT_ONCE["cpu"]) // window)
    most = min(most, len(ids))
    on_gpu = model.device.type == "cuda"
    if streamed_layers(model) is None and (memory is None or on_gpu):
        return most
    held, limit = _held_and_limit(model.device, memory)
    for windows in range(most, 0, -1):
        if held + needed(windows * window) <= limit:
            return windows
    if on_gpu:
        raise ValueError(
            f"{model.device} has {show_size(limit - held)} left, and one window of {window} tokens needs "
            f"{show_size(needed(window))}; use shorter windows, or the CPU"
        )
    # What the process holds varies a little from run to run.
    least = math.ceil((held + needed(window)) * 1.02 / 1e6)
    raise ValueError(
        f"a memory limit of {show_size(limit)} is too small: the model and the libraries hold {show_size(held)}, "
        f"one window of {window} tokens needs {show_size(needed(window))}; set memory to {least}MB or more"
    )


def _held_and_limit(device: torch.device, memory: int | None) -> tuple[int, int]:
    """Bytes that the model and its computing hold, and may hold: of a GPU, or of this process."""
    if device.type == "cuda":  # `memory` limits the main memory
        held = torch.cuda.memory_allocated(device)
        return held, held + available_bytes(device)
    held = resident_bytes()
    return held, memory or held + free_bytes()


def streaming_room(
    model: PreTrainedModel, plan: SharedPlan, tokens: int, memory: int | None
) -> tuple[int, int]:
    """Bytes for cached weights and for hidden states of a streamed model's plan; the rest of these goes to disk."""
    held, limit = _held_and_limit(model.device, memory)
    least = _least_states(model, tokens)
    left = limit - held - working_bytes(model, plan, tokens) + least
    states = max(left // 2, least)
    return max(0, left - states), states


def working_bytes(
    model: PreTrainedModel, plan: SharedPlan, tokens: int, streamed: StreamedLayers | None = None
) -> int:
    """An upper estimate of a plan's memory on this many tokens, beside the model's.

    Of a streamed model, whose weights are read meanwhile, it is the least: with most states on disk.

    Args:
        streamed: the model's layers, if they are to be streamed; by default as the model is.
    """
    family = family_of(model.config)
    needed = 0
    if any(sublayer.ranks for program in plan.programs for sublayer in program.sublayers()):
        # Factorising matrices: a layer's directions, and one decomposition, both in float64.
        shapes = family.layer_shapes(model.config).matrices
        sizes = [math.prod(shape) for shape in shapes.values()]
        needed = 8 * (sum(sizes) + 5 * max(sizes))
    if streamed is None:
        streamed = streamed_layers(model)
    if streamed is not None:
        # Of one task: its weights, the sums of a merge, and activations.
        needed += 3 * max(map(streamed.sublayer_bytes, KINDS))
        needed += _FIRST_USE + int(_SLACK * _activation_bytes(model, tokens))
        return needed + _least_states(model, tokens)
    if any(len(sublayer.layers) > 1 for program in plan.programs for sublayer in program.sublayers()):
        # Averages on the way, in every lane: the sum so far, the next layer, and the average's module.
        layers = model.get_submodule(family.layers).children()
        largest = max(sum(p.numel() for p in layer.parameters()) * 4 for layer in layers)
        needed += 3 * largest * lanes_for(model.device, 1, tokens)
    return needed + _computing_bytes(model, plan.peak_tensors, tokens)


def _computing_bytes(model: PreTrainedModel, tensors: int, tokens: int) -> int:
    """Memory of computing while so many tensors of the size of these tokens' stream are held."""
    size: int = model.config.hidden_size * max(4, model.dtype.itemsize)
    states = (tensors + 2) * tokens * size  # and what a reference keeps
    return _FIRST_USE + int(_SLACK * (states + _activation_bytes(model, tokens)))


def _activation_bytes(model: PreTrainedModel, tokens: int) -> int:
    """Memory of a sublayer, or the output head, while it computes."""
    config: Any = model.config
    hidden = int(config.hidden_size)
    width = max(family_of(config).units(config)["neurons"], hidden)
    layer = (4 * width + 8 * hidden) * tokens * max(4, model.dtype.itemsize)
    return max(layer, OutputHead(model).working_bytes(tokens))


def _least_states(model: PreTrainedModel, tokens: int) -> int:
    """Count a streamed model's states of one task."""
    config: Any = model.config
    return int(6 * tokens * config.hidden_size * max(4, model.dtype.itemsize))


HEAD_NOT_FINITE = (
    "the unedited model's predictions are not finite: check the final norm and the output head"
)


@dataclass(frozen=True)
class LayerPass:
    """One layer's pass over a stream, each tensor (windows, tokens, hidden).

    Attributes:
        layer: its number.
        before: the stream that the attention reads.
        attention, mlp: what they add.
        middle: the stream that the feed-forward reads; `before` itself where both read the same (GPT-NeoX).
    """

    layer: int
    before: Tensor
    attention: Tensor
    middle: Tensor
    mlp: Tensor

    @property
    def update(self) -> Tensor:
        return self.attention + self.mlp

    @property
    def after(self) -> Tensor:
        return self.before + self.attention + self.mlp


class Walk:
    """Some windows of text on an unedited model: runs any layer's sublayers on any stream of their shape.

    Args:
        ids: (windows, tokens), all of them real tokens.
        like: a walk over windows of the same shape, with the same masks and positions.

    Attributes:
        ids: those windows, on the model's device.
        start: the embedded stream, (windows, tokens, hidden).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        ids: Tensor,
        like: Walk | None = None,
        factors: FactorSource | None = None,
    ) -> None:
        self.ids = ids.to(model.device)
        machine = PlanMachine(model, self.ids, cache_bytes(model), factors)
        self.start = machine.stream
        self.machine: PlanMachine = machine if like is None else like.machine
        self.reads_same = family_of(model.config).steps_per_layer == 1
        if not self.start.isfinite().all():
            raise ValueError(
                "the unedited model's embedded tokens are not finite; check the embedding's weights"
            )

    def attention(self, layer: int, stream: Tensor) -> Tensor:
        """Run a layer's attention on this stream, its norm included."""
        return self.machine.sublayer(Sublayer(ATTENTION, (layer,)), stream)

    def mlp(self, layer: int, stream: Tensor) -> Tensor:
        return self.machine.sublayer(Sublayer(FEED_FORWARD, (layer,)), stream)

    def layer(self, layer: int, stream: Tensor) -> LayerPass:
        attention = self.attention(layer, stream)
        middle = stream if self.reads_same else stream + attention
        return LayerPass(layer, stream, attention, middle, self.mlp(layer, middle))

    def dense_layer(self, layer: int, stream: Tensor) -> LayerPass:
        """A layer's pass over the unedited model's stream; ValueError names the sublayer that is not finite."""
        passed = self.layer(layer, stream)
        for kind, output in ((ATTENTION, passed.attention), (FEED_FORWARD, passed.mlp)):
            if not output.isfinite().all():
                raise not_finite(f"{kind}{layer}")
        return passed


def walks(
    model: PreTrainedModel, ids: Tensor, at_once: int, factors: FactorSource | None = None
) -> Iterator[Walk]:
    """Walks over all windows, so many at a time; masks and positions are made once for each shape."""
    first: dict[torch.Size, Walk] = {}
    for chunk in torch.split(ids, at_once):
        walk = Walk(model, chunk, first.get(chunk.shape), factors)
        first.setdefault(chunk.shape, walk)
        yield walk


def not_finite(where: object) -> ValueError:
    """The error for an unedited model that computes NaN or infinity, first in this sublayer or step."""
    return ValueError(
        f"the unedited model's numbers are not finite: NaN or infinity appears first in {where}; "
        "check that layer's weights"
    )


@torch.inference_mode()
def raise_not_finite(model: PreTrainedModel, ids: Tensor) -> NoReturn:
    """Raise ValueError naming where numbers stop being finite in an unedited model."""
    walk = Walk(model, ids)
    stream = walk.start
    for layer in range(model.config.num_hidden_layers):
        stream = walk.dense_layer(layer, stream).after
    raise ValueError(HEAD_NOT_FINITE)


# The sum that the last run of layers added, or for each branch of a fork that of the run at its end; None for a branch
# that ends otherwise.
Ended = tuple[Tensor | None, ...]
WholeLayers = Generator[tuple[range, LayerPass, Tensor | None], None, tuple[State, Ended]]


def layers_run(
    walk: Walk, nodes: Branch, state: State | None = None, before: Tensor | None = None
) -> WholeLayers:
    """Run a list of nodes on a walk's windows; returns the state after them, and what their end has added.

    Args:
        state: before them; by default the embedded stream.
        before: what the layer before them has added, if that is known.

    Yields:
        The whole layers as it comes to them: the layers of the run that each is in, its pass over the stream that it
        reads, and that stream without what the layer before it has added: the one before it in its run, or where tracks
        have just met, the last one of its own track. None where there is no such layer.
    """
    state = state or State(walk.start)
    ended: Ended = (before,)
    for part in parts_of(nodes, 1 if walk.reads_same else 2):
        if isinstance(part, range):
            state, ended = yield from _run(walk, part, state, ended)
        elif isinstance(part, Fork):
            state, ended = yield from _fork_run(walk, part, state, ended)
        else:
            state = advance(state, part, walk.machine)
            ended = ()
    return state, ended


def _run(walk: Walk, run: range, state: State, ended: Ended) -> WholeLayers:
    landed = land(state)
    (added,) = ended if len(ended) == 1 else (None,)
    stream = landed.stream
    total = landed.added
    without = None if added is None else stream - added
    del landed, state, added, ended
    for layer in run:
        passed = walk.dense_layer(layer, stream)
        reached = [(run, passed, without)]
        stream = passed.after
        without = passed.before
        if layer == run[-1]:
            # The last output stays pending, for a late step that may follow.
            last, read = (
                (passed.update, passed.before) if walk.reads_same else (passed.mlp, passed.middle)
            )
            update = passed.update
            landing = None if walk.reads_same else passed.attention
        else:
            landing = passed.update
        if total is not None and landing is not None:
            total = total + landing
        del passed, landing
        yield reached.pop()  # whose tensors are gone as soon as nobody has them
    return State(read, lambda: last, total), (update,)


def _fork_run(walk: Walk, fork: Fork, state: State, ended: Ended) -> WholeLayers:
    landed = land(state)
    if len(ended) != len(fork.branches):
        ended = (None,) * len(fork.branches)
    outputs = list[Tensor]()
    ends = list[Tensor | None]()
    for branch, before in zip(fork.branches, ended, strict=True):
        start = State(landed.stream, added=torch.zeros_like(landed.stream))
        behind, last = yield from layers_run(walk, branch, start, before)
        added = land(behind).added
        assert added is not None
        outputs.append(added)
        ends.append(last[0] if len(last) == 1 else None)
    output = reduce(torch.add, outputs)
    return State(landed.stream, lambda: output, landed.added), tuple(ends)
