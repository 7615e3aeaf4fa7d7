"""`surgeon.load`: every form of checkpoint, dtypes, and what is said about damaged ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import surgeon
from surgeon.model import program_of
from tests.checkpoint.helpers import logits_of, run_export, save_source

GLOBAL = {"allow_global_per_layer_attribute_access": True}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("load") / "source"
    save_source(folder, num_layers=4)
    return folder


@pytest.fixture
def broken(source: Path, tmp_path: Path) -> Any:
    """A factory of copies with other entries in config.json."""

    def change(**entries: Any) -> Path:
        for path in source.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        config = json.loads((tmp_path / "config.json").read_text()) | entries
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return change


def test_16_bit_weights_are_computed_in_float32_on_a_cpu(tmp_path: Path) -> None:
    save_source(tmp_path, dtype=torch.bfloat16)
    assert surgeon.load(tmp_path).dtype == torch.float32
    assert surgeon.load(tmp_path, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_the_program_of_a_program_checkpoint_is_run(source: Path, tmp_path: Path) -> None:
    run_export(source, tmp_path / "target", "A0 F0 >A2 >F2")
    model = surgeon.load(tmp_path / "target")
    assert str(program_of(model)) == "A0 F0 >A1 >F1"
    assert torch.equal(logits_of(model), logits_of(surgeon.edit(surgeon.load(source), "A0 F0 >A2 >F2")))


def test_a_fused_checkpoint_can_be_edited_further(source: Path, tmp_path: Path) -> None:
    run_export(source, tmp_path / "target", "A0 F0 [A1 A2] [F1 F2] A3 F3")
    model = surgeon.edit(surgeon.load(tmp_path / "target"), "A0 F0 >A1 >F1")
    expected = surgeon.edit(surgeon.load(source), "A0 F0 >[A1 A2] >[F1 F2]")
    torch.testing.assert_close(logits_of(model), logits_of(expected), rtol=1e-4, atol=1e-5)
    whole = logits_of(surgeon.load(tmp_path / "target"))
    sliced = surgeon.edit(model, "A0 F0 [A1/2:1 A1/2:0] [F1/4:3 F1/4:0 F1/4:1 F1/4:2] A2 F2")
    torch.testing.assert_close(logits_of(sliced), whole, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="A0~A1 cannot be averaged: its layers differ in width"):
        surgeon.edit(model, "A0~A1 F0")


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"model_type": "bloom"}, "'bloom' is not supported"),
        ({"model_type": None}, "'None' is not supported"),
        ({"model_type": ["llama"]}, "is not supported"),
        ({"hidden_size": "wide"}, "config.json is not a valid configuration: .*hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1, not 0"),
        ({"num_key_value_heads": -2}, "kv_heads must be at least 1, not -2"),
        ({"head_dim": -1}, "head_dim must be at least 1, not -1"),
        ({"hidden_act": "telepathy"}, "describes no model that can be built"),
        ({"layer_types": 3}, "config.json is not a valid configuration"),
        ({"vocab_size": 50}, r"tensor lm_head.weight has the shape \(97, 32\), but config.json asks for \(50, 32\)"),
        ({"num_hidden_layers": 6}, "lacks a tensor of its model: model.layers.4.input_layernorm.weight and 17 more"),
        ({"attention_bias": True}, "lacks a tensor of its model: model.layers.0.self_attn.k_proj.bias and 15 more"),
        ({"per_layer_config": {"1": {"num_attention_heads": 8}}}, "only the fused form has .*, not llama"),
        (
            {"model_type": "surgeon_fused", "per_layer_config": {}},
            "needs allow_global_per_layer_attribute_access: true",
        ),
        ({"model_type": "surgeon_fused", "layer_types": ["full_attention"]}, "describes no model that can be built"),
        ({"model_type": "surgeon_fused", "norm": "batch"}, "describes no model that can be built"),
        (GLOBAL | {"model_type": "surgeon_fused", "per_layer_config": {"1": {"num_key_value_heads": -2}}}, "not -2"),
        ({"surgeon_program": "A9 F9"}, "A9 is out of range"),
        ({"surgeon_program": "what?"}, "config.json has a surgeon_program that is none: cannot read 'what"),
        ({"surgeon_program": 5}, "config.json has surgeon_program: 5, which is no program; write it as a text"),
        ({"surgeon_program": None}, "config.json has surgeon_program: None, which is no program"),
        ({"surgeon_program": ["A0"]}, r"config.json has surgeon_program: \['A0'\], which is no program"),
        ({"surgeon_program": " "}, "config.json has surgeon_program: ' ', which is no program"),
        ({"surgeon_program": "{" * 5000}, "forks lie more than 50 deep in each other"),
    ],
)
def test_what_does_not_fit_is_said(broken: Any, entries: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        surgeon.load(broken(**entries))
