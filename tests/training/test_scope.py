"""What is trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from surgeon.language.program import Program
from surgeon.models.edit import edit, program_of
from surgeon.training.scope import add_adapters, choose_parameters, edited_sublayers
from tests.tiny_models import tiny_model

DENSE = Program.dense(4)


@pytest.mark.parametrize(
    ("program", "edited"),
    [
        ("A0 F0 [A1 A2] [F1 F2] A3 F3", "A1 A2 F1 F2"),
        ("A0 F0 A1 F1 >A2 >F2 >A3 >F3", "A2 A3 F2 F3"),
        ("A0 F0 A1 F1 A3 F3", "A1 A3 F1 F3"),  # those around the gap
        ("A0 F0 A1 F1", "A1 F1"),
        ("A0 A1 F1 A2 F2 A3 F3", "A0 A1 F1"),
        ("A0 F0 A1~A2 F1~F2 A3 F3", "A1~A2 F1~F2"),
        ("A0 F0 A1 F1 A2 F2 A1 F1 A2 F2 A3 F3", "A1 A2 F1 F2"),
        ("A0 F0@up4 A1 F1 A2 F2 A3 F3", "F0@up4"),
        ("A0 F0 {A1/2:0 F1/2:0 | A1/2:1 F1/2:1} A2 F2 A3 F3", "A1/2:0 A1/2:1 F1/2:0 F1/2:1"),
        ("A0 F0 A1 F1 A2 F2 A3 F3", ""),
    ],
)
def test_what_an_edit_touches(program: str, edited: str) -> None:
    assert sorted(map(str, edited_sublayers(Program.parse(program), DENSE))) == edited.split()


def trained_names(model: Any) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gemma2"])
def test_parameters_in_scope(family: str) -> None:
    model = edit(tiny_model(family, 4), "A0 F0 [A1 A2] [F1 F2] A3 F3")
    every = {name for name, _ in model.named_parameters()}
    choose_parameters(model, "all", program_of(model))
    assert trained_names(model) == every
    choose_parameters(model, "edited", program_of(model))
    assert trained_names(model) == {name for name in every if ".1." in name or ".2." in name}
    choose_parameters(model, "norms", program_of(model))
    norms = {name for name in every if "norm" in name or "ln_" in name}
    assert trained_names(model) == norms
    assert norms


def test_nothing_is_edited_in_an_unedited_model() -> None:
    with pytest.raises(ValueError, match="no sublayer is edited; train all"):
        choose_parameters(edit(tiny_model("llama", 4), DENSE), "edited", DENSE)


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3"])
def test_adapters_lie_on_every_matrix_of_the_edit(family: str) -> None:
    model = edit(tiny_model(family, 4), "A0 F0 [A1 A2] [F1 F2] A3~A0@k3 F3")
    torch.manual_seed(0)
    adapted = add_adapters(model, "edited", program_of(model), 2)
    names = trained_names(adapted)
    assert names
    assert all(".lora_" in name for name in names)
    places = {name.partition(".lora_")[0].removeprefix("base_model.model.") for name in names}
    matrices = {
        name
        for name, module in model.named_modules()
        if hasattr(module, "base_layer") and not name.endswith("base_layer")
    }
    assert places == matrices
    assert {name.split(".")[2] for name in matrices} == {"1", "2", "A3~A0@k3"}


def test_norms_of_edited_sublayers() -> None:
    model = edit(tiny_model("llama", 4), "A0 F0 [A1 A2] [F1 F2] A3 F3")
    choose_parameters(model, "edited-norms", program_of(model))
    kinds = "input_layernorm", "post_attention_layernorm"
    assert trained_names(model) == {
        f"model.layers.{layer}.{kind}.weight" for layer in (1, 2) for kind in kinds
    }


def test_adapters_everywhere_leave_the_head_alone() -> None:
    adapted = add_adapters(
        edit(tiny_model("llama", 2), "A0 F0 >A1 >F1"), "all", Program.parse("A0 F0 >A1 >F1"), 2
    )
    assert not any("lm_head" in name for name in trained_names(adapted))
    assert len(trained_names(adapted)) == 2 * 2 * 7


def test_what_was_edited_before_it_was_stored() -> None:
    """A pruned checkpoint runs all its layers, in numbers of its own; its recipe says where the gap was."""
    model = edit(tiny_model("llama", 3), Program.dense(3))
    choose_parameters(model, "edited", Program.parse("A0 F0 A2 F2 A3 F3"))
    assert {name.split(".")[2] for name in trained_names(model)} == {"0", "1"}


KEPT = "A0 F0!e0,e3 [A1 A2] [F1 F2] A3 F3"


def test_routers_alone_or_left_as_they_are() -> None:
    model = edit(tiny_model("qwen3_moe", 4), KEPT)  # layer 2 is dense
    every = {name for name, _ in model.named_parameters()}
    routers = {
        name for name in every if ".mlp.gate." in name and ".2." not in name and ".0.mlp" not in name
    }
    assert {name.split(".")[2] for name in routers} == {"F0!e0,e3", "1", "3"}
    choose_parameters(model, "routers", program_of(model))
    assert trained_names(model) == routers
    choose_parameters(model, "all", program_of(model), "frozen")
    assert trained_names(model) == {
        name for name in every if name not in routers and ".0.mlp.gate" not in name
    } | {
        "model.layers.0.mlp.gate.weight"  # which the program does not run
    }
    choose_parameters(model, "edited", program_of(model), "frozen")
    edited = {
        name for name in every if any(f"layers.{place}." in name for place in ("F0!e0,e3", "1", "2"))
    }
    assert trained_names(model) == edited - routers
    with pytest.raises(ValueError, match="no routers to train: the program has no mixture"):
        choose_parameters(edit(tiny_model("llama", 2), Program.dense(2)), "routers", Program.dense(2))


@pytest.mark.parametrize("router", ["trained", "frozen"])
@pytest.mark.parametrize("program", [KEPT, "A0 F0@gate4,down6 A1 F1 A2 F2 A3 F3"])
def test_each_expert_has_an_adapter(program: str, router: str) -> None:
    model = edit(tiny_model("qwen3_moe", 4), program).eval()
    derived = program.split()[1]
    adapted = add_adapters(model, "edited", program_of(model), 2, router)
    names = trained_names(adapted)
    assert all(".lora_" in name for name in names)
    assert any("mlp.gate" in name for name in names if derived in name) == (router == "trained")
    torch.manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if ".lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    ids = torch.arange(3, 20)[None]
    places = {
        name.partition(".lora_")[0].removeprefix("base_model.model.model.layers.") for name in names
    }
    assert {place.partition(".")[0] for place in places} == (
        {"F0!e0,e3", "1", "2"} if "!" in program else {derived}
    )
    experts = [
        one
        for path, one in model.named_modules()
        if derived in path and hasattr(one, "get_delta_weight")
    ]
    for wrapper in experts:
        if getattr(wrapper, "num_experts", 1) > 1 and wrapper.parameter_name != "weight":
            delta, count = wrapper.get_delta_weight("default"), wrapper.num_experts
            assert count == (2 if "!" in derived else 4)
            assert all(torch.linalg.matrix_rank(each) == 2 for each in delta)
    with torch.no_grad():
        before = adapted(input_ids=ids, use_cache=False).logits
        after = adapted.merge_and_unload()(input_ids=ids, use_cache=False).logits
    assert torch.allclose(before, after, atol=1e-5)
