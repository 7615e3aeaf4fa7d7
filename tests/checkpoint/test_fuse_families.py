"""The fused form of every architecture: exact with disturbed norms and biases, and never loaded as something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import surgeon
from surgeon.checkpoint.config import open_stored
from surgeon.checkpoint.forms import form_of
from surgeon.checkpoint.forms.program import needs_plugin
from surgeon.language.program import Program
from surgeon.models.families import family_of
from tests.checkpoint.helpers import (
    BIASES,
    IDS,
    WITH_PADDING,
    load_shipped,
    logits_of,
    plain_logits,
    relative_error,
    run_export,
    save_source,
    weights_of,
)
from tests.selection import NORMED_BEHIND, one_in
from tests.tiny_models import DENSE_FAMILIES

FUSABLE = sorted(set(DENSE_FAMILIES) - set(NORMED_BEHIND))
PAIR_AND_TRIPLET = "A0 F0 [A1 A2] [F1 F2] [A3 A4 A5] [F5 F3 F4]"
IN_ONE_STEP = "[A0 F0] [A1 A2 F1 F2] [A3 F5 A4 F3 A5 F4]"
# Attention windows in the layers of the pair only.
WINDOWS: dict[str, dict[str, Any]] = {
    "qwen2": {"layer_types": ["full_attention", *["sliding_attention"] * 2, *["full_attention"] * 3]},
    "cohere2": {"layer_types": ["full_attention", *["sliding_attention"] * 2, *["full_attention"] * 3]},
    "ministral": {
        "layer_types": ["full_attention", *["sliding_attention"] * 2, *["full_attention"] * 3]
    },
    "gpt_neo": {"attention_types": [[["global"], 1], [["local"], 2], [["global"], 3]]},
    "smollm3": {"no_rope_layers": [1, 0, 0, 1, 1, 1]},  # and so no rotary positions there either
}
ONE_KV_HEAD = {"new_decoder_architecture": False, "bias": False}  # of Falcon 7B
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
LONGROPE |= {"short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]}


@pytest.mark.sampled
@pytest.mark.parametrize("family", one_in(2, FUSABLE))
def test_a_pair_and_a_triplet_compute_what_the_layers_do(tmp_path: Path, family: str) -> None:
    model = save_source(tmp_path / "source", family, 6, **WITH_PADDING | WINDOWS.get(family, {}))
    program = IN_ONE_STEP if family_of(model.config).steps_per_layer == 1 else PAIR_AND_TRIPLET
    proof = run_export(tmp_path / "source", tmp_path / "target", program, form="fused")
    assert proof.exact < 1e-5
    expected = plain_logits(model, program)
    written = load_shipped(tmp_path / "target")
    assert relative_error(logits_of(written), expected) < 1e-5
    assert relative_error(logits_of(surgeon.load(tmp_path / "target")), expected) < 1e-5
    body = type(written.model).from_pretrained(tmp_path / "target")
    assert torch.equal(body.eval()(IDS).last_hidden_state, written.model(IDS).last_hidden_state)

    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    cached = written.generate(IDS, attention_mask=torch.ones_like(IDS), **options)
    assert torch.equal(
        cached, written.generate(IDS, attention_mask=torch.ones_like(IDS), use_cache=False, **options)
    )
    padded = torch.cat([torch.zeros(2, 4, dtype=torch.long), IDS], dim=1)
    mask = (torch.arange(13) >= 4).long().expand(2, 13)
    assert torch.equal(written.generate(padded, attention_mask=mask, **options)[:, 4:], cached)
    if family == "opt":  # it counts the tokens of the mask where no positions are given
        assert relative_error(logits_of(written, padded, attention_mask=mask)[:, 4:], expected) < 1e-5

    written.save_pretrained(tmp_path / "again")
    assert torch.equal(
        logits_of(surgeon.load(tmp_path / "again")), logits_of(surgeon.load(tmp_path / "target"))
    )
    written.train()(input_ids=IDS, labels=IDS).loss.backward()
    assert all(parameter.grad is not None for parameter in written.parameters())


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("family", "overrides", "program"),
    [
        ("llama", BIASES | {"head_dim": 16}, "[A0 A1] [F0 F1 F2 F3]"),
        ("llama", {"rope_parameters": LLAMA3}, "[A0 A1] [F0 F1]"),
        ("llama", {"rope_parameters": YARN, "tie_word_embeddings": True}, "[A0 A1] [F0 F1]"),
        (
            "phi3",
            {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64},
            "[A0 A1] [F1/3:0 F0]",
        ),
        # Groups of heads take turns 1 : 2, and 2 : 2 : 2; slices and merged layers among them.
        ("qwen3", {}, "[A0/2:1 A1] [F0 F1/4:3] A3 F3"),
        ("qwen3", {"attention_bias": True}, "[A0~A1 A2 A3] [F2 F0~F3]"),
        (
            "opt",
            {"enable_bias": False, "tie_word_embeddings": False},
            "[A0/2:0 A0/2:1] [F0/2:1 F1 F0/2:0]",
        ),
        ("gpt2", {"n_inner": None, "scale_attn_weights": False}, "[A0 A1/4:2] [F2 F3]"),
        (
            "gpt_neox",
            {"use_parallel_residual": False, "attention_bias": False},
            "[A0 A1] [F2 F3] A1/2:1 F0/2:0",
        ),
        ("phi", {"tie_word_embeddings": True}, "[A0 A1 F0/2:1 F1]"),
        ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": False}, "[A0 F0] [A1 A2 F1 F2]"),
        ("gptj", {"hidden_size": 176, "rotary_dim": 30}, "[A0 F0 A1 F1]"),  # 30 / 44 * 44 is below 30
        ("falcon", ONE_KV_HEAD, "[A0 A1 F1 F3] [A2 F2]"),
        ("falcon", ONE_KV_HEAD | {"parallel_attn": False}, "[A0 A1] [F1/2:0 F3] A2 F2"),
        ("gpt_neox", {}, "[A0/2:1 F1 A2 F0/3:2] [A3 F3/2:1]"),
    ],
)
def test_configurations_that_differ(
    tmp_path: Path, family: str, overrides: dict[str, Any], program: str
) -> None:
    save_source(tmp_path / "source", family, 4, **overrides)
    run_export(tmp_path / "source", tmp_path / "target", program, form="fused")
    expected = logits_of(surgeon.edit(surgeon.load(tmp_path / "source"), program))
    assert relative_error(logits_of(load_shipped(tmp_path / "target")), expected) < 1e-5


def test_gains_of_head_norms_lie_as_the_heads_do(tmp_path: Path) -> None:
    model = save_source(tmp_path / "source", "qwen3", 3)
    run_export(tmp_path / "source", tmp_path / "target", "[A0/2:1 A2] [F0 F2]")
    weights = weights_of(tmp_path / "target")
    gains = [layer.self_attn.q_norm.weight for layer in model.model.layers]
    assert torch.equal(
        weights["model.layers.0.self_attn.q_norm.weight"], torch.stack([gains[0], gains[2], gains[2]])
    )
    (whole,) = (w for name, w in weights.items() if name.endswith("v_proj.weight"))
    first, second = (
        layer.self_attn.v_proj.weight * layer.input_layernorm.weight for layer in model.model.layers[::2]
    )
    torch.testing.assert_close(whole, torch.cat([first[16:], second]))
    norm = load_shipped(tmp_path / "target").model.layers[0].self_attn.k_norm
    # A rank with two of the three KV groups of a turn.
    with pytest.raises(RuntimeError, match="unflatten"):
        norm(torch.ones(1, 1, 2, 16), 1)


def test_embeddings_are_scaled_in_16_bits_as_gemma_does_it(tmp_path: Path) -> None:
    """By the factor rounded to them: 6.9375, not 6.9282."""
    save_source(tmp_path / "source", "gemma", 2, hidden_size=48)
    run_export(tmp_path / "source", tmp_path / "target", "A0 F0 A1 F1", form="fused", dtype="bfloat16")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.bfloat16)
    written = load_shipped(tmp_path / "target").bfloat16()
    found, expected = (
        one.eval()(IDS, output_hidden_states=True).hidden_states[0] for one in (written, model)
    )
    assert torch.equal(found, expected)


def test_a_head_with_a_bias_is_not_for_vllm(tmp_path: Path) -> None:
    """Whose backend has none; with surgeon's plugin it runs the program form."""
    save_source(tmp_path / "source", "phi", 2)
    hows = {}
    for form in ("fused", "program"):
        run_export(tmp_path / "source", tmp_path / form, "[A0 A1 F0 F1]", form=form)
        stored = open_stored(tmp_path / form)
        hows[form] = form_of(stored.checkpoint).serving(stored, "vllm serve NAME")
    assert hows["fused"][1] == "transformers serve NAME --trust-remote-code"
    assert "its backend's head has no bias" in hows["fused"][0]
    assert hows["program"][0].startswith("With surgeon installed beside vLLM")
    dense = Program.dense(2, 1)
    assert "head has a bias" in (needs_plugin(dense, stored.family, stored.config, 2) or "")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_stock_classes_do_not_load_it(tmp_path: Path, family: str) -> None:
    """Even where the layers have the widths they had: two halves of two layers."""
    save_source(tmp_path / "source", family, 2)
    run_export(tmp_path / "source", tmp_path / "target", "[A0/2:0 A1/2:0] [F0/2:0 F1/2:0]", form="fused")
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "target", trust_remote_code=False)
    (tmp_path / "target" / "modeling_surgeon_fused.py").unlink()
    assert surgeon.load(tmp_path / "target").config.base_model_type == family
