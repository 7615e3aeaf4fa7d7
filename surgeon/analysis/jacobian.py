"""Jacobians of sublayers, only ever multiplied with vectors: their operator norms, and what they make of a change.

The norms are the Euclidean one of a window's whole stream (tokens x hidden numbers), and the operator norm that goes
with it, the largest singular value of the Jacobian.
"""

from __future__ import annotations

import math
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
_RISK = 1e-4  # that a norm is above the bound given for it


@dataclass(frozen=True)
class OperatorNorm:
    """A bound of the largest singular value of a Jacobian.

    Attributes:
        value: not below the largest singular value, but for a probability of 1e-4, if `converged`.
        converged: whether that is the case, and it is above it by no more than the tolerance.
    """

    value: float
    iterations: int
    converged: bool


@dataclass(frozen=True)
class Lanczos:
    """How operator norms are bounded: by the Lanczos iteration on J^T J from a random vector.

    The largest Ritz value t of k iterations is not above the largest eigenvalue of J^T J, and below it by a share e of
    it with a probability of at most 1.648 sqrt(N) exp(-(2k - 1) sqrt(e)), where N numbers are in a stream, however
    close its singular values are (Kuczynski and Wozniakowski 1992, theorem 4.2). So the iterations that a tolerance
    takes are known before, and the norm is at most sqrt(t / (1 - e)).

    Attributes:
        iterations: at most; each takes one product with the Jacobian and one with its transpose.
        tolerance: how far the bound may be above the norm, relative to it.
        seed: of the random vector.
    """

    iterations: int = 100
    tolerance: float = 0.01
    seed: int = 0

    def norm(self, function: Function, point: Tensor, by_token: bool = False) -> OperatorNorm:
        """Bound the operator norm of a function's Jacobian at a point.

        Args:
            function: of a stream, (windows, tokens, hidden), to one of the same shape.
            by_token: the function treats every token by itself. Its Jacobian consists of one block for each then, its
                norm is the largest of theirs, and all of them are iterated at once.
        """
        dims = (-1,) if by_token else tuple(range(point.dim()))
        size = point.shape[-1] if by_token else point.numel()
        exponent = math.log(1.648 * math.sqrt(size) * (point.numel() // size) / _RISK)  # of one risk for all blocks
        enough = math.ceil((exponent / math.sqrt(1 - (1 + self.tolerance) ** -2) + 1) / 2)
        iterations = min(enough, self.iterations)
        square = _largest_ritz_value(function, point, dims, iterations, self.seed)
        share = (exponent / (2 * iterations - 1)) ** 2
        if iterations == enough:
            square /= 1 - share
        return OperatorNorm(math.sqrt(square), iterations, iterations == enough)


def _largest_ritz_value(function: Function, point: Tensor, dims: tuple[int, ...], iterations: int, seed: int) -> float:
    """The largest eigenvalue of J^T J, from below, as the largest one of the tridiagonal matrices of all blocks."""
    pull = vjp(function, point)[1]
    start = torch.randn(point.shape, generator=torch.Generator().manual_seed(seed))
    vector = _scaled(start.to(point.device, _precise(point)), dims)
    before = torch.zeros_like(vector)
    beside = vector.new_zeros(())
    diagonal: list[Tensor] = []  # (blocks,) each
    off_diagonal: list[Tensor] = []
    for _ in range(iterations):
        image = push(function, point, vector.to(point.dtype))
        square = _norms(image, dims).square()
        (product,) = pull(image)
        rest = product.to(vector.dtype) - square * vector - beside * before
        beside = _norms(rest, dims)
        diagonal.append(square.flatten())
        off_diagonal.append(beside.flatten())
        before = vector
        vector = _scaled(rest, dims)
    matrix = torch.diag_embed(torch.stack(diagonal, dim=-1))
    sides = torch.stack(off_diagonal, dim=-1)[:, :-1]
    matrix = matrix + torch.diag_embed(sides, offset=1) + torch.diag_embed(sides, offset=-1)
    return max(0.0, float(torch.linalg.eigvalsh(matrix.double().cpu()).max()))


def _precise(point: Tensor) -> torch.dtype:
    """What vectors are kept in: never 16 bits, where they would have three digits."""
    return torch.promote_types(point.dtype, torch.float32)


def _scaled(vector: Tensor, dims: tuple[int, ...]) -> Tensor:
    """A vector of the norm 1 over these dimensions, or zeros."""
    return vector / _norms(vector, dims).clamp_min(_SMALLEST)


def _norms(vector: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Over these dimensions, which stay."""
    norms: Tensor = torch.linalg.vector_norm(vector, dim=dims, keepdim=True, dtype=_precise(vector))
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
