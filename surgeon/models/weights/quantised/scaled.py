"""FP8 and int8 with scales: of blocks, of groups of inputs, of rows, or one for all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from surgeon.models.weights.quantised.matrix import (
    FLOATS,
    INDICES,
    WORD,
    Along,
    Arrangement,
    PartSpec,
    Quantised,
    Scheme,
    codes_of,
    mxfp4,
    scale_values,
    scales_of,
)
from surgeon.models.weights.store import Tensors
from surgeon.words import show_value

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
WEIGHT = ".weight"
ROWS = Along(0)
SCALES = ".weight_scale"
ZEROS = ".weight_zero_point"
GROUPS = ".weight_g_idx"
WORDS = ".weight_packed"
SHAPE = ".weight_shape"
# How what goes in and out, and the cache, is rounded by others; nothing here is.
ACTIVATIONS = (
    *(".input_scale", ".input_zero_point", ".input_global_scale", ".output_scale", ".output_zero_point"),
    *(".activation_scale", ".k_scale", ".v_scale"),
)
Block = tuple[int, int]  # rows and columns with one scale; 0 for all of them


def grid_of(block: Block) -> tuple[Along | None, Along | None]:
    """Place a matrix's rows and columns in a grid of scales; nowhere, where there is one for all of them."""
    rows, columns = block
    return Along(0, Fraction(1, rows)) if rows else None, Along(
        1, Fraction(1, columns)
    ) if columns else None


@dataclass(frozen=True)
class Fp8(Scheme):
    """FP8 with a scale for each block of a matrix, or one for all of it (DeepSeek-V3, Qwen3-FP8).

    Attributes:
        block: rows and columns with one scale; (0, 0) where a matrix has one.
    """

    block: Block

    needed = (WEIGHT, ".weight_scale_inv")
    optional = ACTIVATIONS

    @property
    def description(self) -> str:
        if any(self.block):
            return f"FP8 in blocks of {self.block[0]} x {self.block[1]}"
        return "FP8 with one scale"

    def arrangement(self, matrix: Quantised) -> Arrangement:
        exponents = (torch.float8_e8m0fnu, torch.uint8)
        parts = {ending: PartSpec() for ending in matrix.parts.keys() & set(ACTIVATIONS)} | {
            WEIGHT: PartSpec(FLOAT8, (ROWS, Along(1))),
            self.needed[1]: PartSpec(
                (*FLOATS, *exponents), grid_of(self.block), ones_follow=not any(self.block)
            ),
        }
        return Arrangement(matrix.size(WEIGHT, 2), WEIGHT, parts)

    def values(self, tensors: Tensors, shape: tuple[int, ...]) -> Tensor:  # noqa: ARG002
        return scale_values(tensors[WEIGHT], scales_of(tensors[self.needed[1]]), self.block)


