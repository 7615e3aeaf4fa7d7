"""Quantised matrices with damaged tensors: refused by the tensor's name, and never read as other numbers."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from surgeon.models.weights import NamedTensors
from surgeon.models.weights.quantised import quantised_matrices
from tests.quantised import IN_GROUPS, SCHEMES, groups, mxfp4, named, packed


def by_index(matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The same codes, of which every column belongs to the group that it does in order."""
    stored, numbers = packed(matrix)
    stored[".weight_g_idx"] = torch.arange(matrix.shape[1], dtype=torch.int32) // 16
    return stored, numbers


BY_INDEX = {"num_bits": 4, "type": "int", "symmetric": False, "actorder": "group", **IN_GROUPS}
EVERY = SCHEMES | {
    "mxfp4": (mxfp4, {"quant_method": "mxfp4"}),
    "packed by index": (by_index, groups("pack-quantized", **BY_INDEX)),
}


def made(scheme: str) -> tuple[dict[str, Tensor], Tensor, dict[str, Any]]:
    quantise, config = EVERY[scheme]
    torch.manual_seed(0)
    return *quantise(torch.randn((2, 64, 16) if scheme == "mxfp4" else (48, 32))), config


def read(stored: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    (found,) = quantised_matrices(named(stored), config).values()
    return found.whole()


def refused_or_read(stored: dict[str, Tensor], config: dict[str, Any]) -> tuple[Tensor | None, str]:
    try:
        return read(stored, config), ""
    except ValueError as error:
        return None, str(error)


def damaged(ending: str, tensor: Tensor) -> dict[str, dict[str, Tensor]]:
    """What may have become of one tensor: in place of it."""
    found: dict[str, dict[str, Tensor]] = {
        "dropped": {},
        "of another type": {ending: tensor.float() if not tensor.is_floating_point() else tensor.int()},
        "of another width": {
            ending: tensor.long() if tensor.dtype == torch.int32 else tensor.to(torch.complex64)
        },
        "one dimension more": {ending: torch.stack([tensor, tensor])},
        "renamed": {f"{ending}_old": tensor},
        "empty": {ending: tensor.new_empty((0, *tensor.shape[1:]))},
    }
    for dim, size in enumerate(tensor.shape):
        found |= {
            f"dimension {dim} shorter": {ending: tensor.narrow(dim, 0, size - 1)},
            f"dimension {dim} twice": {ending: torch.cat([tensor, tensor], dim)},
            f"without dimension {dim}": {ending: tensor.select(dim, 0)},
        }
    return found


@pytest.mark.parametrize("scheme", EVERY)
def test_damage_is_refused(scheme: str) -> None:
    """Every tensor that a scheme implies, missing, of another shape or type: refused by its name, or the same numbers.

    A weight with other dimensions that its scales still fit is a matrix of another shape, which no architecture takes.
    """
    whole, numbers, config = made(scheme)
    torch.testing.assert_close(read(whole, config), numbers)
    tried = 0
    for ending, tensor in whole.items():
        for how, instead in damaged(ending, tensor).items():
            stored = {end: one for end, one in whole.items() if end != ending} | instead
            found, refusal = refused_or_read(stored, config)
            if found is None:
                assert f"m{ending}" in refusal, (scheme, ending, how, refusal)
                tried += 1
                continue
            same = found.shape == numbers.shape and torch.allclose(found, numbers)
            assert same or (found.shape != numbers.shape and how.startswith("dimension")), (
                scheme,
                ending,
                how,
            )
    assert tried >= 6 * len(whole)


@pytest.mark.parametrize("scheme", EVERY)
def test_tensors_that_nobody_knows_are_refused(scheme: str) -> None:
    """One more beside a matrix, and one of another module that is alone."""
    stored, _, config = made(scheme)
    beside = "_turn" if scheme == "mxfp4" else ".turn"
    for tensor in (torch.randn(4), torch.ones(2, 2, dtype=torch.uint8)):
        with pytest.raises(ValueError, match=f"tensor m{re.escape(beside)} .* and belongs to none that"):
            read(stored | {beside: tensor}, config)
    ending = next(end for end in stored if end != ".weight")
    matrices = quantised_matrices(
        NamedTensors(named(stored).tensors | {f"n{ending}": stored[ending]}), config
    )
    with pytest.raises(
        ValueError, match=f"has no tensor n.*, which .* needs beside n{re.escape(ending)}"
    ):
        matrices["n" if scheme == "mxfp4" else "n.weight"].whole()


@pytest.mark.parametrize(
    ("scheme", "ending", "value", "said"),
    [
        ("gptq act order", ".g_idx", -1, "holds -1, and should hold the group of each input, 0 to 1"),
        ("gptq act order", ".g_idx", 2, "holds 2, and should hold the group of each input, 0 to 1"),
        ("gptq", ".g_idx", 1, "should hold inputs in order, as desc_act is false"),
        (
            "packed by index",
            ".weight_g_idx",
            -1,
            "holds -1, and should hold the group of each column, 0 to 1",
        ),
        ("packed", ".weight_shape", -48, "holds .*, and should hold the numbers of rows and columns"),
        ("int8", ".weight_format", 2, "holds 2, and should hold 0 for a layout in rows"),
    ],
)
def test_values_that_stand_for_nothing_are_refused(
    scheme: str, ending: str, value: int, said: str
) -> None:
    stored, _, config = made(scheme)
    stored[ending] = stored[ending].clone()
    stored[ending].view(-1)[0] = value
    with pytest.raises(ValueError, match=f"tensor m{ending} {said}"):
        read(stored, config)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"quant_type": "fp4"}, "says 'fp4' of what is nf4 by its name"),
        ({"blocksize": 0}, "is no quant_state as bitsandbytes writes it, but"),
        ({"shape": [48]}, "is no quant_state as bitsandbytes writes it, but"),
        ({"shape": None}, "is no quant_state as bitsandbytes writes it .TypeError"),
        ({"nested_offset": 0.5}, "has nested_offset alone of nested_blocksize and nested_offset"),
        ({"rotation": "hadamard"}, "has rotation 'hadamard', which is not known in a quant_state"),
    ],
)
def test_what_a_quant_state_says_is_known(change: dict[str, Any], said: str) -> None:
    stored, _, config = made("nf4")
    state = ".weight.quant_state.bitsandbytes__nf4"
    changed = json.loads(bytes(stored[state].tolist())) | change
    stored[state] = torch.tensor(list(json.dumps(changed).encode()), dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"tensor m{state} {said}"):
        read(stored, config)


def test_zero_points_of_a_symmetric_matrix_are_zero() -> None:
    """Early compressed-tensors stored them."""
    stored, numbers, config = made("int8 rows")
    stored[".weight_zero_point"] = torch.zeros(48, 1, dtype=torch.int8)
    torch.testing.assert_close(read(stored, config), numbers)
    stored[".weight_zero_point"][3] = 1
    with pytest.raises(
        ValueError, match="m.weight_zero_point holds 1, and should hold zeros, as symmetric is true"
    ):
        read(stored, config)


def test_one_scale_that_are_two_is_refused() -> None:
    stored = {".weight": torch.randn(4, 6).to(torch.float8_e4m3fn), ".weight_scale_inv": torch.ones(2)}
    with pytest.raises(
        ValueError, match=r"tensor m.weight_scale_inv has the shape \(2,\), and FP8 .* needs \(\) for"
    ):
        read(stored, {"quant_method": "fp8", "weight_block_size": None})
