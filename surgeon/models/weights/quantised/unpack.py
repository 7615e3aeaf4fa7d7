"""Numbers of stored codes, for each format by its definition: pure functions on tensors, float32 at the end."""

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
    """Unpack unsigned codes of int32 words, the lowest bits first: 32 / bits as many along one dimension, in uint8.

    Args:
        places: of each element among a word's codes, where they are not in order.
    """
    # A byte is moved in less time.
    parts = words.contiguous().view(torch.uint8).unflatten(-1, (-1, WORD // 8, 1))
    if bits < 8:
        parts = torch.cat([(parts >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)], -1)
    codes: Tensor = parts.flatten(-2)
    if places is not None:
        codes = codes[..., list(places)]
    return codes.movedim(-1, dim + 1).flatten(dim, dim + 1)


def pairs_of(packed: Tensor, table: Tensor, high_first: bool) -> Tensor:
    """Look up the two codes of four bits in each byte, (..., n) to (..., 2 n), in float32."""
    # Both values of every byte, that of its high bits first.
    both = torch.cartesian_prod(table.float(), table.float())
    # Two numbers, looked up as one.
    one = torch.view_as_complex((both if high_first else both.flip(-1)).contiguous())
    found = torch.view_as_real(one.index_select(0, packed.flatten().int()))
    return found.view(*packed.shape[:-1], -1)


def scales_of(stored: Tensor) -> Tensor:
    """Read scales in float32; bytes are exponents of two (E8M0)."""
    if stored.dtype == torch.uint8:
        return torch.exp2(stored.float() - EXPONENT_BIAS)
    return stored.float()


def scale_values(
    values: Tensor, scales: Tensor, block: tuple[int, int], zeros: Tensor | None = None
) -> Tensor:
    """Compute (values - zeros) * scales of a matrix, in float32, with a scale and a zero point for each of its blocks.

    Args:
        block: rows and columns of one; 0 for all of them. The last ones may reach beyond the matrix.
    """
    found = values.to(torch.float32, copy=True)
    sizes = [size or count for size, count in zip(block, values.shape, strict=True)]
    whole = all(count % size == 0 for size, count in zip(sizes, values.shape, strict=True))
    if whole:
        view = found.unflatten(1, (-1, sizes[1])).unflatten(0, (-1, sizes[0]))
    else:
        view = found

    def each(grid: Tensor) -> Tensor:
        grid = (grid if grid.dim() == 2 else grid.reshape(-1, 1)).float()
        if whole:
            return grid[:, None, :, None]
        by_row = grid.repeat_interleave(sizes[0], 0)[: len(values)]
        return by_row.repeat_interleave(sizes[1], 1)[:, : values.shape[1]]

    if zeros is not None:
        view.sub_(each(zeros))
    view.mul_(each(scales))
    return found


def mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Compute microscaling FP4, (..., 32 n): blocks (..., n, 16) of 32 codes, low bits first, exponents (..., n)."""
    table = torch.tensor(E2M1, device=blocks.device)
    return (pairs_of(blocks, table, high_first=False) * scales_of(scales).unsqueeze(-1)).flatten(-2)