@dataclass(frozen=True)
class Grouped(Scheme):
    """Matrices of compressed-tensors: values of eight bits, or codes packed into words; scales and zero points.

    Attributes:
        bits: of a value.
        block: rows and columns with one scale: (1, group), (1, 0) for one a row, (0, 0) for one in all.
        packed: whether values are codes in words of 32 bits, that of -2^(bits - 1) being 0.
        types: that values of eight bits may have.
        symmetric: whether every zero point is 0, and so none has to be stored.
        by_index: whether g_idx says which group each column is of.
    """

    bits: int
    block: Block
    packed: bool
    types: tuple[torch.dtype, ...] = (torch.int8,)
    symmetric: bool = True
    by_index: bool = False

    optional = (ZEROS, GROUPS, *ACTIVATIONS)

    @property
    def needed(self) -> tuple[str, ...]:  # type: ignore[override]
        """Endings, the number of packed values among them."""
        if self.packed:
            return (WORDS, SCALES, SHAPE)
        return (WEIGHT, SCALES)

    @property
    def description(self) -> str:
        rows, columns = self.block
        where = (
            f"blocks of {rows} x {columns}"
            if rows > 1
            else f"groups of {columns}"
            if columns
            else "rows"
        )
        return f"{self.bits} bits {f'in {where}' if rows else 'with one scale'} (compressed-tensors)"

    def arrangement(self, matrix: Quantised) -> Arrangement:
        """Arrange zero points, packed along rows, and values, packed along columns."""
        parts = {ending: PartSpec() for ending in matrix.parts.keys() & set(ACTIVATIONS)}
        if self.packed:
            per_word = Fraction(self.bits, WORD)
            said = matrix.tensor(SHAPE).tolist()
            if not (
                isinstance(said, list)
                and len(said) == 2
                and all(type(one) is int and one > 0 for one in said)
            ):
                raise matrix.fault(
                    SHAPE, f"holds {show_value(said)}, and should hold the numbers of rows and columns"
                )
            shape = tuple(said)
            parts[WORDS] = PartSpec((torch.int32,), (ROWS, Along(1, per_word)))
            parts[SHAPE] = PartSpec(INDICES, sizes=((0, 2),))
        else:
            per_word = Fraction(1)
            shape = matrix.size(WEIGHT, 2)
            parts[WEIGHT] = PartSpec(self.types, (ROWS, Along(1)))
        rows, columns = grid_of(self.block)
        sizes: tuple[tuple[int, int], ...] = ()
        if self.by_index:  # columns say which group they are of
            count = math.ceil(shape[1] / self.block[1])
            meaning = f"the group of each column, 0 to {count - 1}"
            parts[GROUPS] = PartSpec(INDICES, (None, Along(0)), below=count, meaning=meaning)
            columns = None
            sizes = ((1, count),)
        loose = not self.block[1]
        parts[SCALES] = PartSpec(FLOATS, (rows, columns), sizes, loose)
        if self.packed and not self.symmetric:
            by_row = None if rows is None else Along(0, rows.per_element * per_word)
            parts[ZEROS] = PartSpec((torch.int32,), (by_row, columns), sizes, loose)
        elif not self.symmetric or ZEROS in matrix.parts:
            below, meaning = (1, "zeros, as symmetric is true") if self.symmetric else (None, "")
            parts[ZEROS] = PartSpec(
                (*self.types, *FLOATS), (rows, columns), sizes, loose, below, meaning
            )
        return Arrangement(shape, SHAPE if self.packed else WEIGHT, parts)

    def derive_tensor(self, ending: str, shape: tuple[int, ...]) -> Tensor | None:
        if ending == SHAPE:
            return torch.tensor(shape)
        return None

    def values(self, tensors: Tensors, shape: tuple[int, ...]) -> Tensor:
        """Compute (value - zero point) * scale, of the group of its column."""
        values = tensors[self.needed[0]]
        scales = tensors[SCALES]
        zeros = tensors.get(ZEROS)
        block = self.block
        if self.packed:
            values = codes_of(values, self.bits, 1)[:, : shape[1]]
            # Both are stored with this added, so that it falls out.
            middle = torch.full_like(scales, 1 << (self.bits - 1))
            if zeros is None:
                zeros = middle
            else:
                zeros = codes_of(zeros, self.bits, 0)[: len(scales)]
        if self.by_index:
            index = tensors[GROUPS].long()
            scales = scales[:, index]
            zeros = None if zeros is None else zeros[:, index]
            block = (1, 1)
        return scale_values(values, scales, block, zeros)


BLOCKS = "_blocks"
EXPONENTS = "_scales"
BLOCK = 32  # values with one exponent


@dataclass(frozen=True)
class Mxfp4(Scheme):
    """Blocks (experts, out, in / 32, 16) and exponents (experts, out, in / 32) of a tensor (experts, in, out)."""

    needed = (BLOCKS, EXPONENTS)
    stands_for = ""
    description = "MXFP4"

    def arrangement(self, matrix: Quantised) -> Arrangement:
        experts, outputs, blocks, _ = matrix.size(BLOCKS, 4)
        along = Along(0), Along(2, Fraction(1, BLOCK)), Along(1)
        parts = {
            BLOCKS: PartSpec((torch.uint8,), along, sizes=((3, BLOCK // 2),)),
            EXPONENTS: PartSpec((torch.uint8,), along),
        }
        return Arrangement((experts, blocks * BLOCK, outputs), BLOCKS, parts)

    def values(self, tensors: Tensors, shape: tuple[int, ...]) -> Tensor:  # noqa: ARG002
        """Compute the numbers of its blocks, (experts, in, out)."""
        return mxfp4(tensors[BLOCKS], tensors[EXPONENTS]).transpose(1, 2)
