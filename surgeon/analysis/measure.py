"""Measuring many programs on the same windows, within a limit of memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from surgeon.analysis.machine import PlanMachine, run_plan
from surgeon.analysis.sharing import Plan, share
from surgeon.families import family_of
from surgeon.memory import resident_bytes, show_size
from surgeon.program import Program
from surgeon.quality.head import OutputHead, Quality, Reference

# On a CPU 4,096 tokens of a small model were a third slower than 2 x 2,048: what a layer computes outgrows the cache.
TOKENS_AT_ONCE = {"cpu": 2048, "cuda": 32768}
# Measured on the demo model: what is freed in between is not all given back, and libraries allocate on first use.
_SLACK = 1.5
_FIRST_USE = 40 << 20


References = dict[range, Reference]  # by windows


@dataclass(frozen=True)
class Measured:
    """One program's quality on some of the windows.

    Attributes:
        start: the first of these windows.
    """

    program: Program
    start: int
    quality: Quality


def measure(
    model: PreTrainedModel,
    ids: Tensor,
    dense: Program,
    programs: Iterable[Program],
    at_once: int,
    is_done: Callable[[Program, range], bool] = lambda *_: False,
    ran: Callable[[float], Any] = lambda _: None,
    references: References | None = None,
) -> Iterator[Measured]:
    """The quality of the dense program and of others, some windows at a time.

    Args:
        model: unedited; it is left as it is.
        ids: (windows, tokens).
        dense: the model's own program, which the others' divergence is from.
        at_once: how many windows are run together.
        is_done: says which programs need no measurement on these windows.
        ran: called with the work done: sublayers times the share of the windows they ran on.
        references: keeps what the dense program predicts, so that a later call with the same dictionary runs it on
            none of these windows again (and yields it only if it is among the programs).

    Raises:
        ValueError: if the model's own predictions are not finite.
    """
    head = OutputHead(model)
    programs = list(programs)
    plan, planned = Plan((), (), {}, 0), None
    for start in range(0, len(ids), at_once):
        chunk = ids[start : start + at_once].to(model.device)
        windows = range(start, start + len(chunk))
        todo = [program for program in programs if not is_done(program, windows)]
        if not todo and is_done(dense, windows):
            continue
        kept: References = {} if references is None else references
        wanted = todo if windows in kept else [dense, *todo]
        if wanted != planned:
            plan, planned = share(wanted), wanted
        share_of_all = len(chunk) / len(ids)
        yield from _measure_chunk(model, chunk, windows, dense, plan, head, partial(_scaled, ran, share_of_all), kept)


def _scaled(ran: Callable[[float], Any], factor: float, amount: int) -> None:
    ran(factor * amount)


def _measure_chunk(
    model: PreTrainedModel,
    chunk: Tensor,
    windows: range,
    dense: Program,
    plan: Plan,
    head: OutputHead,
    ran: Callable[[int], Any],
    references: References,
) -> Iterator[Measured]:
    machine = PlanMachine(model, chunk)
    for program, stream in run_plan(plan, machine, ran):
        if program == dense:
            reference = references[windows] = head.reference(stream, chunk)
            if not reference.quality.nll.isfinite().all():
                raise ValueError(f"the unedited model's predictions are not finite: {_first_bad(machine, dense)}")
            quality = reference.quality
        else:
            quality = head.compare(stream, references[windows])
        yield Measured(program, windows.start, Quality(quality.nll.cpu(), quality.divergence.cpu()))


def _first_bad(machine: PlanMachine, dense: Program) -> str:
    """Where numbers stop being finite in the unedited model."""
    if not machine.stream.isfinite().all():
        return "NaN or infinity in the embedded tokens; check the embedding's weights"
    prefixes = (Program(dense.nodes[: end + 1]) for end in range(len(dense)))
    for prefix in prefixes:
        for _, stream in run_plan(share([prefix]), machine):
            if not stream.isfinite().all():
                return f"NaN or infinity appears first in {prefix.nodes[-1]}; check that layer's weights"
    return "NaN or infinity appears in the output head; check its weights and the final norm's"


def windows_at_once(
    model: PreTrainedModel, plan: Plan, ids: Tensor, memory: int | None = None, batch: int | None = None
) -> int:
    """How many windows to run together.

    Args:
        plan: what will be run; its `peak_tensors` says how many states are held.
        memory: a limit in bytes on the memory of the whole process, model and libraries included.
        batch: at most this many windows.

    Raises:
        ValueError: if not even one window fits into the limit, saying which limit would do.
    """
    window = ids.shape[1]
    most = batch or max(1, TOKENS_AT_ONCE.get(model.device.type, TOKENS_AT_ONCE["cpu"]) // window)
    most = min(most, len(ids))
    if memory is None:
        return most
    held = resident_bytes()
    for windows in range(most, 0, -1):
        if held + working_bytes(model, plan, windows * window) <= memory:
            return windows
    # What the process holds varies a little from run to run.
    needed = working_bytes(model, plan, window)
    least = math.ceil((held + needed) * 1.02 / 2**20)
    raise ValueError(
        f"a memory limit of {show_size(memory)} is too small: the model and the libraries hold {show_size(held)}, "
        f"one window of {window} tokens needs {show_size(needed)}; use --memory {least}MB or more"
    )


def working_bytes(model: PreTrainedModel, plan: Plan, tokens: int) -> int:
    """An upper estimate of what running a plan on this many tokens takes beside the model."""
    config: Any = model.config
    hidden, size = config.hidden_size, max(4, model.dtype.itemsize)
    width = max(getattr(config, name, 0) or 0 for name in ("intermediate_size", "ffn_dim", "hidden_size"))
    states = (plan.peak_tensors + 2) * tokens * hidden * size  # and what a reference keeps
    layer = (4 * width + 8 * hidden) * tokens * size
    work = _SLACK * (states + max(layer, OutputHead(model).working_bytes(tokens)))
    return _FIRST_USE + int(work) + _derived_bytes(model, plan)


def _derived_bytes(model: PreTrainedModel, plan: Plan) -> int:
    """What averaging layers' weights on the way takes: the sum so far, the next layer, and the average's module."""
    if all(len(sublayer.layers) == 1 for program in plan.sublayers for sublayer in program.sublayers()):
        return 0
    layers = model.get_submodule(family_of(model.config).layers)
    return 3 * max(sum(p.numel() for p in layer.parameters()) * 4 for layer in layers.children())
