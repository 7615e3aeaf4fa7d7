"""Orders of layers, and halves of them that read late, against plain PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from surgeon.language.operations import ladder
from surgeon.language.program import Program
from surgeon.language.recipe import parse_recipe
from surgeon.models.edit import edit, program_of, recipe_program
from tests.checkpoint.helpers import IDS, logits_of, relative_error, run_export, save_source
from tests.reference import Reference
from tests.tiny_models import tiny_model

RECIPE = 'surgeon: 1\nmodel: tiny\noperations:\n  - reorder: {layers: "1:4", order: [3, 1, 2]}\n'


def reordered(reference: Reference) -> Tensor:
    x = reference.embed(IDS)
    for k in (0, 3, 1, 2):
        x = reference.layer(k, x)
    return reference.logits(x)


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_layers_run_in_the_order_of_a_recipe(tmp_path: Path, family: str) -> None:
    """In memory, and in a checkpoint in plain form, which the stock class loads."""
    model = save_source(tmp_path / "source", family, 4)
    expected = reordered(Reference(model))
    program = recipe_program(parse_recipe(RECIPE), model.config)
    run_export(tmp_path / "source", tmp_path / "target", str(program), form="plain")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "target").eval()
    assert type(stock) is type(model)
    assert relative_error(logits_of(stock), expected) < 1e-5
    assert relative_error(logits_of(edit(model, program)), expected) < 1e-5


@pytest.mark.parametrize("half", ["attention", "mlp"])
def test_one_half_of_layers_is_late(half: str) -> None:
    """x_{i+1} = x_i + h_{i+1}(x_{i-1}) in that half, h_{i+1}(x_i) else (Ladder Residual, equation 2)."""
    model = tiny_model("llama", 4, attention_bias=True, mlp_bias=True)
    reference = Reference(model)
    previous = x = reference.embed(IDS)
    for k in range(4):
        for kind, step in (("attention", reference.attention), ("mlp", reference.feed_forward)):
            late = kind == half and k in (1, 2)
            previous, x = x, x + step(k, previous if late else x)
    program: Program = ladder(program_of(model), range(1, 3), sublayers=half)
    with torch.no_grad():
        found = edit(model, program)(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(found, reference.logits(x), rtol=2e-5, atol=2e-5)
