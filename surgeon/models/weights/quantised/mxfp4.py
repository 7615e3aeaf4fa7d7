"""MXFP4, the microscaling format of the Open Compute Project, as gpt-oss stores its experts: stacked and transposed."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from surgeon.models.weights.quantised.matrix import Along, Arrangement, PartSpec, Quantised, Scheme
from surgeon.models.weights.quantised.unpack import mxfp4
from surgeon.models.weights.store import Tensors

BLOCKS = "_blocks"
EXPONENTS = "_scales"
BLOCK = 32  # values with one exponent


@dataclass(frozen=True)
class Mxfp4(Scheme):
    """Blocks (experts, out, in / 32, 16) and exponents (experts, out, in / 32) of a tensor (experts, in, out)."""

    needed = (BLOCKS, EXPONENTS)
    stands_for = ""

    @property
    def description(self) -> str:
        return "MXFP4"

    def arrangement(self, matrix: Quantised) -> Arrangement:
        """Inputs lie last, in blocks."""
        experts, outputs, blocks, _ = matrix.size(BLOCKS, 4)
        along = Along(0), Along(2, Fraction(1, BLOCK)), Along(1)
        parts = {
            BLOCKS: PartSpec((torch.uint8,), along, sizes=((3, BLOCK // 2),)),
            EXPONENTS: PartSpec((torch.uint8,), along),
        }
        return Arrangement((experts, blocks * BLOCK, outputs), BLOCKS, parts)

    def values(self, tensors: Tensors, shape: tuple[int, ...]) -> Tensor:  # noqa: ARG002
        """The numbers of its blocks, (experts, in, out)."""
        return mxfp4(tensors[BLOCKS], tensors[EXPONENTS]).transpose(1, 2)
