"""Mixtures of experts as checkpoints: every form that holds a program exactly, and what no form does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import surgeon
from surgeon.checkpoint.forms import PROGRAM, lay_out
from surgeon.checkpoint.stored import Checkpoint
from surgeon.commands.app import main
from surgeon.exports.export import plan_export, write_export
from surgeon.exports.in_memory import edit
from surgeon.language.program import Program
from surgeon.models.edit import program_of, restore
from surgeon.models.families import family_of
from surgeon.opened import load, open_model
from tests.tiny_models import tiny_model

MIXTURES = ["qwen3_moe", "mixtral", "llama4_text"]
IDS = torch.randint(3, 90, (2, 7), generator=torch.Generator().manual_seed(0))
# Of four layers, of which layer 2 is dense but in Mixtral.
SAME = "A0 F0!e0,e3 A3 F3!e1,e2 A2 F2{} A1 F1!e0,e1"
PROGRAMS = [
    "A0 F0!e1 A1 F1!e0,e2,e3 A2 F2 A3 F3",
    "A0 F0@gate3,down5 [A1 A3] [F1!e0,e2@up4 F3]",
    "A0 F0 {A1/2:0 F1/2:0 | A1/2:1 F1/2:1} >A3 [F3!e2,e3/2:0@down5 F3!e2,e3/2:1@down5]",
]


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS).logits
    return found


def exported(model: Any, program: str, folder: Path, form: str = "auto") -> Path:
    restore(model).save_pretrained(folder / "source")
    write_export(
        plan_export(open_model(folder / "source"), Program.parse(program), form), folder / "out"
    )
    return folder / "out"


@pytest.mark.parametrize("family", MIXTURES)
def test_as_many_experts_in_every_layer_are_a_stock_model(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    program = SAME.format("!e0,e3" if family == "mixtral" else "")
    expected = logits(edit(model, program))
    out = exported(model, program, tmp_path)
    assert open_model(out).form.name == "plain"
    stock = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert stock.config.num_local_experts == 2
    assert set(Checkpoint(out).names()) <= set(Checkpoint(tmp_path / "source").names())
    for written in (stock.eval(), load(out)):
        torch.testing.assert_close(logits(written), expected, rtol=0, atol=1e-5)


def test_a_token_goes_to_no_more_experts_than_there_are(tmp_path: Path) -> None:
    model = tiny_model("mixtral", 2)
    expected = logits(edit(model, "A0 F0!e1 A1 F1!e3"))
    out = exported(model, "A0 F0!e1 A1 F1!e3", tmp_path)
    config = json.loads((out / "config.json").read_text())
    assert (config["num_local_experts"], config["num_experts_per_tok"]) == (1, 1)
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(out)), expected, rtol=0, atol=1e-5
    )


@pytest.mark.sampled
@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_everything_else_has_the_program_form(family: str, program: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    expected = logits(edit(model, program))
    out = exported(model, program, tmp_path)
    assert open_model(out).form.name == "program"
    again = load(out)
    # Experts count among those that are stored.
    assert "e3" not in str(program_of(again)).replace("gate3", "")
    shipped = PROGRAM.shipped.model_class(model.config.model_type, out)
    for written in (again, shipped.from_pretrained(out).eval()):
        torch.testing.assert_close(logits(written), expected, rtol=0, atol=2e-5)
    saved = shipped.from_pretrained(out)
    saved.save_pretrained(tmp_path / "saved")
    torch.testing.assert_close(
        logits(shipped.from_pretrained(tmp_path / "saved").eval()), expected, rtol=0, atol=2e-5
    )


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("program", PROGRAMS[:2])
def test_edited_models_in_memory_are_exported(family: str, program: str, tmp_path: Path) -> None:
    """Also where stock classes would balance as many experts in every layer; what asks for it stays in config.json."""
    model = edit(tiny_model(family, output_router_logits=True), program)
    expected = logits(model)
    surgeon.export(model, tmp_path / "out")
    shipped = PROGRAM.shipped.model_class(model.config.model_type, tmp_path / "out")
    for written in (load(tmp_path / "out"), shipped.from_pretrained(tmp_path / "out").eval()):
        torch.testing.assert_close(logits(written), expected, rtol=0, atol=2e-5)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["output_router_logits"]


def test_edited_models_in_memory_are_saved(tmp_path: Path) -> None:
    model = edit(tiny_model("qwen3_moe"), PROGRAMS[1])
    expected = logits(model)
    model.save_pretrained(tmp_path / "saved")
    torch.testing.assert_close(logits(load(tmp_path / "saved")), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("form", "program", "reason"),
    [
        (
            "fused",
            "A0 F0 [A1 A3] [F1 F3] A2 F2",
            "two mixtures are not one: each router weighs its own experts",
        ),
        ("plain", "A0 F0!e0 A1 F1 A2 F2 A3 F3", "its mixtures have from 1 to 4 experts"),
        ("plain", "A0 F0 A1 F2 A2 F1@down2 A3 F3", "has factors in place of matrices"),
    ],
)
def test_forms_that_cannot_hold_it_say_why(form: str, program: str, reason: str) -> None:
    config = tiny_model("qwen3_moe").config
    with pytest.raises(ValueError, match=reason):
        lay_out(Program.parse(program), family_of(config), config, form)


def test_dense_layers_stay_dense_wherever_they_go(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    program = "A1 F2 A0 F3 A2 F1"
    expected = logits(edit(model, program))
    out = exported(model, program, tmp_path)
    assert json.loads((out / "config.json").read_text())["mlp_only_layers"] == [0]
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(out)), expected, rtol=0, atol=1e-5
    )


def test_show_says_how_many_experts_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = exported(tiny_model("mixtral"), PROGRAMS[0], tmp_path)
    assert main(["show", str(out)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "4 experts of which a token goes to 2" in shown
    assert "layer 0: experts 1" in shown
