"""Experts one by one: where modules and folders have them, with factors, and in slices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from surgeon.checkpoint.stored import Checkpoint
from surgeon.language.program import Program
from surgeon.language.sublayer import Sublayer
from surgeon.models.edit import edit, restore
from surgeon.models.families import family_of
from surgeon.models.weights import ModelWeights, ModuleStore
from tests.reference import Reference
from tests.tiny_models import tiny_model

MIXTURES = ["qwen3_moe", "mixtral"]
IDS = torch.randint(3, 90, (2, 7), generator=torch.Generator().manual_seed(0))


def weights_of(model: torch.nn.Module) -> ModelWeights:
    family = family_of(model.config)
    return ModelWeights(ModuleStore(model), family, family.head_dim(model.config))


@pytest.mark.parametrize("family", MIXTURES)
def test_a_folder_has_the_same_experts_as_the_model(family: str, tmp_path: Path) -> None:
    """Files have them one by one, and Mixtral's by other names."""
    model = tiny_model(family, 2)
    model.save_pretrained(tmp_path)
    names = list(Checkpoint(tmp_path).names())
    assert any(".experts.3." in name for name in names)
    assert not any("gate_up" in name for name in names)
    module = weights_of(model)
    folder = ModelWeights(Checkpoint(tmp_path), module.family, module.head_dim)
    for text in ("F1", "F1!e1,e3", "F1/2:1", "F0!e2/2:0", "A1"):
        (sublayer,) = Program.parse(text).sublayers()
        expected, found = module.sublayer(sublayer), folder.sublayer(sublayer)
        assert expected.keys() == found.keys()
        for role, tensor in expected.items():
            assert torch.equal(tensor, found[role]), (text, role)
    assert folder.stored_experts(0) == 4


def test_slices_of_experts_are_slices_of_each() -> None:
    weights = weights_of(tiny_model("mixtral", 1))
    whole, half = (weights.sublayer(Sublayer("F", (0,), piece=piece)) for piece in (None, (1, 2)))
    assert torch.equal(half["router.weight"], whole["router.weight"])
    assert torch.equal(half["up.weight"], whole["up.weight"][:, 24:])
    assert torch.equal(half["down.weight"], whole["down.weight"][:, :, 24:])


def truncated(matrix: Tensor, rank: int) -> Tensor:
    left, values, right = torch.linalg.svd(matrix.double())
    return (left[:, :rank] * values[:rank] @ right[:rank]).float()


@pytest.mark.parametrize("family", MIXTURES)
def test_each_expert_has_two_factors_of_its_own(family: str) -> None:
    model = tiny_model(family, 2)
    plain, path = Reference(model), "model.layers.1.mlp.experts"
    gate, up = plain.w[f"{path}.gate_up_proj"].chunk(2, 1)
    for expert in range(4):
        gate[expert] = truncated(gate[expert], 3)
        plain.w[f"{path}.down_proj"][expert] = truncated(plain.w[f"{path}.down_proj"][expert], 5)
    plain.w[f"{path}.gate_up_proj"] = torch.cat([gate, up], 1)
    plain = plain.experts(1, (0, 2, 3))
    x = plain.embed(IDS)
    for k in range(2):
        x = plain.layer(k, x)
    text = "A0 F0 A1 [F1!e0,e2,e3/2:0@gate3,down5 F1!e0,e2,e3/2:1@gate3,down5]"
    with torch.no_grad():
        found = edit(model, text)(IDS).logits
    torch.testing.assert_close(found, plain.logits(x), rtol=2e-5, atol=2e-5)
    factors = weights_of(restore(model)).sublayer(
        Sublayer("F", (1,), experts=(0, 2), ranks=(("gate", 3),))
    )
    width = factors["up.weight"].shape[1]
    assert factors["gate.first.weight"].shape == (2, 3, 32)
    assert factors["gate.second.weight"].shape == (2, width, 3)


def test_one_matrix_is_asked_for_by_its_expert() -> None:
    weights = weights_of(tiny_model("mixtral", 1))
    with pytest.raises(
        ValueError, match=r"F0 has one up for each of its experts; name one of them \(F4!e0\)"
    ):
        weights.matrix(Sublayer("F", (0,)), "up")
    one = weights.matrix(Sublayer("F", (0,), experts=(2,)), "up")
    assert one.shape == (48, 32)
    assert torch.equal(one.rows(3, 9), one.whole()[3:9])


def test_derived_experts_train_with_their_router() -> None:
    model = edit(tiny_model("qwen3_moe", 2), "A0 F0!e1,e3@down4 A1 F1")
    model(IDS).logits.square().mean().backward()
    layers = model.model.layers
    derived = dict(layers.get_submodule("F0!e1,e3@down4").named_parameters())
    assert derived["mlp.experts.down.first.weight"].shape == (2, 4, 12)
    assert derived["mlp.gate.weight"].shape == (2, 32)
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in derived.values())
