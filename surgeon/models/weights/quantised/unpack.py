"""From stored codes to numbers, for each format by its definition: pure functions on tensors, float32 at the end."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

WORD = 32  # bits that codes are packed into
# FP4 (E2M1): three bits of size, the highest one the sign.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_E2M1, *(-value for value in _E2M1))
EXPONENT_BIAS = 127  # of E8M0: a byte is the exponent of two, and nothing else


def codes_of(words: Tensor, bits: int, dim: int, places: Sequence[int] | None = None) -> Tensor:
    """The unsigned codes in int32 words, the lowest bits first: 32 / bits times as many along one dimension.

    Args:
        places: which of a word's codes each of its elements is, where they are not in order.
    """
    count = WORD // bits
    shifts = torch.tensor(range(count) if places is None else places, dtype=torch.int32, device=words.device) * bits
    shape = [count if axis == dim + 1 else 1 for axis in range(words.dim() + 1)]
    codes = (words.unsqueeze(dim + 1) >> shifts.view(shape)) & ((1 << bits) - 1)
    return codes.flatten(dim, dim + 1)


def nibbles(packed: Tensor, high_first: bool) -> Tensor:
    """Two codes of four bits in each byte, (..., n) to (..., 2 n)."""
    halves = (packed >> 4, packed & 0xF) if high_first else (packed & 0xF, packed >> 4)
    return torch.stack(halves, -1).flatten(-2)


def scales_of(stored: Tensor) -> Tensor:
    """Scales in float32; bytes are exponents of two (E8M0)."""
    return torch.exp2(stored.float() - EXPONENT_BIAS) if stored.dtype == torch.uint8 else stored.float()


def spread(grid: Tensor, block: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    """A number for each block of a matrix as one for each element; the last blocks may reach beyond the matrix.

    Args:
        block: rows and columns of one; 0 for all of them.
    """
    grid = grid if grid.dim() == 2 else grid.reshape(-1, 1)
    for dim, (size, count) in enumerate(zip(block, shape, strict=True)):
        grid = grid.repeat_interleave(size, dim).narrow(dim, 0, count) if size > 1 else grid
    return grid


def scaled(values: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Tensor:
    """(values - zeros) * scales, in float32; scales and zeros have a number for each element, row or column, or one."""
    shifted = values.float() if zeros is None else values.float() - zeros.float()
    return shifted * scales


def by_code(codes: Tensor, table: Tensor, scales: Tensor, block: int) -> Tensor:
    """Values of a table times the scale of their block, all in one row: (n,)."""
    return table.float()[codes.int()] * scales.repeat_interleave(block)[: len(codes)]


def mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Microscaling FP4, (..., 32 n): blocks (..., n, 16) of 32 codes, the low four bits first, exponents (..., n)."""
    table = torch.tensor(E2M1, device=blocks.device)
    return (table[nibbles(blocks, high_first=False).int()] * scales_of(scales).unsqueeze(-1)).flatten(-2)
