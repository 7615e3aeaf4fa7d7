"""MXFP4, the microscaling format of the Open Compute Project, as gpt-oss stores its experts: stacked and transposed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from torch import Tensor

from surgeon.models.weights.quantised.matrix import Along, Arrangement, Scheme
from surgeon.models.weights.quantised.unpack import mxfp4
from surgeon.models.weights.store import Store, Tensors

BLOCKS, EXPONENTS = "_blocks", "_scales"
BLOCK = 32  # values with one exponent


@dataclass(frozen=True)
class Mxfp4(Scheme):
    """Blocks (experts, out, in / 32, 16) and exponents (experts, out, in / 32) of a tensor (experts, in, out)."""

    needed = (BLOCKS, EXPONENTS)
    stands_for = ""

    @property
    def description(self) -> str:
        return "MXFP4"

    def holds(self, parts: Mapping[str, str], store: Store) -> bool:  # noqa: ARG002
        """By its name, which nothing else has."""
        return bool(parts)

    def arrangement(self, parts: Mapping[str, str], store: Store) -> Arrangement:
        """Inputs lie last, in blocks.

        Raises:
            ValueError: if blocks are of another size.
        """
        shape = store.shape(parts[BLOCKS])
        if len(shape) != 4 or shape[3] * 2 != BLOCK:
            raise ValueError(
                f"{store.where}: tensor {parts[BLOCKS]} has the shape {shape}, and MXFP4 needs "
                f"(experts, out, blocks, {BLOCK // 2})"
            )
        along = Along(0), Along(2, Fraction(1, BLOCK)), Along(1)
        return Arrangement((shape[0], shape[2] * BLOCK, shape[1]), {BLOCKS: along, EXPONENTS: along})

    def values(self, tensors: Tensors, shape: tuple[int, ...]) -> Tensor:  # noqa: ARG002
        """The numbers of its blocks, (experts, in, out)."""
        return mxfp4(tensors[BLOCKS], tensors[EXPONENTS]).transpose(1, 2)
