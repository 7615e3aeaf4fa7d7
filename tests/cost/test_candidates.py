"""What is named to be predicted: configurations without weights, recipes, programs, variants."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from surgeon.checkpoint.config import read_config_only
from surgeon.cost.candidates import apart, open_candidates
from surgeon.cost.deployment import plan_on_paper
from surgeon.language.program import Program
from surgeon.models.shapes import ModelShapes
from tests.cost.examples import SIZES, shapes


def folder(path: Path, **entries: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES, **entries}))
    return path


def test_a_folder_and_its_configuration_are_the_same_model(tmp_path: Path) -> None:
    small = folder(tmp_path / "llama")
    for what in (small, small / "config.json"):
        (one,) = open_candidates(str(what), [])
        assert one.name == "llama"
        assert one.model.shapes == shapes()
        assert one.program(8) == Program.dense(4)


def test_programs_recipes_and_variants_beside_it(tmp_path: Path) -> None:
    small = folder(tmp_path / "small")
    recipe = tmp_path / "late.yaml"
    recipe.write_text(f'surgeon: 1\nmodel: {small}\noperations:\n  - ladder: {{layers: "0:4"}}\n')
    compared = [str(recipe), "A0 F0", "lp", "tracks:1", "upper-bound", "dense", str(small), "halves"]
    found = open_candidates(str(small), compared, program="A1 F1", layers=range(4))
    assert [one.name for one in found] == [
        *("small", "late", "A0 F0", "lp", "tracks:1", "upper-bound", "dense", "small (2)", "halves")
    ]
    programs = [str(one.program(2)) for one in found]
    assert programs[0] == programs[5] == "A1 F1"
    assert programs[1].count(">") == 8
    assert programs[2] == "A0 F0"
    assert programs[3] == "[A0 A1] [F0 F1] [A2 A3] [F2 F3]"
    assert programs[4].startswith("{A0/2:0 F0/2:0 | A0/2:1 F0/2:1}")
    assert [one.connected for one in found] == 5 * [True] + [False] + 3 * [True]
    assert [one.halves for one in found] == 8 * ["off"] + ["on"]
    assert programs[8] == "A1 F1"
    assert programs[6] == programs[7] == str(Program.dense(4))


def test_a_program_may_be_longer_than_a_files_name(tmp_path: Path) -> None:
    deep = folder(tmp_path / "deep", num_hidden_layers=60)
    text = f"{Program.dense(58)} [A58 A59] [F58 F59]"
    assert len(text) > 400
    found = open_candidates(str(deep), [text], program=text)
    assert [str(one.program(1)) for one in found] == [text, text]


def test_a_program_of_nothing_is_not_the_models_own(tmp_path: Path) -> None:
    for text in ("", " "):
        (one,) = open_candidates(str(folder(tmp_path / "small")), [], program=text)
        with pytest.raises(ValueError, match="the program is empty: it has no steps"):
            plan_on_paper(one.model.shapes, one.program(1), 1, 8, "float32", "gather", "full")


def test_a_program_that_a_checkpoint_has(tmp_path: Path) -> None:
    edited = folder(tmp_path / "edited", model_type="surgeon_llama", surgeon_program="A0 F0 >A1 >F1")
    config, program = read_config_only(edited)
    assert program == Program.parse("A0 F0 >A1 >F1")
    assert ModelShapes.of("llama", config) == shapes()
    (one,) = open_candidates(str(edited), [])
    assert one.program(1) == program


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "gpt_neox", "opt", "phi3", "qwen3"])
def test_configurations_that_are_saved_are_read(
    family: str, tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    config = tiny_model(family).config
    config.save_pretrained(tmp_path)
    assert ModelShapes.of("x", read_config_only(tmp_path)[0]) == ModelShapes.of("x", config)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"model_type": "bert"}, "architecture 'bert' is not supported"),
        (
            {"model_type": "surgeon_fused"},
            "in the fused form, and there is no surgeon.json beside it; give the recipe",
        ),
        (
            {"surgeon_program": 3, "model_type": "surgeon_llama"},
            "surgeon_program: 3, which is no program",
        ),
        (
            {"surgeon_program": "A0 Q", "model_type": "surgeon_llama"},
            "surgeon_program that is none: cannot read 'Q'",
        ),
        ({"hidden_size": "wide"}, "config.json is not a valid configuration"),
        ({"num_hidden_layers": 0}, "layers must be at least 1, not 0"),
        ({"num_key_value_heads": 3}, "8 heads do not divide among 3 KV heads"),
    ],
)
def test_configurations_that_are_none(entries: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        open_candidates(str(folder(tmp_path / "bad", **entries)), [])


def test_an_export_in_the_fused_form_is_what_it_was_made_of(tmp_path: Path) -> None:
    small, fused = folder(tmp_path / "small"), folder(tmp_path / "fused", model_type="surgeon_fused")
    (fused / "surgeon.json").write_text(
        json.dumps({"source": {"model": str(small)}, "program": "[A0 A1] [F0 F1]"})
    )
    (one,) = open_candidates(str(fused), [])
    assert one.program(2) == Program.parse("[A0 A1] [F0 F1]")
    assert one.model.shapes == replace(shapes(), name="fused")
    (fused / "surgeon.json").write_text(json.dumps({"source": {"model": "./gone"}, "program": "A0 F0"}))
    with pytest.raises(
        ValueError, match=r"made of ./gone: there is no model folder ./gone; .*; give the recipe"
    ):
        open_candidates(str(fused), [])


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="has no config.json"):
        open_candidates(str(tmp_path), [])
    (tmp_path / "model.bin").touch()
    with pytest.raises(
        FileNotFoundError, match=r"model.bin is no config.json; give one, a folder with one"
    ):
        open_candidates(str(tmp_path / "model.bin"), [])


def test_names_stay_apart_and_short() -> None:
    assert apart(["a", "b", "a", "a"]) == ["a", "b", "a (2)", "a (3)"]
    assert apart(["x" * 18, "x" * 18])[1] == "x" * 14 + " (2)"
