"""Linear maps of one input, as one matrix product each or by two factors, and how weights lie in memory for that.

On x86 processors in float32 a weight is packed once for this package's own kernel (runtime/kernels), which for few
tokens is faster than oneDNN's, a tenth slower for hundreds (scripts/bench/cpu_kernels.py). Other weights lie transposed
on CPUs, and as stored, (out_features, in_features), on GPUs, where a kernel multiplies one token or two (docs/gpus.md).

Shapes: T tokens of a pass.
"""

from __future__ import annotations

import platform
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from surgeon.models.weights import Tensors
from surgeon.runtime.kernels.functions import Kernels, kernels_for
from surgeon.runtime.kernels.triton.functions import FEW, triton_kernels_for

# Outputs that lie side by side, and of which there are a multiple
PANEL = 64
LEAST = 16


class Transposed:
    """A weight that lies as (in_features, out_features), or is seen so, on any device, in any dtype."""

    by_kernels = False

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self._kernels = None
        if weight.t().is_contiguous():
            self._kernels = triton_kernels_for(weight)

    def __call__(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Multiply inputs, (T, in_features), to (T, out_features), written to `out` if given."""
        if self._kernels is not None and 0 < len(x) <= FEW and x.stride(1) == 1:
            return self._kernels.product(x, self.weight.t(), bias, out)
        if bias is None:
            return torch.mm(x, self.weight, out=out)
        return torch.addmm(bias, x, self.weight, out=out)


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
        """Multiply inputs, (T, in_features), to (T, out_features)."""
        assert out is None, "products with packed weights make their own memory"
        if x.stride(1) != 1:
            x = x.contiguous()
        return self._kernels.product(x, self.weight, self._shape[0], bias)

    def rows(self, numbers: Tensor, first: int) -> Tensor:
        """Take rows by number, (numbers, in_features); zeros for numbers that none has."""
        return self._kernels.packed_rows(self.weight, self._shape, numbers, first)


Product = Transposed | Panels


def laid_out(weight: Tensor, packs: bool = True) -> Product:
    """Lay out a weight, (out_features, in_features), as products with it are fastest.

    Args:
        packs: False where products are to be written to memory that there is already, which packed weights cannot.
    """
    if weight.device.type != "cpu":
        return Transposed(weight.contiguous().t())
    kernels = kernels_for(weight)
    if packs and kernels is not None and platform.machine() in ("x86_64", "AMD64"):
        return Panels(weight, kernels)
    return Transposed(weight.t().contiguous())


class LinearMap(Protocol):
    """A linear map, or several of one input side by side.

    Attributes:
        by_kernels: whether all of its products are computed by the kernels (runtime/kernels).
    """

    by_kernels: bool

    def __call__(self, x: Tensor, /) -> Tensor:
        """(T, in_features) to (T, all out_features)."""


class Linear:
    """One or more projections of the same input as one matrix product.

    Args:
        weights: (out_features, in_features) each.
        biases: (out_features,) each, or None.
        scale: of the output, if any.
        packs: as of `laid_out`.
    """

    def __init__(
        self,
        weights: list[Tensor],
        biases: list[Tensor | None],
        scale: float | None = None,
        packs: bool = True,
    ) -> None:
        self.scale = scale
        self.product = laid_out(torch.cat(weights), packs)
        self.by_kernels: bool = self.product.by_kernels
        self.bias: Tensor | None = None
        if any(bias is not None for bias in biases):
            filled = [
                w.new_zeros(w.shape[0]) if b is None else b for w, b in zip(weights, biases, strict=True)
            ]
            self.bias = torch.cat(filled)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """(T, in_features) to (T, all out_features)."""
        y = self.product(x, self.bias, out)
        if self.scale is None:
            return y
        return y.mul_(self.scale)


def whole_map(tensors: Tensors, roles: list[str], scale: float | None = None) -> Linear:
    """Projections that are whole matrices, as one product."""
    return Linear(
        [tensors[f"{role}.weight"] for role in roles],
        [tensors.get(f"{role}.bias") for role in roles],
        scale,
    )


def second_factor(tensors: Tensors, role: str, packs: bool = True) -> Linear:
    """The second factor of a projection, with its bias."""
    return Linear([tensors[f"{role}.second.weight"]], [tensors.get(f"{role}.bias")], packs=packs)


def is_factored(role: str, tensors: Tensors) -> bool:
    """Tell whether a projection is two factors."""
    return f"{role}.first.weight" in tensors


def count_outputs(tensors: Tensors, role: str) -> int:
    """Count the features that a projection gives."""
    last = f"{role}.second.weight"
    return tensors[last if last in tensors else f"{role}.weight"].shape[0]
