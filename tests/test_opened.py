"""What is evaluated: checkpoints in every form, recipes, programs."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import surgeon
from surgeon.commands.app import main
from surgeon.language.recipe import parse_recipe
from surgeon.opened import Model, choose_device, open_edited, open_model, provenance
from surgeon.version import FORMAT
from tests.stored import configure

PAIRED = "A0 F0 [A1 A2] [F1 F2] A3 F3"
IDS = torch.randint(3, 90, (1, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def recipe(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    path = tmp_path / "pairs.yaml"
    path.write_text(f"surgeon: 1\nmodel: {tiny_checkpoint}\noperations:\n  - pair: {{layers: '1:3'}}\n")
    return path


def logits(name: Path, program: str | None = None) -> torch.Tensor:
    found: torch.Tensor = open_edited(str(name), program).load("cpu")(input_ids=IDS).logits
    return found


def test_a_recipe_a_program_and_exports_are_the_same_model(
    recipe: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    expected = surgeon.edit(surgeon.load(tiny_checkpoint), PAIRED)(input_ids=IDS).logits
    assert torch.equal(logits(recipe), expected)
    assert torch.equal(logits(tiny_checkpoint, PAIRED), expected)
    assert not torch.allclose(logits(tiny_checkpoint), expected, atol=0.1)
    for form in ("fused", "program"):
        assert main(["export", str(recipe), "-o", str(tmp_path / form), "--form", form]) == 0
        torch.testing.assert_close(logits(tmp_path / form), expected, rtol=1e-3, atol=1e-3)
    assert torch.equal(logits(tmp_path / "program", "A0 F0"), logits(tiny_checkpoint, "A0 F0"))


def test_what_is_recorded(recipe: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    record = open_edited(str(recipe)).provenance(seed=3)
    assert (record["model"], record["model_hash"], record["program"]) == (
        str(tiny_checkpoint),
        surgeon.open(tiny_checkpoint).hash,
        PAIRED,
    )
    assert record["recipe"] == surgeon.read_recipe(recipe).to_yaml()
    assert main(["export", str(recipe), "-o", str(tmp_path / "program"), "--form", "program"]) == 0
    assert str(open_edited(str(tmp_path / "program")).program) == PAIRED
    assert str(open_edited(str(tiny_checkpoint)).program) == "A0 F0 A1 F1 A2 F2 A3 F3"


def test_answers_depend_on_model_program_and_tokenizer(tiny_checkpoint: Path) -> None:
    def identity(program: str | None = None) -> dict[str, Any]:
        return open_edited(str(tiny_checkpoint), program).identity("cpu")

    seen = [identity(program) for program in (None, PAIRED)]
    (tiny_checkpoint / "generation_config.json").write_text('{"repetition_penalty": 1.5}')
    seen.append(identity())
    for name, key in (("tokenizer_config.json", "eos_token"), ("config.json", "rms_norm_eps")):
        path = tiny_checkpoint / name
        settings = json.loads(path.read_text())
        path.write_text(json.dumps(settings | {key: "<s>" if key == "eos_token" else 0.5}))
        seen.append(identity())
    assert len({json.dumps(identity, sort_keys=True) for identity in seen}) == 5


def test_what_is_refused(recipe: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pairs.yaml is a recipe, which has a program of its own"):
        open_edited(str(recipe), PAIRED)
    with pytest.raises(ValueError, match="A9 is out of range: the model's layers are 0 to 3"):
        open_edited(str(tiny_checkpoint), "A9 F0")
    with pytest.raises(FileNotFoundError, match="there is no recipe"):
        open_edited(str(tmp_path / "none.yaml"))
    with pytest.raises(FileNotFoundError, match="there is no model folder"):
        open_edited(str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError, match="there is no model folder ''; a model on the hub"):
        open_edited("")
    text = recipe.read_text()
    recipe.write_text(f"{text}weights: sha256:{'0' * 64}\n")
    with pytest.raises(ValueError, match="pairs.yaml:5: weights: the recipe was made for sha256:0"):
        open_edited(str(recipe))
    recipe.write_text(text.replace("1:3", "1:9"))
    with pytest.raises(ValueError, match="pairs.yaml:4: pair"):
        open_edited(str(recipe))
    recipe.write_text(text)
    configure(tiny_checkpoint, model_type="surgeon_llama", surgeon_program="A0 >F0 A1 F1 A2 F2 A3 F3")
    with pytest.raises(
        ValueError, match="pairs.yaml: .* is an edited model, .* whole program .* layer 0 whole"
    ):
        open_edited(str(recipe))
    configure(tiny_checkpoint, model_type="surgeon_llama", surgeon_program="{A0 F0 A1 F1 A2 F2 | A3 F3}")
    assert str(open_edited(str(recipe)).asked) == "{A0 F0 [A1 A2] [F1 F2] | A3 F3}"
    for path in tiny_checkpoint.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ValueError, match=r"has no tokenizer that can be read \(it has no file of one\)"):
        open_edited(str(tiny_checkpoint))


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == choose_device("cpu") == "cpu"
    with pytest.raises(ValueError, match="no GPU that this PyTorch can use; use the device cpu"):
        choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (choose_device("auto"), choose_device("cpu")) == ("cuda", "cpu")
    with pytest.raises(ValueError, match="unknown device 'gpu'"):
        choose_device("gpu")


def test_a_model_without_its_weights(tiny_checkpoint: Path, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    config = tmp_path / "alone" / "config.json"
    config.write_bytes((tiny_checkpoint / "config.json").read_bytes())
    alone, whole = open_model(config, weights=False), surgeon.open(tiny_checkpoint)
    assert (alone.label, alone.program, alone.num_layers) == ("alone", whole.program, 4)
    assert alone.shapes == replace(whole.shapes, name="alone")
    assert str(alone.program_of(parse_recipe(recipe.read_text()))) == PAIRED
    assert repr(alone) == f"<surgeon.Model {config}: Llama, 4 layers, configuration only>"
    for asked in ("weights", "hash", "tokenizer", "checkpoint", "folder"):
        with pytest.raises(
            ValueError, match=r"config\.json was opened by its configuration alone, and this needs"
        ):
            getattr(alone, asked)
    described = Model.of_config(whole.config, "someone/small")
    assert (described.label, described.own, described.shapes.heads) == (
        "small",
        None,
        whole.shapes.heads,
    )


def test_a_record_says_what_was_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/some/where/bin/surgeon", "scan", "my model", "--seed", "3"])
    record = provenance("my model", "abc", seed=3, data="demo")
    assert record["format"] == FORMAT
    assert record["command"] == "surgeon scan 'my model' --seed 3"
    assert (record["model"], record["model_hash"], record["seed"], record["data"]) == (
        "my model",
        "abc",
        3,
        "demo",
    )
    assert record["versions"]["surgeon"] == surgeon.__version__
    assert {"torch", "transformers", "python"} <= set(record["versions"])
    assert "seed" not in provenance("m", "abc")
