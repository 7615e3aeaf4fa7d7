"""Linear maps of one input, as one matrix product each or by two factors.

Shapes: T tokens of a pass.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from surgeon.models.weights import Tensors
from surgeon.runtime.model.products import laid_out


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
        scale: what the output is multiplied by, if anything.
        packs: whether products never have to go to memory that there is already (`products.laid_out`).
    """

    def __init__(
        self, weights: list[Tensor], biases: list[Tensor | None], scale: float | None = None, packs: bool = True
    ) -> None:
        self.scale = scale
        self.product = laid_out(torch.cat(weights), packs)
        self.by_kernels: bool = self.product.by_kernels
        self.bias: Tensor | None = None
        if any(bias is not None for bias in biases):
            filled = [w.new_zeros(w.shape[0]) if b is None else b for w, b in zip(weights, biases, strict=True)]
            self.bias = torch.cat(filled)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """(T, in_features) to (T, all out_features), in a new tensor or in one that there is."""
        y = self.product(x, self.bias, out)
        if self.scale is None:
            return y
        return y.mul_(self.scale)


def whole_map(tensors: Tensors, roles: list[str], scale: float | None = None) -> Linear:
    """Projections that are whole matrices, as one product."""
    return Linear([tensors[f"{role}.weight"] for role in roles], [tensors.get(f"{role}.bias") for role in roles], scale)


def second_factor(tensors: Tensors, role: str, packs: bool = True) -> Linear:
    """What makes a projection's output of what its first factor gives, the bias with it."""
    return Linear([tensors[f"{role}.second.weight"]], [tensors.get(f"{role}.bias")], packs=packs)


def is_factored(role: str, tensors: Tensors) -> bool:
    """Whether a projection is two factors."""
    return f"{role}.first.weight" in tensors


def count_outputs(tensors: Tensors, role: str) -> int:
    """How many features a projection gives."""
    last = f"{role}.second.weight"
    return tensors[last if last in tensors else f"{role}.weight"].shape[0]
