"""Matrix products as a device does them fastest: how weights lie in memory for that, and the product itself.

On x86 processors in float32 a weight is packed once for oneDNN, which PyTorch brings: 64 columns of the product side
by side, 16 numbers of each at a time. On two AVX2 cores products of 2 to 32 tokens with packed weights take between
half and two thirds of the time that they take with transposed ones. The layout is the same for every number of tokens,
so there is one copy only. This package's own kernel (runtime/kernels) reads it, too: it is faster for few tokens, a
tenth slower for hundreds (scripts/bench/cpu_kernels.py), and waits for no thread that another process keeps from its
core. oneDNN computes where there are no kernels. Large weights whose sides would be filled up by more than a tenth for
packing lie transposed, (in_features, out_features).

Shapes: T tokens of a pass.
"""

from __future__ import annotations

import platform

import torch
from torch import Tensor

from surgeon.runtime.kernels.functions import kernels_for

PACKED_OUTPUTS, PACKED_INPUTS = 64, 16  # what sides are filled up to
MOST_FILLING = 0.1  # of the weight itself
# Numbers that may fill up a small weight, which is read fast however wide it is: one weight that lies transposed keeps
# all passes of a model from being recorded (runtime/kernels/engine.py).
LEAST_FILLING = 1 << 16
TOKENS = 8  # that oneDNN is told to expect; it chooses the same layout for all numbers but 1
SAME = 1e-4  # relative difference of products of one token, by oneDNN and by the kernel, with the same numbers


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

    def __init__(self, weight: Tensor) -> None:
        self.weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), TOKENS)
        self._address = int(torch.ops.mkldnn.data_ptr(self.weight))
        outputs, inputs = weight.shape
        self._shape = inputs, _filled(inputs, PACKED_INPUTS), outputs
        self._kernels = kernels_for(weight)
        if self._kernels is not None and not self._lies_in_panels(weight.new_empty(0)):
            self._kernels = None

    @property
    def by_kernels(self) -> bool:
        """Whether it is this package's kernel that computes products."""
        return self._kernels is not None

    def _lies_in_panels(self, like: Tensor) -> bool:
        """Whether the kernel reads what oneDNN wrote, which promises no layout; all of the weight is compared."""
        x = like.new_empty(1, self._shape[0]).uniform_(generator=torch.Generator().manual_seed(0))
        expected = self.by_onednn(x)
        return bool((self(x) - expected).norm() <= SAME * expected.norm())

    def __call__(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Inputs (T, in_features) to (T, out_features), in memory of its own.

        Args:
            bias: (out_features,), added.
        """
        assert out is None, "products with packed weights make their own memory"
        if self._kernels is not None:
            x = x if x.stride(1) == 1 else x.contiguous()
            return self._kernels.product(x, self._address, self._shape, bias)
        return self.by_onednn(x, bias)

    def rows(self, numbers: Tensor, first: int) -> Tensor:
        """Some of its rows, (numbers, in_features), by the kernels.

        Args:
            numbers: int64; for those that no row has there are zeros.
            first: the number of the first row.
        """
        assert self._kernels is not None, "what oneDNN has packed only products can read"
        return self._kernels.packed_rows(self._address, self._shape, numbers, first)

    def by_onednn(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The same by oneDNN, for any number of tokens."""
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, bias, "none", [], "")
        return y


def laid_out(weight: Tensor, packs: bool = True) -> Packed | Transposed:
    """A weight, (out_features, in_features), as products with it are fastest.

    Args:
        packs: False where products are to be written to memory that there is already, which packed weights cannot.
    """
    if weight.device.type != "cpu":
        return Transposed(weight.t())
    return Packed(weight) if packs and _pays_packed(weight) else Transposed(weight.t().contiguous())


def _pays_packed(weight: Tensor) -> bool:
    if weight.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return False
    outputs, inputs = weight.shape
    filled = _filled(outputs, PACKED_OUTPUTS) * _filled(inputs, PACKED_INPUTS)
    most = weight.numel() + max(LEAST_FILLING, MOST_FILLING * weight.numel())
    return platform.machine() in ("x86_64", "AMD64") and weight.numel() > 0 and filled <= most


def _filled(side: int, unit: int) -> int:
    return -(-side // unit) * unit
