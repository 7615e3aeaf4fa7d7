"""GPTQ and AWQ: codes of few bits in words of 32, with scales and zero points for groups of inputs, all transposed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

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
    """

    bits: int
    group: int
    zero_offset: int = 1

    needed = (WORDS, ZEROS, SCALES)
    optional = (GROUPS,)

    @property
    def description(self) -> str:
        """For people."""
        return f"GPTQ of {self.bits} bits{'' if self.group < 0 else f' in groups of {self.group}'}"

    def holds(self, parts: Mapping[str, str], store: Store) -> bool:  # noqa: ARG002
        """By any of its tensors but scales, which others have too."""
        return WORDS in parts or ZEROS in parts

    def arrangement(self, parts: Mapping[str, str], store: Store) -> Arrangement:
        """Inputs lie along the first dimension; which group each is of says g_idx, in any order."""
        per_word = Fraction(self.bits, WORD)
        inputs, outputs = store.shape(parts[WORDS])[0] / per_word, store.shape(parts[WORDS])[1]
        groups = None if GROUPS in parts or self.group < 0 else Along(0, Fraction(1, self.group))
        places: dict[str, tuple[Along | None, ...]] = {
            WORDS: (Along(1), Along(0, per_word)),
            ZEROS: (Along(1, per_word), groups),
            SCALES: (Along(1), groups),
        }
        if GROUPS in parts:
            places[GROUPS] = None, Along(0)
        return Arrangement((outputs, int(inputs)), places)

    def values(self, tensors: Tensors, shape: tuple[int, ...]) -> Tensor:
        """(code - zero point) * scale, (out, in)."""
        outputs, inputs = shape
        zeros = codes_of(tensors[ZEROS], self.bits, 1)[:, :outputs] + self.zero_offset
        zeros = zeros & ((1 << self.bits) - 1)  # where 1 is missing, 0 is stored as the largest code
        return _of_groups(codes_of(tensors[WORDS], self.bits, 0), zeros, tensors, inputs, self.group)


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
        """For people."""
        return f"AWQ of 4 bits{'' if self.group < 0 else f' in groups of {self.group}'}"

    def holds(self, parts: Mapping[str, str], store: Store) -> bool:  # noqa: ARG002
        """By any of its tensors but scales, which others have too."""
        return WORDS in parts or ZEROS in parts

    def arrangement(self, parts: Mapping[str, str], store: Store) -> Arrangement:
        """Inputs lie along the first dimension."""
        inputs, words = store.shape(parts[WORDS])
        packed = Along(1, Fraction(self.bits, WORD))
        groups = None if self.group < 0 else Along(0, Fraction(1, self.group))
        places = {WORDS: (packed, Along(0)), ZEROS: (packed, groups), SCALES: (Along(1), groups)}
        return Arrangement((words * WORD // self.bits, inputs), places)

    def values(self, tensors: Tensors, shape: tuple[int, ...]) -> Tensor:
        """(code - zero point) * scale, (out, in)."""
        codes, zeros = (codes_of(tensors[name], self.bits, 1, AWQ_PLACES) for name in (WORDS, ZEROS))
        return _of_groups(codes, zeros, tensors, shape[1], self.group)


def _of_groups(codes: Tensor, zeros: Tensor, tensors: Tensors, inputs: int, group: int) -> Tensor:
    """Of codes (in, out), with scales and zero points (groups, out), the matrix, (out, in)."""
    scales = tensors[SCALES].float()
    if GROUPS in tensors:
        index = tensors[GROUPS].long()
        scales, zeros = scales[index], zeros[index]
    elif group >= 0:
        scales, zeros = (one.repeat_interleave(group, 0)[:inputs] for one in (scales, zeros))
    return scaled(codes[:inputs], scales, zeros).T
