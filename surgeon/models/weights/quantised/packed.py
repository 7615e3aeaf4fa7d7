"""GPTQ and AWQ: codes of few bits in words of 32, with scales and zero points for groups of inputs, all transposed."""

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
    scale_values,
)
from surgeon.models.weights.store import Tensors

WORDS = ".qweight"
ZEROS = ".qzeros"
SCALES = ".scales"
GROUPS = ".g_idx"
# Which of a word's codes the eight outputs are, in AWQ's order: 0 2 4 6 1 3 5 7 are written from the lowest bits on.
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class Gptq(Scheme):
    """GPTQ (Frantar et al. 2023) as AutoGPTQ stores it: codes packed along inputs, zero points along outputs.

    Attributes:
        bits: of a code.
        group: inputs with one scale; -1 for all of them.
        zero_offset: what stored zero points lack: 1 in the first version of the format.
        in_order: whether the inputs of each group lie side by side (no act-order); None where g_idx says it, if it is
            there.
    """

    bits: int
    group: int
    zero_offset: int = 1
    in_order: bool | None = None

    needed = (WORDS, ZEROS, SCALES)
    optional = (GROUPS,)
    writes_biases = True

    @property
    def description(self) -> str:
        return f"GPTQ of {self.bits} bits{'' if self.group < 0 else f' in groups of {self.group}'}"

    def arrangement(self, matrix: Quantised) -> Arrangement:
        """Arrange inputs along the first dimension; g_idx has the group of each, unless they lie in order."""
        per_word = Fraction(self.bits, WORD)
        words, outputs = matrix.size(WORDS, 2)
        inputs = int(words / per_word)
        by_index = self.in_order is False or (self.in_order is None and GROUPS in matrix.parts)
        if self.group < 0:
            count = 1
        else:
            count = math.ceil(inputs / self.group)
        if by_index or self.group < 0:
            groups = None
        else:
            groups = Along(0, Fraction(1, self.group))
        parts = {
            WORDS: PartSpec((torch.int32,), (Along(1), Along(0, per_word))),
            ZEROS: PartSpec((torch.int32,), (Along(1, per_word), groups), ((0, count),)),
            SCALES: PartSpec(FLOATS, (Along(1), groups), ((0, count),)),
        }
        if by_index or GROUPS in matrix.parts:
            if by_index:
                meaning = f"the group of each input, 0 to {count - 1}"
            else:
                meaning = "inputs in order, as desc_act is false"
            along = None, Along(0)
            parts[GROUPS] = PartSpec(INDICES, along, below=count if by_index else None, meaning=meaning)
        return Arrangement((outputs, inputs), WORDS, parts)

    def derive_tensor(self, ending: str, shape: tuple[int, ...]) -> Tensor | None:
        """Number the group of each input, if they lie in order."""
        follows = ending == GROUPS and self.in_order
        if follows:
            return torch.arange(shape[1]) // (self.group if self.group > 0 else shape[1])
        return None

    def values(self, tensors: Tensors, shape: tuple[int, ...]) -> Tensor:
        """(code - zero point) * scale, (out, in)."""
        outputs, inputs = shape
        zeros = codes_of(tensors[ZEROS], self.bits, 1)[:, :outputs] + self.zero_offset
        zeros = zeros & ((1 << self.bits) - 1)  # where 1 is missing, 0 is stored as the largest code
        codes = codes_of(tensors[WORDS], self.bits, 0)
        if self.in_order:
            index = None
        else:
            index = tensors.get(GROUPS)
        return _of_groups(codes, zeros, tensors[SCALES], inputs, self.group, index)


@dataclass(frozen=True)
class Awq(Scheme):
    """AWQ (Lin et al. 2024) as AutoAWQ's "gemm" stores it: codes and zero points packed along outputs, in its order.

    Attributes:
        group: inputs with one scale; -1 for all of them.
    """

    group: int
    bits = 4

    needed = (WORDS, ZEROS, SCALES)

    @property
    def description(self) -> str:
        return f"AWQ of 4 bits{'' if self.group < 0 else f' in groups of {self.group}'}"

    def arrangement(self, matrix: Quantised) -> Arrangement:
        inputs, words = matrix.size(WORDS, 2)
        packed = Along(1, Fraction(self.bits, WORD))
        if self.group < 0:
            groups = None
        else:
            groups = Along(0, Fraction(1, self.group))
        parts = {
            WORDS: PartSpec((torch.int32,), (packed, Along(0))),
            ZEROS: PartSpec((torch.int32,), (packed, groups), ((0, 1),)),
            SCALES: PartSpec(FLOATS, (Along(1), groups), ((0, 1),)),
        }
        return Arrangement((words * WORD // self.bits, inputs), WORDS, parts)

    def values(self, tensors: Tensors, shape: tuple[int, ...]) -> Tensor:
        """(code - zero point) * scale, (out, in)."""
        codes, zeros = (codes_of(tensors[name], self.bits, 1, AWQ_PLACES) for name in (WORDS, ZEROS))
        return _of_groups(codes, zeros, tensors[SCALES], shape[1], self.group)


def _of_groups(
    codes: Tensor, zeros: Tensor, scales: Tensor, inputs: int, group: int, index: Tensor | None = None
) -> Tensor:
    """Compute the matrix, (out, in), of codes (in, out), scales and zero points (groups, out).

    Args:
        group: inputs of one, that lie side by side where no index says which group each is of.
    """
    if index is None:
        return scale_values(codes[:inputs].T.contiguous(), scales.T, (1, max(0, group)), zeros.T)
    return scale_values(
        codes[:inputs].T.contiguous(), scales[index.long()].T, (1, 1), zeros[index.long()].T
    )
