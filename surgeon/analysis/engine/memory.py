"""The memory of running a plan, and how many windows of text fit beside each other into a limit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from surgeon.analysis.engine.sharing import SharedPlan
from surgeon.analysis.engine.walk import cache_bytes
from surgeon.checkpoint.load import StreamedLayers, streamed_layers
from surgeon.language.sublayer import KINDS
from surgeon.memory import available_bytes, free_bytes, resident_bytes, show_size
from surgeon.models.families import family_of
from surgeon.quality.head import OutputHead

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
    streamed = streamed_layers(model)

    def needed(tokens: int) -> int:
        if streamed is None:
            return working_bytes(model, plan, tokens)
        return streaming_bytes(model, streamed, plan, tokens)

    return _largest_batch(model, ids, needed, memory, batch)


def windows_in_a_walk(
    model: PreTrainedModel, ids: Tensor, streams: int = 2, beside: int = 0, memory: int | None = None
) -> int:
    """Choose how many windows to run together in a walk through the unedited model; errors as `windows_at_once`."""
    beside += cache_bytes(model)
    return _largest_batch(
        model, ids, lambda tokens: beside + _computing_bytes(model, streams, tokens), memory
    )


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
    least = math.ceil((held + needed(window)) * 1.02 / 2**20)
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
    streamed = streamed_layers(model)
    assert streamed is not None
    held, limit = _held_and_limit(model.device, memory)
    least = _least_states(model, tokens)
    left = limit - held - streaming_bytes(model, streamed, plan, tokens) + least
    states = max(left // 2, least)
    return max(0, left - states), states


def working_bytes(model: PreTrainedModel, plan: SharedPlan, tokens: int) -> int:
    """An upper estimate of a plan's memory on this many tokens, beside the model's."""
    derived = 0
    if any(len(sublayer.layers) > 1 for program in plan.programs for sublayer in program.sublayers()):
        # Averages on the way, in every lane: the sum so far, the next layer, and the average's module.
        layers = model.get_submodule(family_of(model.config).layers)
        largest = 3 * max(sum(p.numel() for p in layer.parameters()) * 4 for layer in layers.children())
        derived = largest * lanes_for(model.device, 1, tokens)
    return _computing_bytes(model, plan.peak_tensors, tokens) + derived + _factor_bytes(model, plan)


def streaming_bytes(
    model: PreTrainedModel, streamed: StreamedLayers, plan: SharedPlan, tokens: int
) -> int:
    """Count the bytes for streamed layers, with most states on disk."""
    # Of one task: its weights, the sums of a merge, and activations.
    weights = 3 * max(map(streamed.sublayer_bytes, KINDS))
    task = _FIRST_USE + int(_SLACK * _activation_bytes(model, tokens)) + weights
    return task + _least_states(model, tokens) + _factor_bytes(model, plan)


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


def _factor_bytes(model: PreTrainedModel, plan: SharedPlan) -> int:
    """Memory of factorising matrices: a layer's directions, and one decomposition, both in float64."""
    if not any(sublayer.ranks for program in plan.programs for sublayer in program.sublayers()):
        return 0
    sizes = [
        math.prod(shape)
        for shape in family_of(model.config).layer_shapes(model.config).matrices.values()
    ]
    return 8 * (sum(sizes) + 5 * max(sizes))


def _least_states(model: PreTrainedModel, tokens: int) -> int:
    """Count a streamed model's states of one task."""
    config: Any = model.config
    return int(6 * tokens * config.hidden_size * max(4, model.dtype.itemsize))
