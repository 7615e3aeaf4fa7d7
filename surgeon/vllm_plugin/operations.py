"""vLLM's own compiled operations in place of PyTorch's or Triton's: RMS norms, gates, rotary positions.

They compute the same but for where 16 bits are rounded. Layer norms, norms with gains wider than the stream (Gemma2's
1 + weight in 16 bits), norms of heads, and activations without a gate stay, and so do this package's kernels in float32
on CPUs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import vllm._custom_ops  # noqa: F401 - with it PyTorch knows of the operations
from torch import Tensor

from surgeon.runtime.kernels.triton.functions import Placing
from surgeon.runtime.model import rotary
from surgeon.runtime.model.ends import Ends
from surgeon.runtime.model.layers import FeedForward, Norm
from surgeon.runtime.model.mixture import MixtureOfExperts
from surgeon.runtime.model.program import RankProgram
from surgeon.runtime.model.rotary import Angles

GATES = {
    "silu": "silu_and_mul",
    "swish": "silu_and_mul",
    "gelu": "gelu_and_mul",
    "gelu_new": "gelu_tanh_and_mul",
    "gelu_pytorch_tanh": "gelu_tanh_and_mul",
}  # by what transformers calls the activation


class CompiledNorm(Norm):
    """An RMS norm by vLLM's operation."""

    def __init__(self, norm: Norm) -> None:
        vars(self).update(vars(norm))

    def added(self, stream: Tensor, output: Tensor) -> Tensor:
        """The sum of a stream and what is added to it, (T, h) each."""
        return stream + output

    def __call__(self, x: Tensor) -> Tensor:
        """The normed stream, (T, h)."""
        x = x.contiguous()
        y = torch.empty_like(x)
        torch.ops._C.rms_norm(y, x, self.gain, self.epsilon)
        return y


def take_operations(program: RankProgram, ends: Ends, dtype: torch.dtype) -> None:
    """Have vLLM's compute what a rank's program and the norm behind it have loaded, wherever they compute the same."""
    gate = gate_of(program.plan.arithmetic.activation)
    ends.final_norm = _norm(ends.final_norm, dtype)
    for sublayer in program.sublayers.values():
        if isinstance(sublayer.norm, Norm):
            sublayer.norm = _norm(sublayer.norm, dtype)
        dense = sublayer.shared if isinstance(sublayer, MixtureOfExperts) else sublayer
        if isinstance(dense, FeedForward) and dense.gated and gate is not None:
            dense.gate = gate


def _norm(norm: Norm, dtype: torch.dtype) -> Norm:
    is_alike = norm.rms and norm.gain is not None and norm.gain.dtype == dtype
    if is_alike:
        return CompiledNorm(norm)
    return norm


def gate_of(activation: str) -> Callable[[Tensor], Tensor] | None:
    """A function to activated gates times values, (T, width), of both, (T, 2 * width); None without such a one."""
    name = GATES.get(activation)

    def gate(wide: Tensor) -> Tensor:
        y = wide.new_empty(wide.shape[0], wide.shape[1] // 2)
        getattr(torch.ops._C, str(name))(y, wide.contiguous())
        return y

    if name:
        return gate
    return None


def turns(angles: Angles) -> Tensor:
    """Cosines and, behind them, sines of all positions, (positions, R), as vLLM's operation wants them."""
    half = angles[0].shape[-1] // 2
    return torch.cat([angles[0][:, 0, :half], angles[1][:, 0, half:]], -1).contiguous()


def place_(
    x: Tensor, queries: int, placing: Placing, positions: Tensor, turned_by: Tensor | None
) -> None:
    """Norm queries and keys, (T, heads, D), by head and turn them to their positions in place."""
    rotary.place_(x, placing._replace(angles=None), queries)
    if placing.angles is not None:
        torch.ops._C.rotary_embedding(positions, x.view(len(x), -1), None, x.shape[-1], turned_by, True)
