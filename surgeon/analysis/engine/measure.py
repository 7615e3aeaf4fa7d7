"""Measuring many programs on the same windows, within a limit of memory."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from surgeon.analysis.engine.lanes import GoOn, lanes_for, parts_of, side_by_side
from surgeon.analysis.engine.machine import PlanMachine, run_plan
from surgeon.analysis.engine.order import by_layer
from surgeon.analysis.engine.prefixes import KeptStates, PlanStates
from surgeon.analysis.engine.sharing import SharedPlan, has_forks, share
from surgeon.analysis.engine.states import States
from surgeon.analysis.engine.walk import kept_bytes, raise_not_finite
from surgeon.beside import one_at_a_time
from surgeon.checkpoint.streamed import StreamedLayers, streamed_layers
from surgeon.errors import is_out_of_memory
from surgeon.language.program import Program
from surgeon.memory import free_bytes, resident_bytes, show_size
from surgeon.models.families import family_of
from surgeon.models.weights import FactorSource, TruncatedSVD
from surgeon.quality.head import OutputHead, Quality, ReferencePredictions, one_after_the_other

# On a CPU 4,096 tokens of a small model were a third slower than 2 x 2,048: what a layer computes outgrows the cache.
TOKENS_AT_ONCE = {"cpu": 2048, "cuda": 32768}
# Measured on the demo model: what is freed in between is not all given back, and libraries allocate on first use.
_SLACK = 1.5
_FIRST_USE = 40 << 20


References = MutableMapping[range, ReferencePredictions]  # by windows


@dataclass(frozen=True)
class MeasuredWindows:
    """One program's quality on some of the windows.

    Attributes:
        start: the first of these windows.
    """

    program: Program
    start: int
    quality: Quality


@dataclass(frozen=True)
class Streaming:
    """How a model that is larger than memory is run.

    Attributes:
        kept_bytes: of weights that may be kept for the next task.
        states_bytes: of hidden states that may be held in memory; the rest goes to disk.
        folder: where on disk.
    """

    kept_bytes: int
    states_bytes: int
    folder: Path | None


@dataclass(frozen=True)
class MeasureOptions:
    """How programs are measured; checked as it is made.

    Attributes:
        at_once: how many windows are run together; on a CPU they are shared out to torch's threads.
        first: how many of them at first, if fewer; then as many as were run before, so that programs can be found
            done early.
        is_done: says which programs need no measurement on some windows.
        ran: called with the work done: sublayers times the share of the windows they ran on.
        references: keeps what the dense program predicts, so that a later call with the same dictionary runs it on
            none of these windows again (and yields it only if it is among the programs).
        memory: for a model whose weights are streamed, the limit in bytes on the memory of the whole process.
        folder: where such a model's hidden states are put that do not fit into it.
        blocks: into how many parts each window is cut for `Quality.blocks`.
        kept: states of earlier calls on the same windows of the same model, which are gone on from and added to; not
            for a model whose weights are streamed.
        factors: makes the factors of matrices that programs have ranks for; by default anew in every call.

    Raises:
        ValueError: if no window is to be run, or no memory may be taken.
    """

    at_once: int
    is_done: Callable[[Program, range], bool] = lambda *_: False
    ran: Callable[[float], Any] = lambda _: None
    references: References = field(default_factory=dict)
    memory: int | None = None
    folder: Path | None = None
    first: int | None = None
    blocks: int = 0
    kept: KeptStates | None = None
    factors: FactorSource | None = None

    def __post_init__(self) -> None:
        for name, number in (("at_once", self.at_once), ("first", self.first), ("memory", self.memory)):
            if number is not None and number < 1:
                raise ValueError(f"{name} must be at least 1, not {number}")


def measure(
    model: PreTrainedModel, ids: Tensor, dense: Program, programs: Iterable[Program], options: MeasureOptions
) -> Iterator[MeasuredWindows]:
    """The quality of the dense program and of others, some windows at a time.

    Where memory turns out too small for so many windows, half as many are run together from there on.

    Args:
        model: unedited; it is left as it is.
        ids: (windows, tokens).
        dense: the model's own program, which the others' divergence is from.

    Raises:
        ValueError: if the model's own predictions are not finite.
        OSError: if the disk is too small for hidden states.
    """
    programs, kept = list(programs), options.kept
    run, at_once = _ChunkRun(model, dense, options, ids, programs), options.at_once
    finished: dict[Program, int] = {}  # until which window, where a chunk had to be given up
    start = 0
    while start < len(ids):
        size = min(at_once, max(options.first or at_once, start))
        windows = range(start, min(start + size, len(ids)))
        known = all(part in options.references for part in run.parts(windows))
        asked = programs if known else [dense, *programs]
        needed = [p for p in asked if not options.is_done(p, windows) and finished.get(p, 0) < windows.stop]
        try:
            for measured in run.measure(windows, needed):
                yield measured
                finished[measured.program] = windows.stop
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if kept is not None and kept.bytes:
                warnings.warn("out of memory; dropping states kept for later programs", stacklevel=2)
                kept.shrink(kept.bytes // 2)
                continue
            if len(windows) == 1:
                raise
            at_once = len(windows) // 2
            warnings.warn(f"out of memory with {len(windows)} windows together; going on with {at_once}", stacklevel=2)
        else:
            start = windows.stop
        if model.device.type == "cuda":
            torch.cuda.empty_cache()


def streams_after(
    model: PreTrainedModel,
    ids: Tensor,
    windows: range,
    dense: Program,
    programs: Iterable[Program],
    options: MeasureOptions,
) -> Iterator[tuple[Program, Tensor]]:
    """Programs with the stream after each on some windows, before the final norm, as they are reached.

    Args:
        model: unedited; it is left as it is.
        ids: (windows, tokens) of the whole text.
        windows: the ones to run, together.
        options: of which `at_once`, `first` and `is_done` do not matter.

    Yields:
        each program with its stream, (windows, tokens, hidden).
    """
    run = _ChunkRun(model, dense, options, ids)
    chunk = ids[windows.start : windows.stop].to(model.device)
    run.plan_for(list(dict.fromkeys(programs)))
    yield from run.streams(chunk, windows)


class _ChunkRun:
    """Measures programs on some windows; keeps the plan of the windows before where it is the same."""

    def __init__(
        self,
        model: PreTrainedModel,
        dense: Program,
        options: MeasureOptions,
        ids: Tensor,
        programs: Sequence[Program] = (),
    ) -> None:
        self.model, self.dense, self.ids, self.references = model, dense, ids, options.references
        self.memory, self.folder, self.ran = options.memory, options.folder, one_at_a_time(options.ran)
        self.head = OutputHead(model)
        self.blocks = options.blocks
        self.streamed = streamed_layers(model) is not None
        self.kept = None if self.streamed else options.kept
        self.factors = options.factors or TruncatedSVD(remembers=True)
        self.numbers: dict[int, int] = {}
        self.planned: list[Program] | None = None
        self.plan = SharedPlan((), (), {}, 0)
        self.shares = not self.streamed and not any(s.ranks for program in programs for s in program.sublayers())
        self.lock = Lock()

    def parts(self, windows: range) -> list[range]:
        """The windows as they are shared out to threads; not where these would read or factorise the same weights."""
        count = lanes_for(self.model.device, self.ids.shape[1], len(windows)) if self.shares else 1
        return parts_of(windows, count)

    def measure(self, windows: range, needed: list[Program]) -> Iterator[MeasuredWindows]:
        """The programs that need it on these windows, the dense one first unless its reference is kept."""
        if not needed:
            return
        parts = self.parts(windows)
        known = all(part in self.references for part in parts)
        wanted = needed if known or self.dense in needed else [self.dense, *needed]
        # All others are compared with it, and where it has forks one of them could be reached before it.
        first = [self.dense] if self.dense in wanted and has_forks(self.dense) else []
        for some in (first, [program for program in wanted if program not in first]):
            if some:
                self.plan_for(some)
                for program, found in side_by_side([partial(self._lane, part) for part in parts]):
                    if program in needed:
                        yield MeasuredWindows(program, windows.start, one_after_the_other(found))

    def plan_for(self, wanted: list[Program]) -> None:
        """Plan how these programs are run, if they are others than those before."""
        if wanted == self.planned:
            return
        self.plan, self.planned = share(wanted), wanted
        if self.streamed:
            self.plan = by_layer(self.plan, self.dense if self.dense in wanted else None)
        if self.kept is not None:
            self.numbers = self.kept.prefixes.registers(self.plan)

    def _lane(self, windows: range, go_on: GoOn) -> Iterator[tuple[Program, Quality]]:
        chunk = self.ids[windows.start : windows.stop].to(self.model.device)
        for program, stream in self.streams(chunk, windows, go_on):
            yield program, self._quality(program, stream, chunk, windows).cpu()

    def streams(self, chunk: Tensor, windows: range, go_on: GoOn = lambda: None) -> Iterator[tuple[Program, Tensor]]:
        """The planned programs with the stream after each, (windows, tokens, hidden), as they are reached."""
        streaming = None
        if self.streamed:
            beside = _factor_bytes(self.model, self.plan)
            streaming = streaming_room(self.model, chunk.numel(), self.memory, self.folder, beside)
        machine = PlanMachine(self.model, chunk, streaming.kept_bytes if streaming else 0, self.factors)
        kept = None if self.kept is None else PlanStates(self.kept, self.plan, self.numbers, windows)
        plan = self.plan if kept is None else kept.plan

        def ran(sublayers: int) -> None:
            go_on()
            self.ran(sublayers * len(windows) / len(self.ids))

        with States(plan, *((streaming.states_bytes, streaming.folder) if streaming else ())) as states:
            yield from run_plan(plan, machine, ran, states, kept)

    def _quality(self, program: Program, stream: Tensor, chunk: Tensor, windows: range) -> Quality:
        if program != self.dense:
            return self.head.compare(stream, self.references[windows], self.blocks)
        reference = self.head.reference(stream, chunk)
        with self.lock:
            self.references[windows] = reference
        if not reference.quality.nll.isfinite().all():
            raise_not_finite(self.model, chunk)
        own = reference.quality
        return replace(own, blocks=own.divergence.new_zeros(len(windows), self.blocks)) if self.blocks else own


def windows_at_once(
    model: PreTrainedModel, plan: SharedPlan, ids: Tensor, memory: int | None = None, batch: int | None = None
) -> int:
    """How many windows to run together.

    Args:
        plan: what will be run; its `peak_tensors` says how many states are held.
        memory: a limit in bytes on the memory of the whole process, model and libraries included.
        batch: at most this many windows.

    Raises:
        ValueError: if not even one window fits into the limit, saying which limit would do.
    """
    streamed = streamed_layers(model)

    def needed(tokens: int) -> int:
        if streamed is None:
            return working_bytes(model, plan, tokens)
        return _task_bytes(model, streamed, tokens) + _least_states(model, tokens) + _factor_bytes(model, plan)

    return _fitting(model, ids, needed, memory, batch)


def windows_in_a_walk(
    model: PreTrainedModel, ids: Tensor, streams: int = 2, beside: int = 0, memory: int | None = None
) -> int:
    """How many windows to run together in a walk through the unedited model.

    Args:
        streams: how many tensors of the size of these windows' stream are held at most.
        beside: bytes of what is held beside them.
        memory: a limit in bytes on the memory of the whole process, model and libraries included.

    Raises:
        ValueError: if not even one window fits into the limit, saying which limit would do.
    """
    beside += kept_bytes(model)
    held = SharedPlan((), (), {}, streams)
    return _fitting(model, ids, lambda tokens: beside + working_bytes(model, held, tokens), memory)


def _fitting(
    model: PreTrainedModel, ids: Tensor, needed: Callable[[int], int], memory: int | None, batch: int | None = None
) -> int:
    """The most windows, of those that run fast together, that fit into memory; `needed` bytes for so many tokens."""
    window = ids.shape[1]
    most = batch or max(1, TOKENS_AT_ONCE.get(model.device.type, TOKENS_AT_ONCE["cpu"]) // window)
    most = min(most, len(ids))
    if memory is None and streamed_layers(model) is None:
        return most
    held, limit = resident_bytes(), memory or resident_bytes() + free_bytes()
    for windows in range(most, 0, -1):
        if held + needed(windows * window) <= limit:
            return windows
    # What the process holds varies a little from run to run.
    least = math.ceil((held + needed(window)) * 1.02 / 2**20)
    raise ValueError(
        f"a memory limit of {show_size(limit)} is too small: the model and the libraries hold {show_size(held)}, "
        f"one window of {window} tokens needs {show_size(needed(window))}; use --memory {least}MB or more"
    )


def streaming_room(
    model: PreTrainedModel, tokens: int, memory: int | None, folder: Path | None, beside: int = 0
) -> Streaming:
    """How to share out the memory that is left for running a streamed model on this many tokens.

    Args:
        beside: bytes of what is held beside it.
    """
    streamed = streamed_layers(model)
    assert streamed is not None
    limit = memory or resident_bytes() + free_bytes()
    left = limit - resident_bytes() - _task_bytes(model, streamed, tokens) - beside
    states = max(left // 2, _least_states(model, tokens))
    return Streaming(max(0, left - states), states, folder)


def _least_states(model: PreTrainedModel, tokens: int) -> int:
    config: Any = model.config
    return int(6 * tokens * config.hidden_size * max(4, model.dtype.itemsize))


def _task_bytes(model: PreTrainedModel, streamed: StreamedLayers, tokens: int) -> int:
    """An upper estimate of what one task of a streamed model takes: its weights, and what they compute.

    A merged sublayer holds the sum so far, the next layer's tensors and the average.
    """
    family = family_of(model.config)
    weights = max(streamed.sublayer_bytes(family.attention), streamed.sublayer_bytes(family.mlp))
    return _FIRST_USE + int(_SLACK * _activation_bytes(model, tokens)) + 3 * weights


def working_bytes(model: PreTrainedModel, plan: SharedPlan, tokens: int) -> int:
    """An upper estimate of what running a plan on this many tokens takes beside the model."""
    size: int = model.config.hidden_size * max(4, model.dtype.itemsize)
    states = (plan.peak_tensors + 2) * tokens * size  # and what a reference keeps
    derived = _derived_bytes(model, plan) * lanes_for(model.device, 1, tokens) + _factor_bytes(model, plan)
    return _FIRST_USE + int(_SLACK * (states + _activation_bytes(model, tokens))) + derived


def _activation_bytes(model: PreTrainedModel, tokens: int) -> int:
    """What a sublayer, or the output head, needs while it computes."""
    config: Any = model.config
    hidden = int(config.hidden_size)
    width = max(family_of(config).units(config)["neurons"], hidden)
    layer = (4 * width + 8 * hidden) * tokens * max(4, model.dtype.itemsize)
    return max(layer, OutputHead(model).working_bytes(tokens))


def _derived_bytes(model: PreTrainedModel, plan: SharedPlan) -> int:
    """What averaging layers' weights on the way takes: the sum so far, the next layer, and the average's module."""
    if all(len(sublayer.layers) == 1 for program in plan.sublayers for sublayer in program.sublayers()):
        return 0
    layers = model.get_submodule(family_of(model.config).layers)
    return 3 * max(sum(p.numel() for p in layer.parameters()) * 4 for layer in layers.children())


def _factor_bytes(model: PreTrainedModel, plan: SharedPlan) -> int:
    """What factorising matrices on the way takes: a layer's directions, and one decomposition, both in float64."""
    if not any(sublayer.ranks for program in plan.sublayers for sublayer in program.sublayers()):
        return 0
    sizes = [math.prod(shape) for shape in family_of(model.config).layer_shapes(model.config).matrices.values()]
    return 8 * (sum(sizes) + 5 * max(sizes))
