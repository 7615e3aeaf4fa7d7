"""Quantised matrices held as they are stored: what is computed with them is what their numbers give, bit for bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surgeon.checkpoint.stored import Checkpoint
from surgeon.models.weights import ModuleStore
from surgeon.models.weights.quantised import PackedTensor, Quantised
from tests.checkpoint.helpers import save_source
from tests.pretended import pretended_gpus
from tests.quantised import SCHEMES, quantise_folder
from tests.selection import case

SOME = [case(scheme, default=scheme in ("gptq", "nf4")) for scheme in SCHEMES]


@pytest.fixture
def matrix(scheme: str, tmp_path: Path) -> Quantised:
    save_source(tmp_path / "model", num_layers=1)
    return Checkpoint(quantise_folder(tmp_path / "model", scheme)).quantised[
        "model.layers.0.mlp.up_proj.weight"
    ]


def linear_of(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    outputs, inputs = weight.shape
    made = nn.Linear(inputs, outputs, bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias)
    return made


def run(linear: nn.Linear, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and gradients, and what was kept between the passes."""
    kept: list[Tensor] = []
    x = x.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):  # type: ignore[func-returns-value]
        output = linear(x)
    (output * torch.arange(output.shape[-1], dtype=x.dtype)).sum().backward()
    return [
        output,
        *(one.grad for one in (x, linear.bias) if one is not None and one.grad is not None),
    ], kept


@pytest.mark.parametrize("scheme", SOME)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_and_gradients_are_those_of_the_numbers(matrix: Quantised, dtype: torch.dtype) -> None:
    numbers, packed = matrix.whole(dtype), PackedTensor.of(matrix)
    for bias in (None, torch.randn(numbers.shape[0], dtype=dtype)):
        plain = linear_of(numbers, None if bias is None else bias.clone())
        ours = copy.deepcopy(linear_of(packed, bias)).to(dtype)
        assert (type(ours.weight), ours.weight.dtype) == (PackedTensor, dtype)
        for shape in ((5, numbers.shape[1]), (2, 3, numbers.shape[1])):
            x = torch.randn(shape, dtype=dtype)
            (expected, _), (found, kept) = run(plain, x), run(ours, x)
            assert len(found) == len(expected)
            assert all(map(torch.equal, found, expected))
            assert all(isinstance(one, PackedTensor) for one in kept if one.numel() == numbers.numel())


@pytest.mark.parametrize("scheme", SOME)
def test_numbers_are_made_where_the_codes_lie(matrix: Quantised) -> None:
    packed = PackedTensor.of(matrix)
    with pretended_gpus(1):
        there = {ending: part.to("cuda") for ending, part in packed.parts.items()}
        numbers = matrix.scheme.values(there, matrix.shape)
        assert numbers.device.type == "cuda"
        assert torch.equal(numbers.cpu(), packed.numbers())


@pytest.mark.parametrize("scheme", ["awq"])
def test_products_in_fewer_bits_keep_no_numbers_either(matrix: Quantised) -> None:
    x, layers = (
        torch.randn(4, matrix.shape[1]),
        (linear_of(matrix.whole()), linear_of(PackedTensor.of(matrix))),
    )
    with torch.autocast("cpu", torch.bfloat16):
        (expected, _), (found, kept) = (run(layer, x) for layer in layers)
    assert found[0].dtype == torch.bfloat16
    assert all(map(torch.equal, found, expected))
    assert [type(one) for one in kept if one.numel() == matrix.whole().numel()] == [PackedTensor]


@pytest.mark.parametrize("scheme", ["awq"])
def test_anything_else_is_done_with_the_numbers(matrix: Quantised) -> None:
    numbers, packed = matrix.whole(), PackedTensor.of(matrix)
    assert sum(part.nbytes for part in packed.parts.values()) < numbers.nbytes / 2
    assert torch.equal(packed.numbers(), numbers)
    assert torch.equal(packed[3:5].T @ packed[3:5], numbers[3:5].T @ numbers[3:5])
    assert torch.equal(packed.t().contiguous(), numbers.T)
    assert torch.equal(torch.cat([packed, numbers]), torch.cat([numbers, numbers]))
    holder: Any = nn.Module()
    holder.map = linear_of(packed)
    store = ModuleStore(holder)
    assert store.shape("map.weight") == matrix.shape
    assert type(store.tensor("map.weight")) is Tensor
    with pytest.raises(TypeError, match="stays as it is stored"):
        packed.mul_(2)
