"""Fused checkpoints taken apart: the same numbers from a stock model of pairs, which can be fused again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import surgeon
from surgeon.checkpoint.forms.fused import ORIGINAL_KEY
from surgeon.exports.unfuse import unfuse
from surgeon.models.edit import program_of, restore
from surgeon.models.families import FAMILIES
from tests.checkpoint.helpers import BIASES, logits_of, relative_error, run_export, save_source
from tests.checkpoint.test_fuse_families import (
    FUSABLE,
    IN_ONE_STEP,
    LLAMA3,
    LONGROPE,
    ONE_KV_HEAD,
    PAIR_AND_TRIPLET,
    WINDOWS,
)
from tests.selection import case

# What has no place for the shift of a norm that was folded.
BIASES_LACK = ("gpt_neo", "stablelm", "gptj")
CASES: list[tuple[str, dict[str, Any], str]] = [
    *(
        (
            family,
            WINDOWS.get(family, {}),
            PAIR_AND_TRIPLET if FAMILIES[family].steps_per_layer == 2 else IN_ONE_STEP,
        )
        for family in FUSABLE
        if family not in BIASES_LACK
    ),
    ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}, PAIR_AND_TRIPLET),
    # Whose layers are as they were.
    *((family, {}, "A1 F1 A0 F0") for family in ("gpt_neo", "stablelm")),
    ("gptj", {}, "[A1 F1] [A0 F0]"),
    ("falcon", ONE_KV_HEAD | {"parallel_attn": False}, PAIR_AND_TRIPLET),
    ("llama", BIASES | {"head_dim": 16, "rope_parameters": LLAMA3}, "[A0 A1] [F0 F1 F2] [A3 A2 A4] F3"),
    ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}, "[A0 A1] [F1 F0]"),
    ("qwen3", {"attention_bias": True}, "[A0~A1 A2 A3] [F2 F0~F3]"),
    ("opt", {"enable_bias": False, "tie_word_embeddings": False}, "[A0 A1] [F0 F1]"),
    ("gpt2", {"n_inner": None, "scale_attn_weights": False}, "[A0 A1] [F2 F3]"),
]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("family", "overrides", "program"),
    [case(*each, default=at % 3 == 0) for at, each in enumerate(CASES)],
)
def test_it_computes_the_same_and_is_fused_again(
    family: str, overrides: dict[str, Any], program: str, tmp_path: Path
) -> None:
    save_source(tmp_path / "source", family, 6, **overrides)
    run_export(tmp_path / "source", tmp_path / "fused", program, form="fused")
    expected = logits_of(surgeon.load(tmp_path / "fused"))
    model = unfuse(tmp_path / "fused")
    assert not model.training
    assert model.config.model_type == family
    assert relative_error(logits_of(model), expected) < 1e-5
    surgeon.export(model, tmp_path / "again", form="fused")
    assert relative_error(logits_of(surgeon.load(tmp_path / "again")), expected) < 1e-5
    # Dropout, which shows in training alone, is the original's too.
    before, after = (
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("fused", "again")
    )
    changed = {key for key in before | after if before.get(key) != after.get(key)}
    # Of which biases are on.
    assert changed <= {"o_bias", "up_bias", "down_bias", "logit_scale", ORIGINAL_KEY}
    assert before["logit_scale"] == pytest.approx(after["logit_scale"])


def test_pairs_have_layers_of_their_own(tmp_path: Path) -> None:
    """Neither layer of a pair is what it was, and all are trained alone: a norm each, heads that do not mix."""
    source = save_source(tmp_path / "source", "qwen3", 4)
    run_export(tmp_path / "source", tmp_path / "fused", "A3 F3 [A1 A0] [F0 F1]", form="fused")
    model = unfuse(tmp_path / "fused")
    assert str(program_of(model)) == "A0 F0 [A1 A2] [F1 F2]"
    layers = restore(model).model.layers
    for layer, of in ((layers[1], 1), (layers[2], 0)):
        original = source.model.layers[of]
        gain = original.input_layernorm.weight
        torch.testing.assert_close(
            layer.self_attn.q_proj.weight, original.self_attn.q_proj.weight * gain
        )
        assert torch.equal(layer.self_attn.o_proj.weight, original.self_attn.o_proj.weight)
        assert torch.equal(layer.self_attn.k_norm.weight, original.self_attn.k_norm.weight)
        assert torch.equal(layer.input_layernorm.weight, torch.ones(32))
    assert torch.equal(layers[2].mlp.down_proj.weight, source.model.layers[1].mlp.down_proj.weight)
    assert torch.equal(layers[0].input_layernorm.weight, source.model.layers[3].input_layernorm.weight)


def test_what_lies_beside_the_weights_is_found_again(tmp_path: Path) -> None:
    save_source(tmp_path / "source", "llama", 2)
    (tmp_path / "source" / "LICENSE").write_text("Be kind.\n")
    (tmp_path / "source" / "generation_config.json").write_text('{"max_new_tokens": 7}')
    run_export(tmp_path / "source", tmp_path / "fused", "[A0 A1] [F0 F1]", dtype="bfloat16")
    model = unfuse(tmp_path / "fused")
    assert model.dtype == torch.float32  # as everything of 16 bits on a CPU
    surgeon.export(model, tmp_path / "again", dtype="bfloat16")
    assert (tmp_path / "again" / "LICENSE").exists()
    assert json.loads((tmp_path / "again" / "generation_config.json").read_text())["max_new_tokens"] == 7


@pytest.mark.parametrize(
    ("family", "program", "said"),
    [
        (
            "llama",
            "[A0/2:0 A1] [F0 F1]",
            "layer 0 has 6 heads and 3 KV heads, which are slices of layers",
        ),
        ("llama", "[A0/2:0 A1/2:1] [F0/2:0 F1/2:0]", "where that has .A0/2:0 A1/2:1., it has A0"),
        ("qwen3", "[A0/2:0 A1/2:0] F0", "layer 0 has slices of attentions"),
        (
            "gpt_neo",
            "[A0 A2] [F0 F2]",
            r"GPT-Neo has no transformer.h.0.attn.attention.q_proj.bias, which the shift",
        ),
    ],
)
def test_what_cannot_be_taken_apart_is_refused(
    family: str, program: str, said: str, tmp_path: Path
) -> None:
    save_source(tmp_path / "source", family, 3)
    run_export(tmp_path / "source", tmp_path / "fused", program, form="fused")
    with pytest.raises(
        ValueError, match=f"cannot be taken apart .*{said}.*; use the recipe and the original"
    ):
        unfuse(tmp_path / "fused")


def test_only_fused_checkpoints_are_taken_apart(tmp_path: Path) -> None:
    save_source(tmp_path / "source", "llama", 2)
    with pytest.raises(ValueError, match="is not in the fused form; surgeon.load opens it"):
        unfuse(tmp_path / "source")
    run_export(tmp_path / "source", tmp_path / "fused", "[A0 A1] [F0 F1]")
    config = json.loads((tmp_path / "fused" / "config.json").read_text())
    (tmp_path / "fused" / "config.json").write_text(json.dumps(config | {"embedding_scale": 2.0}))
    with pytest.raises(
        ValueError, match=r"Llama would have embedding_scale: 1.0 in the fused form, and .* has 2.0"
    ):
        unfuse(tmp_path / "fused")
    config.pop(ORIGINAL_KEY)  # as 0.2.0 wrote it
    (tmp_path / "fused" / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match=f"its config.json has no {ORIGINAL_KEY}.*; use the recipe and the original"
    ):
        unfuse(tmp_path / "fused")
