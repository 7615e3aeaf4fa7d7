"""Matrix products as a device does them fastest: how weights lie in memory for that, and the product itself.

On x86 processors in float32 a weight is packed once, for this package's own kernel (runtime/kernels), or for oneDNN,
which PyTorch brings, where there are no kernels. On two AVX2 cores products of 2 to 32 tokens with weights that oneDNN
has packed take between half and two thirds of the time that they take with transposed ones. The kernel is faster still
for few tokens, a tenth slower for hundreds (scripts/bench/cpu_kernels.py), and waits for no thread that another process
keeps from its core. Either layout is the same for every number of tokens, so there is one copy only. Large weights
whose outputs would be filled up by more than a tenth for packing lie transposed, (in_features, out_features).

Shapes: T tokens of a pass.
"""

from __future__ import annotations

import platform

import torch
import torch.nn.functional as F
from torch import Tensor

from surgeon.runtime.kernels.functions import Kernels, kernels_for

PANEL = 64  # outputs that lie side by side
MOST_FILLING = 0.1  # of the weight itself
# Numbers that may fill up a small weight: 1 MB, read in some 50 us. One weight that lies transposed keeps all passes of
# a model from being recorded (runtime/model/recorded.py), which takes several times as long for every layer.
LEAST_FILLING = 1 << 18
TOKENS = 8  # that oneDNN is told to expect; it chooses the same layout for all numbers but 1


class Transposed:
    """A weight that lies as (in_features, out_features), or is seen so; on any device, in any dtype."""

    by_kernels = False

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Inputs (T, in_features) to (T, out_features).

        Args:
            bias: (out_features,), added.
            out: where to write it.
        """
        return torch.mm(x, self.weight, out=out) if bias is None else torch.addmm(bias, x, self.weight, out=out)


class Packed:
    """A weight, (out_features, in_features), packed for oneDNN."""

    by_kernels = False

    def __init__(self, weight: Tensor) -> None:
        self.weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), TOKENS)

    def __call__(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Inputs (T, in_features) to (T, out_features), in memory of its own.

        Args:
            bias: (out_features,), added.
        """
        assert out is None, "products with packed weights make their own memory"
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, bias, "none", [], "")
        return y


class Panels:
    """A weight, (out_features, in_features), packed for the kernel.

    Attributes:
        weight: (panels, in_features, 64), the last panel filled up with zeros.
    """

    by_kernels = True

    def __init__(self, weight: Tensor, kernels: Kernels) -> None:
        self._kernels = kernels
        self._outputs, inputs = weight.shape
        whole = self._outputs // PANEL
        self.weight = weight.new_empty(-(-self._outputs // PANEL), inputs, PANEL)
        self.weight[:whole].copy_(weight[: whole * PANEL].unflatten(0, (whole, PANEL)).transpose(1, 2))
        if whole < len(self.weight):
            rest = weight[whole * PANEL :]
            self.weight[whole].copy_(F.pad(rest.t(), (0, PANEL - len(rest))))

    def __call__(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Inputs (T, in_features) to (T, out_features), in memory of its own.

        Args:
            bias: (out_features,), added.
        """
        assert out is None, "products with packed weights make their own memory"
        x = x if x.stride(1) == 1 else x.contiguous()
        return self._kernels.product(x, self.weight, self._outputs, bias)

    def rows(self, numbers: Tensor, first: int) -> Tensor:
        """Some of its rows, (numbers, in_features).

        Args:
            numbers: int64; for those that no row has there are zeros.
            first: the number of the first row.
        """
        return self._kernels.packed_rows(self.weight, self._outputs, numbers, first)


Product = Transposed | Packed | Panels


def laid_out(weight: Tensor, packs: bool = True) -> Product:
    """A weight, (out_features, in_features), as products with it are fastest.

    Args:
        packs: False where products are to be written to memory that there is already, which packed weights cannot.
    """
    if weight.device.type != "cpu":
        return Transposed(weight.t())
    if packs and _pays_packed(weight):
        kernels = kernels_for(weight)
        if kernels is not None:
            return Panels(weight, kernels)
        if torch.backends.mkldnn.is_available():
            return Packed(weight)
    return Transposed(weight.t().contiguous())


def _pays_packed(weight: Tensor) -> bool:
    if weight.dtype != torch.float32 or platform.machine() not in ("x86_64", "AMD64"):
        return False
    outputs, inputs = weight.shape
    filling = -outputs % PANEL * inputs
    return weight.numel() > 0 and filling <= max(LEAST_FILLING, MOST_FILLING * weight.numel())
