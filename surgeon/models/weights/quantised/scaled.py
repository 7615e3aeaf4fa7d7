"""FP8 and int8 with scales: of blocks, of groups of inputs, of rows, or one for all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from surgeon.models.weights.quantised.matrix import Along, Arrangement, Scheme
from surgeon.models.weights.quantised.unpack import codes_of, scaled, scales_of
from surgeon.models.weights.store import Store, Tensors

EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
WEIGHT, ROWS, COLUMNS = ".weight", Along(0), Along(1)
Block = tuple[int, int]  # rows and columns with one scale; 0 for all of them


def along_grid(grid: tuple[int, ...], block: Block) -> tuple[Along | None, Along | None]:
    """Where a matrix's rows and columns lie in a grid of scales; nowhere, where there is one for all of them."""
    rows, columns = block if grid else (0, 0)
    return Along(0, Fraction(1, rows)) if rows else None, Along(1, Fraction(1, columns)) if columns else None


@dataclass(frozen=True)
class Fp8(Scheme):
    """FP8 with a scale for each block of a matrix, or one for all of it (DeepSeek-V3, Qwen3-FP8).

    Attributes:
        block: rows and columns with one scale; (0, 0) where a matrix has one.
    """

    block: Block

    needed = (WEIGHT, ".weight_scale_inv")
    optional = (".activation_scale", ".input_scale")

    @property
    def description(self) -> str:
        return f"FP8 in blocks of {self.block[0]} x {self.block[1]}" if any(self.block) else "FP8 with one scale"

    def holds(self, parts: Mapping[str, str], store: Store) -> bool:
        """By its scales, or by its dtype."""
        return self.needed[1] in parts or (WEIGHT in parts and store.dtype(parts[WEIGHT]) in EIGHT_BITS)

    def arrangement(self, parts: Mapping[str, str], store: Store) -> Arrangement:
        """A scale for each block."""
        grid = store.shape(parts[self.needed[1]])
        along = {WEIGHT: (ROWS, COLUMNS), self.needed[1]: along_grid(grid, self.block)}
        return Arrangement(store.shape(parts[WEIGHT]), along)

    def values(self, tensors: Tensors, shape: tuple[int, ...]) -> Tensor:  # noqa: ARG002
        """Each value times the scale of its block."""
        return scaled(tensors[WEIGHT], scales_of(tensors[self.needed[1]]), self.block)


@dataclass(frozen=True)
class Grouped(Scheme):
    """Matrices of compressed-tensors: values of eight bits, or codes packed into words; scales and zero points.

    Attributes:
        bits: of a value.
        block: rows and columns with one scale: (1, group), (1, 0) for one a row, (0, 0) for one in all.
        packed: whether values are codes in words of 32 bits, that of -2^(bits - 1) being 0.
    """

    bits: int
    block: Block
    packed: bool

    optional = (
        *(".weight_zero_point", ".weight_g_idx", ".input_scale", ".input_zero_point", ".input_global_scale"),
        *(".output_scale", ".output_zero_point"),
    )

    @property
    def needed(self) -> tuple[str, ...]:  # type: ignore[override]
        """Where values are packed, their number has to be said."""
        return (".weight_packed", ".weight_scale", ".weight_shape") if self.packed else (WEIGHT, ".weight_scale")

    @property
    def description(self) -> str:
        rows, columns = self.block
        where = f"blocks of {rows} x {columns}" if rows > 1 else f"groups of {columns}" if columns else "rows"
        return f"{self.bits} bits {f'in {where}' if rows else 'with one scale'} (compressed-tensors)"

    def holds(self, parts: Mapping[str, str], store: Store) -> bool:
        """By its packed values, or its dtype beside a scale."""
        if self.packed:
            return ".weight_packed" in parts
        return WEIGHT in parts and store.dtype(parts[WEIGHT]) in EIGHT_BITS

    def arrangement(self, parts: Mapping[str, str], store: Store) -> Arrangement:
        """Zero points are packed along rows, values along columns."""
        along: dict[str, tuple[Along | None, ...]] = {}
        per_word = Fraction(self.bits, 32) if self.packed else Fraction(1)
        if self.packed:
            rows, columns = map(int, store.tensor(parts[".weight_shape"]))
            shape: tuple[int, ...] = (rows, columns)
        else:
            shape = store.shape(parts[WEIGHT])
        along[self.needed[0]] = ROWS, Along(1, per_word)
        scales = along_grid(store.shape(parts[".weight_scale"]), self.block)
        if ".weight_g_idx" in parts:  # columns say which group they are of
            along[".weight_g_idx"] = None, Along(0)
            scales = scales[0], None
        along[".weight_scale"] = scales
        if ".weight_zero_point" in parts:
            by_row = None if scales[0] is None else Along(0, scales[0].per_element * per_word)
            along[".weight_zero_point"] = by_row, scales[1]
        return Arrangement(shape, along)

    def stated(self, ending: str, shape: tuple[int, ...]) -> Tensor | None:
        return torch.tensor(shape) if ending == ".weight_shape" else None

    def values(self, tensors: Tensors, shape: tuple[int, ...]) -> Tensor:
        """(value - zero point) * scale, of the group that its column is of."""
        values, scales, zeros = tensors[self.needed[0]], tensors[".weight_scale"], tensors.get(".weight_zero_point")
        block = self.block
        if self.packed:
            values = codes_of(values, self.bits, 1)[:, : shape[1]]
            # Both are stored with this added, so that it falls out.
            middle = torch.full_like(scales, 1 << (self.bits - 1))
            zeros = middle if zeros is None else codes_of(zeros, self.bits, 0)[: len(scales)]
        if ".weight_g_idx" in tensors:
            index = tensors[".weight_g_idx"].long()
            scales, zeros, block = scales[:, index], None if zeros is None else zeros[:, index], (1, 1)
        return scaled(values, scales, block, zeros)
