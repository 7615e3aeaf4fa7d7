"""Jacobians of sublayers, only ever multiplied with vectors: their operator norms, and what they make of a change.

The norms are the Euclidean one of a window's whole stream (tokens x hidden numbers), and the operator norm that goes
with it, the largest singular value of the Jacobian.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import jvp, vjp
from torch.nn.attention import SDPBackend, sdpa_kernel

Function = Callable[[Tensor], Tensor]

_SMALLEST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class OperatorNorm:
    """The largest singular value of a Jacobian, as power iteration comes up to it from below.

    Attributes:
        converged: whether the last iteration changed it by less than the tolerance.
    """

    value: float
    iterations: int
    converged: bool


@dataclass(frozen=True)
class PowerIteration:
    """How operator norms are found.

    Attributes:
        iterations: at most; each takes one product with the Jacobian and one with its transpose.
        tolerance: relative change between two iterations below which they end.
        seed: of the random vector that they start from.
    """

    iterations: int = 100
    tolerance: float = 1e-3
    seed: int = 0

    def norm(self, function: Function, point: Tensor, by_token: bool = False) -> OperatorNorm:
        """The operator norm of a function's Jacobian at a point.

        Args:
            function: of a stream, (windows, tokens, hidden), to one of the same shape.
            by_token: the function treats every token by itself. Its Jacobian consists of one block for each then, its
                norm is the largest of theirs, and all of them are iterated at once.
        """
        dims = (-1,) if by_token else tuple(range(point.dim()))
        pull = vjp(function, point)[1]
        generator = torch.Generator().manual_seed(self.seed)
        vector = torch.randn(point.shape, generator=generator).to(point)
        value = 0.0
        for iteration in range(1, self.iterations + 1):
            image = push(function, point, (vector / _norms(vector, dims).clamp_min(_SMALLEST)).to(point.dtype))
            before, value = value, float(_norms(image, dims).max())
            if abs(value - before) <= self.tolerance * value:
                return OperatorNorm(value, iteration, True)
            (vector,) = pull(image)
        return OperatorNorm(value, self.iterations, False)


def _norms(vector: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Over these dimensions, which stay; never in 16 bits, where they would have three digits."""
    dtype = torch.promote_types(vector.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(vector, dim=dims, keepdim=True, dtype=dtype)
    return norms


def push(function: Function, point: Tensor, vector: Tensor) -> Tensor:
    """The Jacobian of a function at a point, times a vector."""
    image: Tensor = jvp(function, (point,), (vector,))[1]
    return image


@contextmanager
def differentiable(model: nn.Module) -> Iterator[None]:
    """Within this, sublayers of a model can be differentiated forwards, as fused kernels and grouped products cannot.

    What a sublayer computes stays the same up to rounding. Parameters get no gradients.
    """
    config: Any = model.config
    before = config._experts_implementation
    config._experts_implementation = "eager"
    try:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        config._experts_implementation = before
