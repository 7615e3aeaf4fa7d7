"""GPTQ and AWQ: codes of few bits in words of 32, with scales and zero points for groups of inputs, all transposed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from surgeon.models.weights.quantised.matrix import Along, Arrangement, Scheme
from surgeon.models.weights.quantised.unpack import WORD, codes_of, scaled
from surgeon.models.weights.store import Store, Tensors

WORDS, ZEROS, SCALES, GROUPS = ".qweight", ".qzeros", ".scales", ".g_idx"
# Which of a word's codes the eight outputs are, in AWQ's order: 0 2 4 6 1 3 5 7 are written from the lowest bits on.
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class Gptq(Scheme):
    """GPTQ (Frantar et al. 2023) as AutoGPTQ stores it: codes packed along inputs, zero points along outputs.

    Attributes:
        bits: of a code.
        group: inputs with one scale; -1 for all of them.
        zero_offset: what stored zero points lack: 1 in the first version of the format.
        in_order: whether the inputs of each group lie side by side (no act-order).
    """

    bits: int
    group: int
    zero_offset: int = 1
    in_order: bool = False

    needed = (WORDS, ZEROS, SCALES)
    optional = (GROUPS,)
    writes_biases = True

    @property
    def description(self) -> str:
        return f"GPTQ of {self.bits} bits{'' if self.group < 0 else f' in groups of {self.group}'}"

    def holds(self, parts: Mapping[str, str], store: Store) -> bool:  # noqa: ARG002
        """By any of its tensors but scales, which others have too."""
        return WORDS in parts or ZEROS in parts

    def arrangement(self, parts: Mapping[str, str], store: Store) -> Arrangement:
        """Inputs lie along the first dimension; which group each is of says g_idx, unless they lie in order."""
        per_word = Fraction(self.bits, WORD)
        inputs, outputs = store.shape(parts[WORDS])[0] / per_word, store.shape(parts[WORDS])[1]
        by_index = GROUPS in parts and not self.in_order
        groups = None if by_index or self.group < 0 else Along(0, Fraction(1, self.group))
        along: dict[str, tuple[Along | None, ...]] = {
            WORDS: (Along(1), Along(0, per_word)),
            ZEROS: (Along(1, per_word), groups),
            SCALES: (Along(1), groups),
        }
        if by_index:
            along[GROUPS] = None, Along(0)
        return Arrangement((outputs, int(inputs)), along)

    def stated(self, ending: str, shape: tuple[int, ...]) -> Tensor | None:
        """Which group each input is of, if they lie in order."""
        follows = ending == GROUPS and self.in_order and self.group > 0
        return torch.arange(shape[1], dtype=torch.int32) // self.group if follows else None

    def values(self, tensors: Tensors, shape: tuple[int, ...]) -> Tensor:
        """(code - zero point) * scale, (out, in)."""
        outputs, inputs = shape
        zeros = codes_of(tensors[ZEROS], self.bits, 1)[:, :outputs] + self.zero_offset
        zeros = zeros & ((1 << self.bits) - 1)  # where 1 is missing, 0 is stored as the largest code
        codes, index = codes_of(tensors[WORDS], self.bits, 0), tensors.get(GROUPS)
        if self.in_order and index is not None:
            group = self.group if self.group > 0 else len(index)
            if not torch.equal(index, (torch.arange(len(index), device=index.device) // group).to(index.dtype)):
                raise ValueError("a g_idx of GPTQ has inputs out of order, and config.json says that desc_act is false")
            index = None
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

    def holds(self, parts: Mapping[str, str], store: Store) -> bool:  # noqa: ARG002
        """By any of its tensors but scales, which others have too."""
        return WORDS in parts or ZEROS in parts

    def arrangement(self, parts: Mapping[str, str], store: Store) -> Arrangement:
        """Inputs lie along the first dimension."""
        inputs, words = store.shape(parts[WORDS])
        packed = Along(1, Fraction(self.bits, WORD))
        groups = None if self.group < 0 else Along(0, Fraction(1, self.group))
        along = {WORDS: (packed, Along(0)), ZEROS: (packed, groups), SCALES: (Along(1), groups)}
        return Arrangement((words * WORD // self.bits, inputs), along)

    def values(self, tensors: Tensors, shape: tuple[int, ...]) -> Tensor:
        """(code - zero point) * scale, (out, in)."""
        codes, zeros = (codes_of(tensors[name], self.bits, 1, AWQ_PLACES) for name in (WORDS, ZEROS))
        return _of_groups(codes, zeros, tensors[SCALES], shape[1], self.group)


def _of_groups(
    codes: Tensor, zeros: Tensor, scales: Tensor, inputs: int, group: int, index: Tensor | None = None
) -> Tensor:
    """Of codes (in, out), with scales and zero points (groups, out), the matrix, (out, in).

    Args:
        group: inputs of one, that lie side by side where no index says which group each is of.
    """
    if index is None:
        return scaled(codes[:inputs].T.contiguous(), scales.T, (1, max(0, group)), zeros.T)
    return scaled(codes[:inputs].T.contiguous(), scales[index.long()].T, (1, 1), zeros[index.long()].T)
