"""What is refused before any rank starts, and what a plan says."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from surgeon.language.operations import desync, tracks
from surgeon.language.program import Program
from surgeon.language.sublayer import Sublayer
from surgeon.models.families import FAMILIES
from surgeon.runtime.batching.request import LongTexts
from surgeon.runtime.model.layers import ACTIVATIONS
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.specification import OWN_ACTIVATIONS


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
    assert plan.dtype == "float32"
    assert plan.family.name == "Llama"
    assert not plan.tied


def test_the_checkpoints_own_program_and_another(saved: Callable[..., Path]) -> None:
    folder = saved()
    change_config(folder, surgeon_program="A0 F0 >A1 >F1", num_hidden_layers=2)
    assert make_plan(folder, 2, 20).program == "A0 F0 >A1 >F1"
    assert make_plan(folder, 2, 20, "[A2 A3] F3").program == "[A2 A3] F3"


def test_a_layer_that_one_rank_holds_whole_and_all_hold_slices_of(saved: Callable[..., Path]) -> None:
    assert make_plan(saved(), 2, 20, "{A1 F1 | F2} A1 F2").program == "{A1 F1 | F2} A1 F2"


def test_sixteen_bit_weights_are_computed_in_float32_on_a_cpu(
    tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    tiny_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    assert make_plan(tmp_path, 1, 20).dtype == "float32"
    assert make_plan(tmp_path, 1, 20, device="cuda").dtype == "bfloat16"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_dtype_and_a_decoding_that_were_asked_for(device: str, saved: Callable[..., Path]) -> None:
    folder = saved()
    plan = make_plan(folder, 1, 20, device=device, dtype="bfloat16", decoding="static")
    assert (plan.dtype, plan.decoding) == ("bfloat16", "static")
    assert make_plan(folder, 1, 20, device=device).decoding == "auto"
    with pytest.raises(ValueError, match=r"no dtype 'bfloat' to compute in; did you mean 'bfloat16'\?"):
        make_plan(folder, 1, 20, device=device, dtype="bfloat")
    with pytest.raises(ValueError, match="no dtype 'int8' to compute in"):
        make_plan(folder, 1, 20, device=device, dtype="int8")
    with pytest.raises(ValueError, match=r"no decoding 'statick'; did you mean 'static'\?"):
        make_plan(folder, 1, 20, device=device, decoding="statick")


def test_end_tokens_of_the_generation_config_count(saved: Callable[..., Path]) -> None:
    folder = saved()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert make_plan(folder, 1, 20).ends == (5, 7)


@pytest.mark.parametrize(
    ("ranks", "program", "message"),
    [
        (2, "", "the program is empty: it has no steps"),
        (2, " ", "the program is empty: it has no steps"),
        (
            64,
            None,
            "64 ranks cannot share this model, whose layers have 4 heads and 48 neurons to share; use at most 52",
        ),
        (5, "A0 A1", "whose layers have 4 heads and 0 neurons to share; use at most 4"),
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


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_texts_longer_than_the_models_positions(saved: Callable[..., Path], family: str) -> None:
    folder = saved(family, max_position_embeddings=32)
    assert make_plan(folder, 1, 32).max_tokens == make_plan(folder, 1, None).max_tokens == 32
    with pytest.raises(ValueError, match="together are 33 tokens, and the model has 32 positions"):
        make_plan(folder, 1, 33)


@pytest.mark.parametrize(
    ("family", "overrides", "windows"),
    [
        ("llama", {"sliding_window": 5}, ()),  # means nothing there
        ("mistral", {"sliding_window": 16}, (16, 16, 16, 16)),
        ("mistral", {"sliding_window": None}, ()),
        ("phi3", {"sliding_window": 9}, (9, 9, 9, 9)),
        ("qwen2", {"max_window_layers": 3}, (None, None, None, 5)),
        ("qwen2", {"use_sliding_window": False}, ()),
        ("qwen2_moe", {"use_sliding_window": False}, ()),  # whose window is 0 then
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 7,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            (None, 7, None, 7),
        ),
        ("gemma2", {"sliding_window": 16}, (16, None, 16, None)),
        ("gpt_neo", {"window_size": 16}, (None, 16, None, 16)),
    ],
)
def test_attention_windows(
    saved: Callable[..., Path], family: str, overrides: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    folder = saved(family, **overrides)
    assert make_plan(folder, 1, 99, "A3 F0 A2 F2").windows == windows
    assert make_plan(folder, 1, None).max_tokens == 128


def test_windows_that_cannot_be(saved: Callable[..., Path]) -> None:
    folder = saved("mistral", sliding_window=-4)
    with pytest.raises(ValueError, match="sliding_window must be at least 1 token, not -4"):
        make_plan(folder, 1, 20)
    folder = saved("qwen2")
    types = ["full_attention", "sliding_attention"]
    change_config(folder, num_hidden_layers=2, layer_types=types, surgeon_program="A0 F0 >A3 >F3")
    with pytest.raises(
        ValueError, match="layer_types in config.json has an entry for each of 2 layers, .* holds 4"
    ):
        make_plan(folder, 1, 20)


def test_layers_without_rotary_positions(saved: Callable[..., Path]) -> None:
    plan = make_plan(saved("smollm3"), 2, 20)
    assert plan.arithmetic.rotary_layers == (0, None, 0, None)
    assert [plan.arithmetic.rotary_of(Sublayer("A", (k,))) for k in (0, 3)] == [0, None]
    plan = make_plan(saved("smollm3", no_rope_layers=[0, 0, 0, 0]), 2, 20)
    assert (plan.arithmetic.rotaries, plan.arithmetic.rotary_layers) == ((), ())
    plan = make_plan(saved("smollm3", no_rope_layers=[1, 1, 1, 1]), 2, 20)
    assert len(plan.arithmetic.rotaries) == 1
    assert plan.arithmetic.rotary_layers == ()
    assert plan.arithmetic.rotary_of(Sublayer("A", (3,))) == 0
    folder = saved("smollm3")
    change_config(folder, no_rope_layers=[1, 0, 1])
    with pytest.raises(
        ValueError, match="no_rope_layers has an entry for each of 3 layers, and there are 4"
    ):
        make_plan(folder, 1, 20)


def test_what_granite_multiplies(saved: Callable[..., Path]) -> None:
    plan = make_plan(saved("granite"), 2, 20)
    assert (
        plan.arithmetic.embedding_scale,
        plan.arithmetic.attention_scale,
        plan.arithmetic.output_scale,
        plan.arithmetic.logit_scale,
    ) == (3.0, 0.2, 0.4, 0.4)
    for name, value in (("logits_scaling", 0), ("residual_multiplier", float("nan"))):
        folder = saved("granite")
        change_config(folder, **{name: value})
        with pytest.raises(ValueError, match=f"{name} must be a number other than 0, not {value}"):
            make_plan(folder, 1, 20)


def test_what_gemma2_adds(saved: Callable[..., Path]) -> None:
    plan = make_plan(saved("gemma2"), 2, 20)
    assert (plan.arithmetic.attention_softcap, plan.arithmetic.logit_softcap) == (2.0, 3.0)
    assert plan.arithmetic.attention_scale == pytest.approx(24**-0.5)
    assert plan.arithmetic.embedding_scale == pytest.approx(32**0.5)
    plan = make_plan(saved("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None), 2, 20)
    assert (plan.arithmetic.attention_softcap, plan.arithmetic.logit_softcap) == (None, None)
    with pytest.raises(ValueError, match="final_logit_softcapping must be above 0, not -1"):
        make_plan(saved("gemma2", final_logit_softcapping=-1.0), 2, 20)
    plan = make_plan(saved("llama"), 2, 20)
    assert (
        plan.arithmetic.attention_softcap,
        plan.arithmetic.logit_softcap,
        plan.arithmetic.embedding_scale,
    ) == (
        None,
        None,
        None,
    )


@pytest.mark.parametrize(
    "program",
    [tracks(Program.dense(4), range(4), count=2, depth=2), desync(Program.dense(4), range(4), count=2)],
)
def test_slices_of_sublayers_with_a_norm_behind_them(
    saved: Callable[..., Path], program: Program
) -> None:
    message = "sublayers of Gemma2 cannot be sliced: their output goes through a norm before it is added"
    with pytest.raises(ValueError, match=message):
        make_plan(saved("gemma2"), 2, 20, str(program))


def test_rotary_positions_that_change_with_the_length(saved: Callable[..., Path]) -> None:
    rope = {
        "rope_type": "dynamic",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 16,
    }
    folder = saved(rope_parameters=rope)
    assert make_plan(folder, 1, 128).long_texts is None  # transformers goes by the model's positions
    assert make_plan(folder, 1, None).max_tokens == 256
    assert make_plan(folder, 1, 129).long_texts == LongTexts(128, by_length=True, anew=False)
    with pytest.raises(ValueError, match="are 257 tokens, and the model has 256 positions"):
        make_plan(folder, 1, 257)
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    longrope = rope | factors | {"rope_type": "longrope", "original_max_position_embeddings": 16}
    folder = saved(rope_parameters=longrope)
    assert make_plan(folder, 1, None).long_texts == LongTexts(16, by_length=False, anew=False)
    low_rank = "A0@k3,v4 F0"
    assert make_plan(folder, 1, 17, low_rank).kv == "full"
    assert make_plan(folder, 1, 16, low_rank, kv="lowrank").kv == "lowrank"
    with pytest.raises(
        ValueError, match="rotary positions depend on the length of a text here, up to 17 tokens"
    ):
        make_plan(folder, 1, 17, low_rank, kv="lowrank")
    folder = saved("phi3", rope_parameters=longrope, original_max_position_embeddings=16)
    assert make_plan(folder, 1, None).long_texts == LongTexts(16, by_length=False, anew=True)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"rope_theta": "x"}, "describes no rotary positions: .*'rope_theta': 'x'.* \\(TypeError: "),
        ({"rope_theta": None}, "describes no rotary positions: .*'rope_theta': None"),
        ({"rope_theta": 10**30}, "describes no rotary positions: .* \\(OverflowError"),
        (
            {"rope_theta": float("nan")},
            "describes no rotary positions: .*an angle is infinite, or no number",
        ),
        (
            {"rope_type": "linaer"},
            "rope_type in config.json must be known, not 'linaer'; did you mean 'linear'?",
        ),
        ({"rope_type": []}, r"rope_type in config.json must be known, not \[\]; known: default, linear"),
        ({"rope_type": "yarn", "factor": {}}, "describes no rotary positions: "),
        (
            {
                "rope_type": "longrope",
                "short_factor": [],
                "long_factor": [],
                "original_max_position_embeddings": "x",
            },
            "describes no rotary positions: ",
        ),
        ({"rope_type": "dynamic", "factor": "x"}, "describes no rotary positions: .*Type"),
        ({"rope_type": "dynamic", "factor": float("inf")}, "describes no rotary positions: "),
    ],
)
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_rotary_positions_that_cannot_be(
    saved: Callable[..., Path], family: str, entries: dict[str, Any], message: str
) -> None:
    folder = saved(family)
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    change_config(folder, rope_parameters=rope | entries)
    for tokens in (20, None):
        with pytest.raises(ValueError, match=message):
            make_plan(folder, 1, tokens)


def test_numbers_that_no_model_has(saved: Callable[..., Path]) -> None:
    for value in (-1, 0, 10**400):
        folder = saved("gemma2")
        change_config(folder, query_pre_attn_scalar=value)
        with pytest.raises(
            ValueError, match="query_pre_attn_scalar in config.json must be above 0, not "
        ):
            make_plan(folder, 1, 20)
    folder = saved("opt")
    change_config(folder, num_attention_heads=10**30)
    with pytest.raises(ValueError, match="head_dim must be at least 1, not 0"):
        make_plan(folder, 1, 20)
    folder = saved()
    for ends in ("x", {}, [1, None], 1.5):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        with pytest.raises(
            ValueError, match="generation_config.json: eos_token_id must be a token's number"
        ):
            make_plan(folder, 1, 20)


def test_a_program_in_the_configuration_that_is_none(saved: Callable[..., Path]) -> None:
    folder = saved()
    for value in (5, None, ["A0"]):
        change_config(folder, surgeon_program=value)
        with pytest.raises(
            ValueError, match="config.json has surgeon_program: .* which is no program; write it as a"
        ):
            make_plan(folder, 1, 20)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.norm.weight", None, "no tensor 'model.norm.weight'"),
        ("lm_head.weight", None, "no tensor 'lm_head.weight'"),
        ("model.layers.2.mlp.up_proj.weight", None, "no tensor 'model.layers.2.mlp.up_proj.weight'"),
        ("model.layers.2.mlp.up_proj.weight", torch.ones(40, 32), "does not fit"),
        (
            "model.layers.2.mlp.up_proj.weight",
            torch.ones(48, 31),
            r"\(48, 31\), .* asks for \(any, 32\)",
        ),
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
        (
            "gpt_neox",
            "attention.query_key_value.weight",
            torch.ones(96, 31),
            r"\(96, 31\), .* asks for \(any, 32\)",
        ),
        (
            "phi3",
            "self_attn.qkv_proj.weight",
            torch.ones(72, 32),
            "does not fit heads of 8 or the other projections",
        ),
        ("phi3", "mlp.gate_up_proj.weight", torch.ones(95, 32), "or the other projections"),
        ("gemma2", "post_attention_layernorm.weight", torch.ones(31), r"\(31,\), .* asks for \(32\)"),
        (
            "gpt2",
            "mlp.c_fc.weight",
            torch.ones(48, 32),
            r"\(48, 32\), .* asks for \(32, any\)|does not fit",
        ),
    ],
)
def test_packed_weights_that_do_not_fit(
    saved: Callable[..., Path], family: str, name: str, tensor: torch.Tensor, message: str
) -> None:
    folder = saved(family)
    layers = FAMILIES[family].layers
    change_weights(folder, f"{layers}.2.{name}", tensor)
    with pytest.raises(ValueError, match=message):
        make_plan(folder, 1, 20)


def test_other_things_that_cannot_run(saved: Callable[..., Path]) -> None:
    folder = saved()
    change_config(folder, quantization_config={"quant_method": "gptq"})
    with pytest.raises(ValueError, match="quantization_config in config.json has bits None"):
        make_plan(folder, 1, 20)
    change_config(folder, quantization_config=None, hidden_act="silo")
    with pytest.raises(ValueError, match="no activation 'silo'; did you mean 'silu'"):
        make_plan(folder, 1, 20)
    with pytest.raises(FileNotFoundError):
        make_plan(folder / "nowhere", 1, 20)


@pytest.mark.parametrize(
    ("family", "rope"),
    [
        ("llama", {"rope_type": "default", "rope_theta": 7e4}),
        ("gpt_neox", {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        ("phi3", {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.75}),
        ("llama", {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}),
    ],
)
def test_rotary_positions_are_those_of_transformers(
    family: str, rope: dict[str, Any], tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    model = tiny_model(family, rope_parameters=rope)
    model.save_pretrained(tmp_path)
    module = next(found for name, found in model.named_modules() if name.endswith("rotary_emb"))
    (rotary,) = make_plan(tmp_path, 1, 16).arithmetic.rotaries
    assert rotary.inverse_frequencies == tuple(module.inv_freq.tolist())
    assert rotary.scale == module.attention_scaling


def test_activations_that_ranks_compute_themselves_are_known() -> None:
    assert set(OWN_ACTIVATIONS) == set(ACTIVATIONS)


@pytest.mark.parametrize("name", FAMILIES)
def test_families_travel_with_plans(name: str) -> None:
    assert pickle.loads(pickle.dumps(FAMILIES[name])).model_type == name
