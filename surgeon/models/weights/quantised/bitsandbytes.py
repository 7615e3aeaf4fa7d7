"""bitsandbytes: four bits by a table (NF4, FP4) in blocks of the flattened matrix, and int8 with a scale a row."""

from __future__ import annotations

import json
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from surgeon.models.weights.quantised.matrix import (
    FLOATS,
    Along,
    Arrangement,
    PartSpec,
    Quantised,
    Scheme,
    pairs_of,
    scale_values,
)
from surgeon.models.weights.store import Tensors
from surgeon.words import show_value

WEIGHT = ".weight"
ABSMAX = ".weight.absmax"
TABLE = ".weight.quant_map"
NESTED = ".weight.nested_absmax"
NESTED_TABLE = ".weight.nested_quant_map"
STATE = ".weight.quant_state.bitsandbytes__"
SCALES = ".SCB"
FORMAT = ".weight_format"
INT8_RANGE = 127.0
BYTES = (torch.uint8, torch.int8)  # codes, which may be stored as if they were numbers of more bytes
_NESTED_STATE = {"nested_blocksize", "nested_offset"}
_STATE = {"quant_type", "blocksize", "dtype", "shape", "nested_dtype", *_NESTED_STATE}


def state_of(stored: Tensor) -> dict[str, Any]:
    """Read a matrix's description, JSON in bytes, or raise ValueError."""
    try:
        said: dict[str, Any] = json.loads(bytes(stored.tolist()).decode())
        numbers = (*said["shape"], said["blocksize"], said.get("nested_blocksize", 1))
        offset = said.get("nested_offset", 0.0)
        found = said["quant_type"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"is no quant_state as bitsandbytes writes it ({type(error).__name__}: {error})"
        ) from error
    is_whole = all(type(one) is int and one > 0 for one in numbers) and len(said["shape"]) == 2
    if not is_whole or not isinstance(offset, float | int) or not isinstance(found, str):
        raise ValueError(f"is no quant_state as bitsandbytes writes it, but {show_value(said, 200)}")
    if unknown := sorted(said.keys() - _STATE):
        raise ValueError(
            f"has {unknown[0]} {show_value(said[unknown[0]])}, which is not known in a quant_state"
        )
    return said


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
        """Endings, the table's name in that of a matrix's description."""
        return WEIGHT, ABSMAX, TABLE, f"{STATE}{self.table}"

    @property
    def description(self) -> str:
        return f"{self.table.upper()} (bitsandbytes)"

    def arrangement(self, matrix: Quantised) -> Arrangement:
        """Rows lie one after the other in all of its tensors, columns nowhere."""
        state = self.needed[3]
        try:
            said = state_of(matrix.tensor(state))
        except ValueError as error:
            raise matrix.fault(state, str(error)) from error
        if said["quant_type"] != self.table:
            raise matrix.fault(
                state, f"says {show_value(said['quant_type'])} of what is {self.table} by its name"
            )
        rows, columns = said["shape"]
        half = 2 * matrix.store.dtype(matrix.parts[WEIGHT]).itemsize
        block = said["blocksize"]
        nested = said.keys() & _NESTED_STATE
        parts = {
            WEIGHT: PartSpec(
                (*BYTES, *FLOATS), (Along(0, Fraction(columns, half)), None), ones_follow=True
            ),
            ABSMAX: PartSpec(
                (torch.uint8,) if nested else FLOATS, (Along(0, Fraction(columns, block)), None)
            ),
            TABLE: PartSpec(FLOATS, sizes=((0, 16),)),
            state: PartSpec(),
        }
        if nested:
            if nested != _NESTED_STATE:
                raise matrix.fault(
                    state, f"has {nested.pop()} alone of {' and '.join(sorted(_NESTED_STATE))}"
                )
            of_scales = Along(0, Fraction(columns, block * said["nested_blocksize"])), None
            parts |= {
                NESTED: PartSpec(FLOATS, of_scales),
                NESTED_TABLE: PartSpec(FLOATS, sizes=((0, 256),)),
            }
        return Arrangement((rows, columns), state, parts, whole=(1,))

    def values(self, tensors: Tensors, shape: tuple[int, ...]) -> Tensor:
        said = state_of(tensors[self.needed[3]])
        scales = tensors[ABSMAX].float()
        if NESTED in tensors:
            values = tensors[NESTED_TABLE].float().index_select(0, tensors[ABSMAX].int())
            scales = (
                _in_blocks(values, tensors[NESTED], said["nested_blocksize"]) + said["nested_offset"]
            )
        packed = tensors[WEIGHT].contiguous().view(torch.uint8).flatten()
        numbers = pairs_of(packed, tensors[TABLE], high_first=True)[: shape[0] * shape[1]]
        return _in_blocks(numbers, scales, said["blocksize"]).view(shape)


@dataclass(frozen=True)
class Int8(Scheme):
    """LLM.int8 (Dettmers et al. 2022): each row has the size of its largest value, which is 127."""

    needed = (WEIGHT, SCALES)
    optional = (FORMAT,)
    description = "int8 (bitsandbytes)"

    def arrangement(self, matrix: Quantised) -> Arrangement:
        parts = {
            WEIGHT: PartSpec((torch.int8,), (Along(0), Along(1))),
            SCALES: PartSpec(FLOATS, (Along(0), None), ones_follow=True),
        }
        if FORMAT in matrix.parts:
            layouts = "0 for a layout in rows (1 is col32, 2 col_turing, 3 col_ampere, which are not supported)"
            parts[FORMAT] = PartSpec((torch.uint8,), ones_follow=True, below=1, meaning=layouts)
        return Arrangement(matrix.size(WEIGHT, 2), WEIGHT, parts)

    def values(self, tensors: Tensors, shape: tuple[int, ...]) -> Tensor:  # noqa: ARG002
        """Multiply each value by a 127th of its row's scale."""
        return scale_values(tensors[WEIGHT], tensors[SCALES].float() / INT8_RANGE, (1, 0))


def _in_blocks(values: Tensor, scales: Tensor, block: int) -> Tensor:
    """Multiply values in one row by the scales of their blocks, of which the last may be cut off."""
    return scale_values(values[None], scales.float()[None], (1, block))[0]
