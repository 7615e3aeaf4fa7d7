"""How far the residual stream turns from layer to layer, and how large the updates are that turn it.

Block influence is 1 minus the cosine between the stream before and after a layer (ShortGPT, Men et al. 2024,
equation 1), angular distance the angle between the streams before and after a stretch of layers, as a share of a half
turn (Gromov et al. 2024, "The Unreasonable Ineffectiveness of the Deeper Layers", equation 6).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from surgeon.analysis.measure import windows_in_a_walk
from surgeon.analysis.walk import LayerPass, walks

_BLOCK_BYTES = 64 << 20


@dataclass(frozen=True)
class Streams:
    """Means over tokens; depth i is the stream before layer i, the last one that after all layers.

    Attributes:
        cosine: between the streams at two depths, (layers + 1, layers + 1).
        angle: the angle between them, as a share of a half turn, of the same shape.
        last_angle: the same over the last token of each window only.
        attention, mlp: by layer, the size of a sublayer's output relative to the stream that it reads, (layers,).
    """

    cosine: Tensor
    angle: Tensor
    last_angle: Tensor
    attention: Tensor
    mlp: Tensor


@torch.inference_mode()
def compare_streams(
    model: PreTrainedModel, ids: Tensor, ran: Callable[[float], Any] = lambda _: None, memory: int | None = None
) -> Streams:
    """Compare the streams of an unedited model at all depths.

    Args:
        ids: (windows, tokens).
        ran: called with the number of sublayers run, times the windows they ran on.
        memory: a limit in bytes on the memory of the whole process.

    Raises:
        ValueError: naming the sublayer where numbers stop being finite; if the limit is too small.
    """
    num_layers = model.config.num_hidden_layers
    at_once = windows_in_a_walk(model, ids, num_layers + 1, 2 * _BLOCK_BYTES, memory)
    cosine, angle, last_angle = torch.zeros(3, num_layers + 1, num_layers + 1, dtype=torch.float64)
    sizes = torch.zeros(2, num_layers, dtype=torch.float64)
    for walk in walks(model, ids, at_once):
        streams = [walk.start]
        for layer in range(num_layers):
            passed = walk.dense_layer(layer, streams[-1])
            streams.append(passed.after)
            sizes[:, layer] += _relative_sizes(passed)
            ran(2 * len(walk.ids))
        for cosines, last in _cosines(streams):
            angles = cosines.acos() / math.pi
            cosine += cosines.sum(0).cpu()
            angle += angles.sum(0).cpu()
            last_angle += angles[last].sum(0).cpu()
    tokens = ids.numel()
    return Streams(cosine / tokens, angle / tokens, last_angle / len(ids), *(sizes / tokens))


def _relative_sizes(passed: LayerPass) -> Tensor:
    """Summed over tokens, (2,): of the attention's output and of the feed-forward's."""
    pairs = ((passed.attention, passed.before), (passed.mlp, passed.middle))
    return torch.stack([(_norm(output) / _norm(stream)).sum() for output, stream in pairs]).cpu()


def _norm(stream: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(stream.double(), dim=-1)
    return norm.clamp_min(torch.finfo(torch.float64).tiny)  # a stream of zeros has no direction, and no NaN either


def _cosines(streams: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Some tokens at a time: cosines between depths, (tokens, depths, depths), and which tokens end their window.

    In float64: next to 1, where streams of neighbouring layers are, single precision turns an angle of 0 into 3e-4.
    """
    tokens = streams[0].shape[1]
    flat = [stream.flatten(0, 1) for stream in streams]
    rows = max(1, _BLOCK_BYTES // (8 * len(flat) * flat[0].shape[1]))
    for start in range(0, len(flat[0]), rows):
        block = torch.stack([stream[start : start + rows].double() for stream in flat], dim=1)
        block /= _norm(block)[..., None]
        cosines = (block @ block.mT).clamp(-1, 1)
        # A stream's angle with itself is 0 whatever rounding makes of its cosine.
        cosines.diagonal(dim1=1, dim2=2).fill_(1)
        places = torch.arange(start, start + len(block), device=block.device)
        yield cosines, places % tokens == tokens - 1
