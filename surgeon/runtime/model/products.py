"""Matrix products as a device does them fastest: how weights lie in memory for that, and the product itself.

On x86 processors in float32 a weight is packed once for oneDNN, which PyTorch brings: 64 columns of the product side
by side, 16 numbers of each at a time. On two AVX2 cores products of 2 to 32 tokens with packed weights take between
half and two thirds of the time that they take with transposed ones, and those of one token, which two threads then
share, nine tenths. The layout is the same for every number of tokens, so there is one copy only. Weights whose sides
would be filled up by more than a tenth for it lie transposed, (in_features, out_features).

Shapes: T tokens of a pass.
"""

from __future__ import annotations

import platform

import torch
from torch import Tensor

PACKED_OUTPUTS, PACKED_INPUTS = 64, 16  # what sides are filled up to
MOST_FILLING = 1.1  # times the memory of the weight itself
TOKENS = 8  # that oneDNN is told to expect; it chooses the same layout for all numbers but 1


def laid_out(weight: Tensor, packs: bool = True) -> Tensor:
    """A weight, (out_features, in_features), as `product` takes it: packed, or seen as (in_features, out_features).

    Args:
        packs: False where products are to be written to memory that there is already, which packed weights cannot.
    """
    if weight.device.type != "cpu":
        return weight.t()
    if packs and _pays_packed(weight):
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), TOKENS)
        return packed
    return weight.t().contiguous()


def _pays_packed(weight: Tensor) -> bool:
    if weight.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return False
    outputs, inputs = weight.shape
    filled = -(-outputs // PACKED_OUTPUTS) * PACKED_OUTPUTS * -(-inputs // PACKED_INPUTS) * PACKED_INPUTS
    return platform.machine() in ("x86_64", "AMD64") and 0 < filled <= MOST_FILLING * weight.numel()


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Inputs (T, in_features) times a weight that `laid_out` gave: (T, out_features).

    Args:
        bias: (out_features,), added.
        out: where to write it, unless the weight is packed.
    """
    if weight.is_mkldnn:
        assert out is None, "products with packed weights make their own memory"
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return y
    return torch.mm(x, weight, out=out) if bias is None else torch.addmm(bias, x, weight, out=out)
