"""bitsandbytes: four bits by a table (NF4, FP4) in blocks of the flattened matrix, and int8 with a scale a row."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from surgeon.models.weights.quantised.matrix import Along, Arrangement, Scheme
from surgeon.models.weights.quantised.unpack import pairs_of, scaled
from surgeon.models.weights.store import Store, Tensors

WEIGHT, ABSMAX, TABLE = ".weight", ".weight.absmax", ".weight.quant_map"
NESTED, NESTED_TABLE = ".weight.nested_absmax", ".weight.nested_quant_map"
STATE = ".weight.quant_state.bitsandbytes__"
SCALES = ".SCB"
INT8_RANGE = 127.0


def state_of(stored: Tensor) -> dict[str, Any]:
    """What is said of a matrix, JSON in bytes.

    Raises:
        ValueError: if it is not that.
    """
    try:
        said = json.loads(bytes(stored.tolist()).decode())
        return {"nested_blocksize": 0, "nested_offset": 0.0, **said, "shape": tuple(map(int, said["shape"]))}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"a quant_state of bitsandbytes is not what it writes ({error})") from error


@dataclass(frozen=True)
class FourBits(Scheme):
    """Two codes in a byte, the first one in its high bits; a value is the table's times that of its block.

    Scales may be codes of eight bits themselves (double quantisation, QLoRA, Dettmers et al. 2023).

    Attributes:
        table: "nf4" or "fp4".
    """

    table: str

    optional = (NESTED, NESTED_TABLE)

    @property
    def needed(self) -> tuple[str, ...]:  # type: ignore[override]
        """The tensor with what is said of a matrix has the table's name."""
        return WEIGHT, ABSMAX, TABLE, f"{STATE}{self.table}"

    @property
    def description(self) -> str:
        return f"{self.table.upper()} (bitsandbytes)"

    def holds(self, parts: Mapping[str, str], store: Store) -> bool:  # noqa: ARG002
        """By any of its tensors but the weight, which all modules have."""
        return ABSMAX in parts or TABLE in parts or self.needed[3] in parts

    def arrangement(self, parts: Mapping[str, str], store: Store) -> Arrangement:
        """Rows lie one after the other in all of its tensors, columns nowhere."""
        said = state_of(store.tensor(parts[self.needed[3]]))
        rows, columns = said["shape"]
        half, block = 2 * store.dtype(parts[WEIGHT]).itemsize, said["blocksize"]
        along: dict[str, tuple[Along | None, ...]] = {
            WEIGHT: (Along(0, Fraction(columns, half)), None),
            ABSMAX: (Along(0, Fraction(columns, block)), None),
        }
        if NESTED in parts:
            along[NESTED] = Along(0, Fraction(columns, block * said["nested_blocksize"])), None
        return Arrangement((rows, columns), along, whole=(1,))

    def values(self, tensors: Tensors, shape: tuple[int, ...]) -> Tensor:
        """The table's value times the scale of its block."""
        said, scales = state_of(tensors[self.needed[3]]), tensors[ABSMAX].float()
        if NESTED in tensors:
            values = tensors[NESTED_TABLE].float().index_select(0, tensors[ABSMAX].int())
            scales = _in_blocks(values, tensors[NESTED], said["nested_blocksize"]) + said["nested_offset"]
        packed = tensors[WEIGHT].contiguous().view(torch.uint8).flatten()
        numbers = pairs_of(packed, tensors[TABLE], high_first=True)[: shape[0] * shape[1]]
        return _in_blocks(numbers, scales, said["blocksize"]).view(shape)


@dataclass(frozen=True)
class Int8(Scheme):
    """LLM.int8 (Dettmers et al. 2022): each row has the size of its largest value, which is 127."""

    needed = (WEIGHT, SCALES)
    optional = (".weight_format",)

    @property
    def description(self) -> str:
        return "int8 (bitsandbytes)"

    def holds(self, parts: Mapping[str, str], store: Store) -> bool:
        """By its scales, or its dtype."""
        return SCALES in parts or (WEIGHT in parts and store.dtype(parts[WEIGHT]) == torch.int8)

    def arrangement(self, parts: Mapping[str, str], store: Store) -> Arrangement:
        """A scale for each row."""
        return Arrangement(store.shape(parts[WEIGHT]), {WEIGHT: (Along(0), Along(1)), SCALES: (Along(0), None)})

    def values(self, tensors: Tensors, shape: tuple[int, ...]) -> Tensor:  # noqa: ARG002
        """Each value times a 127th of its row's scale."""
        return scaled(tensors[WEIGHT], tensors[SCALES].float() / INT8_RANGE, (1, 0))


def _in_blocks(values: Tensor, scales: Tensor, block: int) -> Tensor:
    """Values in one row, each times the scale of its block, of which the last may be cut off."""
    return scaled(values[None], scales.float()[None], (1, block))[0]
