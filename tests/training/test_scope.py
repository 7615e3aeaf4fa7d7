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


def test_adapters_everywhere_leave_the_head_alone() -> None:
    adapted = add_adapters(edit(tiny_model("llama", 2), "A0 F0 >A1 >F1"), "all", Program.parse("A0 F0 >A1 >F1"), 2)
    assert not any("lm_head" in name for name in trained_names(adapted))
    assert len(trained_names(adapted)) == 2 * 2 * 7


def test_what_was_edited_before_it_was_stored() -> None:
    """A pruned checkpoint runs all its layers, in numbers of its own; its recipe says where the gap was."""
    model = edit(tiny_model("llama", 3), Program.dense(3))
    choose_parameters(model, "edited", Program.parse("A0 F0 A2 F2 A3 F3"))
    assert {name.split(".")[2] for name in trained_names(model)} == {"0", "1"}
