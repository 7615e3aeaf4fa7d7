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

from surgeon.analysis.engine.memory import windows_in_a_walk
from surgeon.analysis.engine.walk import LayerPass, layers_run, runs_of, walks
from surgeon.language.program import Program
from surgeon.models.families import family_of

_BLOCK_BYTES = 64 << 20


@dataclass(frozen=True)
class Streams:
    """Means over tokens, of one run of layers; depth i is the stream before its layer i, the last one that after it.

    Attributes:
        run: the layers.
        cosine: between the streams at two depths, (layers + 1, layers + 1).
        angle: the angle between them, as a share of a half turn, of the same shape.
        last_angle: the same over the last token of each window only.
        sizes: by layer, the size of the attention's and of the feed-forward's output relative to the stream that each
            reads, (layers, 2).
    """

    run: range
    cosine: Tensor
    angle: Tensor
    last_angle: Tensor
    sizes: Tensor

    @classmethod
    def nothing(cls, run: range) -> Streams:
        """Zeros, to add to."""
        depths = len(run) + 1
        cosine, angle, last_angle = torch.zeros(3, depths, depths, dtype=torch.float64)
        return cls(run, cosine, angle, last_angle, torch.zeros(len(run), 2, dtype=torch.float64))

    def __truediv__(self, numbers: tuple[int, int]) -> Streams:
        """Sums over so many tokens, and so many windows, as means."""
        tokens, windows = numbers
        return Streams(
            self.run, self.cosine / tokens, self.angle / tokens, self.last_angle / windows, self.sizes / tokens
        )


@torch.inference_mode()
def compare_streams(
    model: PreTrainedModel,
    program: Program,
    ids: Tensor,
    ran: Callable[[float], Any] = lambda _: None,
    memory: int | None = None,
) -> list[Streams]:
    """Compare the streams of a model's own program at all depths of each run of whole layers.

    Args:
        model: the layers that it is stored as.
        program: over these.
        ids: (windows, tokens).
        ran: called with the number of sublayers run, times the windows they ran on.
        memory: a limit in bytes on the memory of the whole process.

    Raises:
        ValueError: naming the sublayer where numbers stop being finite; if no layer is run whole, or the limit is too
            small.
    """
    runs = runs_of(program, family_of(model.config).steps_per_layer)
    at_once = windows_in_a_walk(model, ids, max(map(len, runs)) + 1, 2 * _BLOCK_BYTES, memory)
    sums = [Streams.nothing(run) for run in runs]
    for walk in walks(model, ids, at_once):
        places = iter(sums)
        for one in layers_run(walk, program):
            if one.layer == one.run.start:
                sum_, streams = next(places), [one.passed.before]
            streams.append(one.passed.after)
            sum_.sizes[one.layer - one.run.start] += _relative_sizes(one.passed)
            ran(2 * len(walk.ids))
            if one.layer == one.run[-1]:
                _add(sum_, streams)
    return [sum_ / (ids.numel(), len(ids)) for sum_ in sums]


def _add(sum_: Streams, streams: list[Tensor]) -> None:
    for cosines, last in _cosines(streams):
        angles = cosines.acos() / math.pi
        sum_.cosine.add_(cosines.sum(0).cpu())
        sum_.angle.add_(angles.sum(0).cpu())
        sum_.last_angle.add_(angles[last].sum(0).cpu())


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
