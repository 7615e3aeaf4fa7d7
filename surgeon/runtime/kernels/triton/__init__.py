"""Kernels for GPUs, in Triton, which PyTorch's builds for GPUs bring along; what they are told of texts and heads.

Shapes: T tokens of a pass, B texts, H heads and K KV heads of a slice, D head_dim.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class TextBlocks(NamedTuple):
    """Blocks of a cache that one token of each of some texts reads.

    Attributes:
        tables: numbers of blocks, (B, any).
        newest: position of the token, (B,).
        arrived: (B * K) zeros or more, int32; zeros again when attention has ended.
    """

    tables: Tensor
    newest: Tensor
    arrived: Tensor


class Placing(NamedTuple):
    """Norms and turns of queries and keys before they are compared.

    Attributes:
        gain: of the norms of heads, if any, (H + K, D) of one piece.
        epsilon: of these.
        angles: cosine and signed sine of the tokens, if any, (T, 1, up to D) each.
        squares: mean squares of all queries' features, and of all keys', (T, 2), where norms are not of each head.
    """

    gain: Tensor | None
    epsilon: float
    angles: tuple[Tensor, Tensor] | None
    squares: Tensor | None = None
