"""Matrix products as a device does them fastest: how weights lie in memory for that, and the product itself.

On x86 processors in float32 a weight is packed once, for this package's own kernel (runtime/kernels), or for oneDNN,
which PyTorch brings, where there are no kernels. On two AVX2 cores products of 2 to 32 tokens with weights that oneDNN
has packed take between half and two thirds of the time that they take with transposed ones. The kernel is faster still
for few tokens, a tenth slower for hundreds (scripts/bench/cpu_kernels.py), and waits for no thread that another process
keeps from its core. Either layout is the same for every number of tokens, so there is one copy only. Other weights lie
transposed, (in_features, out_features).

On GPUs weights lie as they are stored, (out_features, in_features), and products of one token or two with them are
computed by a kernel that reads each row once (docs/gpus.md).

Shapes: T tokens of a pass.
"""

from __future__ import annotations

import platform

import torch
import torch.nn.functional as F
from torch import Tensor

from surgeon.runtime.kernels.functions import Kernels, kernels_for
from surgeon.runtime.kernels.triton.functions import FEW, triton_kernels_for

PANEL, LEAST = 64, 16  # outputs that lie side by side, and of which there are a multiple
MOST_FILLING = 0.1  # of a weight itself, for oneDNN, which fills up outputs
TOKENS = 8  # that oneDNN is told to expect; it chooses the same layout for all numbers but 1


class Transposed:
    """A weight that lies as (in_features, out_features), or is seen so, in main memory, in any dtype."""

    by_kernels = False

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Inputs (T, in_features) to (T, out_features).

        Args:
            bias: (out_features,), added.
            out: where to write it.
        """
        if bias is None:
            return torch.mm(x, self.weight, out=out)
        return torch.addmm(bias, x, self.weight, out=out)


class OnGpu:
    """A weight, (out_features, in_features), on a GPU."""

    by_kernels = False

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.contiguous()
        self._kernels = triton_kernels_for(weight)

    def __call__(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Inputs (T, in_features) to (T, out_features).

        Args:
            bias: (out_features,), added.
            out: where to write it.
        """
        if self._kernels is not None and 0 < len(x) <= FEW and x.stride(1) == 1:
            return self._kernels.product(x, self.weight, bias, out)
        transposed = self.weight.t()
        if bias is None:
            return torch.mm(x, transposed, out=out)
        return torch.addmm(bias, x, transposed, out=out)


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
        weight: panels of 64 outputs, (in_features, 64), one after the other; the last of those that are left, filled up
            with zeros to a multiple of 16.
    """

    by_kernels = True

    def __init__(self, weight: Tensor, kernels: Kernels) -> None:
        self._kernels = kernels
        outputs, inputs = weight.shape
        self._shape = (outputs, inputs)
        whole = outputs // PANEL * PANEL
        filled = whole + -(-(outputs - whole) // LEAST) * LEAST
        self.weight = weight.new_empty(filled * inputs)
        panels, last = self.weight.split([whole * inputs, (filled - whole) * inputs])
        panels = panels.view(whole // PANEL, inputs, PANEL)
        panels.copy_(weight[:whole].reshape(whole // PANEL, PANEL, inputs).transpose(1, 2))
        last.view(inputs, filled - whole).copy_(F.pad(weight[whole:].t(), (0, filled - outputs)))

    def __call__(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Inputs (T, in_features) to (T, out_features), in memory of its own.

        Args:
            bias: (out_features,), added.
        """
        assert out is None, "products with packed weights make their own memory"
        x = x if x.stride(1) == 1 else x.contiguous()
        return self._kernels.product(x, self.weight, self._shape[0], bias)

    def rows(self, numbers: Tensor, first: int) -> Tensor:
        """Some of its rows, (numbers, in_features).

        Args:
            numbers: int64; for those that no row has there are zeros.
            first: the number of the first row.
        """
        return self._kernels.packed_rows(self.weight, self._shape, numbers, first)


Product = Transposed | OnGpu | Packed | Panels


def laid_out(weight: Tensor, packs: bool = True) -> Product:
    """A weight, (out_features, in_features), as products with it are fastest.

    Args:
        packs: False where products are to be written to memory that there is already, which packed weights cannot.
    """
    if weight.device.type != "cpu":
        return OnGpu(weight)
    if packs and _is_packable(weight):
        kernels = kernels_for(weight)
        if kernels is not None:
            return Panels(weight, kernels)
        pays = weight.numel() > 0 and -len(weight) % PANEL <= MOST_FILLING * len(weight)
        if torch.backends.mkldnn.is_available() and pays:
            return Packed(weight)
    return Transposed(weight.t().contiguous())


def _is_packable(weight: Tensor) -> bool:
    return weight.dtype == torch.float32 and platform.machine() in ("x86_64", "AMD64")
