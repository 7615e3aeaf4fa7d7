"""What is refused before any rank starts, and what a plan says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from surgeon.families import FAMILIES
from surgeon.runtime.prepare import make_plan


@pytest.fixture
def saved(tiny_model: Callable[..., Any], tmp_path: Path) -> Callable[..., Path]:
    def save(family: str = "llama", **overrides: Any) -> Path:
        tiny_model(family, **overrides).save_pretrained(tmp_path)
        return tmp_path

    return save


def change_config(folder: Path, **entries: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def change_weights(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors.pop(name)
    save_file(tensors | ({} if tensor is None else {name: tensor}), path, metadata={"format": "pt"})


def test_a_plan(saved: Callable[..., Path]) -> None:
    plan = make_plan(saved(), 2, 20)
    assert plan.program == "A0 F0 A1 F1 A2 F2 A3 F3"
    assert (plan.hidden, plan.vocabulary, plan.head_dim, plan.layers) == (32, 97, 8, 4)
    assert plan.ends == (1,)
    assert plan.dtype == torch.float32
    assert plan.family.name == "Llama"
    assert not plan.tied


def test_the_checkpoints_own_program_and_another(saved: Callable[..., Path]) -> None:
    folder = saved()
    change_config(folder, surgeon_program="A0 F0 >A1 >F1", num_hidden_layers=2)
    assert make_plan(folder, 2, 20).program == "A0 F0 >A1 >F1"
    assert make_plan(folder, 2, 20, "[A2 A3] F3").program == "[A2 A3] F3"


def test_sixteen_bit_weights_are_computed_in_float32_on_a_cpu(tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    tiny_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    assert make_plan(tmp_path, 1, 20).dtype == torch.float32
    assert make_plan(tmp_path, 1, 20, device="cuda").dtype == torch.bfloat16


def test_end_tokens_of_the_generation_config_count(saved: Callable[..., Path]) -> None:
    folder = saved()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert make_plan(folder, 1, 20).ends == (5, 7)


@pytest.mark.parametrize(
    ("ranks", "program", "message"),
    [
        (3, None, "3 ranks cannot share this model: the 4 heads and 2 KV heads of A0 .* 3 slices; 1, 2 or 4 can"),
        (5, None, "the 48 neurons of F0 do not divide into 5 slices; 1, 2 or 4 can"),
        (3, "{A0 | A1}", "2 branches does not spread evenly over 3 ranks.*; 1, 2, 4 or 8 can"),
        (2, "A0/4:1", "the 4 heads and 2 KV heads of A0 do not divide into 4 slices"),
        (2, "A0 F4", "F4 is out of range: the model's layers are 0 to 3"),
        (2, "A0 f1", "cannot read 'f1'"),
        (0, None, "number of ranks must lie in 1..1024, not 0"),
        (5000, None, "number of ranks must lie in 1..1024, not 5000"),
    ],
)
def test_programs_and_ranks_that_do_not_fit(
    saved: Callable[..., Path], ranks: int, program: str | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(saved(), ranks, 20, program)


def test_pairs_of_whole_layers_fit_where_slices_do_not(saved: Callable[..., Path]) -> None:
    folder = saved(num_attention_heads=1, num_key_value_heads=1)
    assert make_plan(folder, 2, 20, "[A0 A1] F0 [A2 A3]").ranks == 2
    with pytest.raises(ValueError, match="the 1 heads and 1 KV heads of A0"):
        make_plan(folder, 2, 20)


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_texts_longer_than_the_models_positions(saved: Callable[..., Path], family: str) -> None:
    folder = saved(family, max_position_embeddings=32)
    assert make_plan(folder, 1, 32).max_tokens == make_plan(folder, 1, None).max_tokens == 32
    with pytest.raises(ValueError, match="together are 33 tokens, and the model has 32 positions"):
        make_plan(folder, 1, 33)


def test_sliding_windows(saved: Callable[..., Path]) -> None:
    types = ["full_attention", "sliding_attention", "full_attention", "full_attention"]
    folder = saved("qwen3", use_sliding_window=True, sliding_window=16, layer_types=types)
    assert make_plan(folder, 1, 16).max_tokens == make_plan(folder, 1, None).max_tokens == 16
    assert make_plan(folder, 1, 99, "A0 F0 A2 F2").max_tokens == 99
    assert make_plan(folder, 1, None, "A0 F0 A2 F2").max_tokens == 128
    with pytest.raises(ValueError, match=r"looks back 16 tokens.*\(now 17\)"):
        make_plan(folder, 1, 17)


def test_local_attentions(saved: Callable[..., Path]) -> None:
    folder = saved("gpt_neo", window_size=16)  # in every other layer
    assert make_plan(folder, 1, 16).max_tokens == 16
    assert make_plan(folder, 1, 99, "A0 F0 F1 A2").max_tokens == 99
    with pytest.raises(ValueError, match=r"looks back 16 tokens.*\(now 17\)"):
        make_plan(folder, 1, 17)


def test_rotary_positions_that_change_with_the_length(saved: Callable[..., Path]) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 16}
    folder = saved(rope_parameters=rope)
    assert make_plan(folder, 1, 16).rotary is not None
    assert make_plan(folder, 1, None).max_tokens == 16
    with pytest.raises(ValueError, match="dynamic rotary positions change beyond 16 tokens"):
        make_plan(folder, 1, 17)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.norm.weight", None, "no tensor 'model.norm.weight'"),
        ("lm_head.weight", None, "no tensor 'lm_head.weight'"),
        ("model.layers.2.mlp.up_proj.weight", None, "no tensor 'model.layers.2.mlp.up_proj.weight'"),
        ("model.layers.2.mlp.up_proj.weight", torch.ones(40, 32), "does not fit"),
        ("model.layers.2.mlp.up_proj.weight", torch.ones(48, 31), r"\(48, 31\), .* asks for \(any, 32\)"),
        ("model.layers.1.self_attn.k_proj.weight", torch.ones(12, 32), "does not fit heads of 8"),
        (
            "model.layers.1.self_attn.v_proj.weight",
            torch.ones(8, 32),
            "does not fit heads of 8 or the other projections",
        ),
        ("lm_head.weight", torch.ones(96, 32), r"\(96, 32\), .* asks for \(97, 32\)"),
    ],
)
def test_weights_that_do_not_fit(
    saved: Callable[..., Path], name: str, tensor: torch.Tensor | None, message: str
) -> None:
    folder = saved()
    change_weights(folder, name, tensor)
    with pytest.raises(ValueError, match=message):
        make_plan(folder, 1, 20)


@pytest.mark.parametrize(
    ("family", "name", "tensor", "message"),
    [
        ("gpt_neox", "attention.query_key_value.weight", torch.ones(88, 32), "does not fit heads of 8"),
        ("gpt_neox", "attention.query_key_value.weight", torch.ones(96, 31), r"\(96, 31\), .* asks for \(any, 32\)"),
        ("phi3", "self_attn.qkv_proj.weight", torch.ones(72, 32), "does not fit heads of 8 or the other projections"),
        ("phi3", "mlp.gate_up_proj.weight", torch.ones(95, 32), "or the other projections"),
        ("gpt2", "mlp.c_fc.weight", torch.ones(48, 32), r"\(48, 32\), .* asks for \(32, any\)|does not fit"),
    ],
)
def test_packed_weights_that_do_not_fit(
    saved: Callable[..., Path], family: str, name: str, tensor: torch.Tensor, message: str
) -> None:
    folder = saved(family, **({"sliding_window": None} if family == "phi3" else {}))
    layers = FAMILIES[family].layers
    change_weights(folder, f"{layers}.2.{name}", tensor)
    with pytest.raises(ValueError, match=message):
        make_plan(folder, 1, 20)


def test_other_things_that_cannot_run(saved: Callable[..., Path]) -> None:
    folder = saved()
    change_config(folder, quantization_config={"quant_method": "gptq"})
    with pytest.raises(ValueError, match="quantised weights"):
        make_plan(folder, 1, 20)
    change_config(folder, quantization_config=None, hidden_act="silo")
    with pytest.raises(ValueError, match="no activation 'silo'; did you mean 'silu'"):
        make_plan(folder, 1, 20)
    with pytest.raises(FileNotFoundError):
        make_plan(folder / "nowhere", 1, 20)
    with pytest.raises(ValueError, match=r"ranks do not run Gemma2 yet \(they run Llama, .*GPT-NeoX\)"):
        make_plan(saved("gemma2"), 1, 20)
