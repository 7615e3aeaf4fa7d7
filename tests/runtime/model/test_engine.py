"""One rank without processes: what models need beyond plain layers, against `transformers` on the same checkpoint."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import surgeon
from surgeon.exports.export import plan_export, write_export
from surgeon.language.program import Program
from surgeon.opened import open_model
from surgeon.runtime.batching.request import UNDEFINED, Row, Targets, Wanted
from surgeon.runtime.comm.collectives import Alone
from surgeon.runtime.model.attending import rotation
from surgeon.runtime.model.engine import RankEngine
from surgeon.runtime.model.layers import FeedForward
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.specification import Rotary
from tests.runtime.on_ranks import chunked_logits
from tests.tiny_models import damage, save_checkpoint

TOLERANCE = 1e-4
BAD = 9  # the token that a damaged model makes no number of
# Neighbours of the same kind.
FUSABLE = {"gpt_neo": {"attention_types": [[["global"], 2], [["local"], 2]]}}
IDS = torch.randint(2, 97, (2, 24), generator=torch.Generator().manual_seed(5))
ROPES = {
    "plain": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
}


def engine_of(folder: Path, program: str | None = None, max_tokens: int = 64) -> RankEngine:
    return RankEngine(make_plan(folder, 1, max_tokens, program), Alone(), torch.device("cpu"))


def error_of(engine: RankEngine, model: Any, split: int = 9) -> float:
    """The largest difference of logits, relative to the largest one, when the text is given in two parts."""
    found = torch.cat(list(chunked_logits(engine, [IDS[:, :split], IDS[:, split:]])), 1)
    with torch.inference_mode():
        expected: Tensor = model(input_ids=IDS, use_cache=False).logits
    return float((found - expected).abs().max() / expected.abs().max())


OLD = {"new_decoder_architecture": False, "bias": False}  # Falcon 7B, with one KV head and one norm


@pytest.mark.parametrize("rope", [rope for rope in ROPES if rope != "plain"])
def test_scaled_rotary_positions(rope: str, tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    model = tiny_model("llama", rope_parameters=ROPES[rope])
    model.save_pretrained(tmp_path)
    engine = engine_of(tmp_path)
    assert error_of(engine, model) < TOLERANCE
    assert len(engine.plan.arithmetic.rotaries) == 1
    # Without the scaling the numbers would be others, so that this test can fail.
    plain = Rotary(tuple(10000.0 ** (-i / 4) for i in range(4)), 1.0)
    arithmetic = replace(engine.plan.arithmetic, rotaries=(plain,))
    unscaled = RankEngine(replace(engine.plan, arithmetic=arithmetic), Alone(), torch.device("cpu"))
    assert rope == "dynamic" or error_of(unscaled, model) > 10 * TOLERANCE


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
        ("llama", {"tie_word_embeddings": True, "rms_norm_eps": 0.05}),
        ("llama", {"num_key_value_heads": 1, "head_dim": 12}),
        ("llama", {"num_key_value_heads": 4}),
        ("qwen3", {"attention_bias": True}),
        ("opt", {"activation_function": "gelu", "enable_bias": False}),
        ("opt", {"tie_word_embeddings": False}),
        ("gpt_neox", {}),
        ("gpt_neox", {"use_parallel_residual": False, "rotary_pct": 1.0}),
        ("gpt_neox", {"attention_bias": False, "rotary_pct": 0.25, "hidden_act": "gelu_fast"}),
        ("gpt_neox", {"rope_parameters": ROPES["linear"] | {"partial_rotary_factor": 0.5}}),
        ("phi", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
        ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": False}),
        ("gptj", {"hidden_size": 176, "rotary_dim": 30}),
        ("falcon", OLD),
        ("falcon", OLD | {"num_kv_heads": None, "multi_query": False, "parallel_attn": False}),
        ("phi3", {"sliding_window": 7}),
        (
            "phi3",
            {
                "sliding_window": None,
                "rope_parameters": ROPES["plain"] | {"partial_rotary_factor": 0.75},
            },
        ),
        ("gpt2", {}),
        ("gpt2", {"scale_attn_weights": False, "n_inner": None, "tie_word_embeddings": False}),
        ("gpt_neo", {"window_size": 64, "activation_function": "relu"}),
        ("gpt_neo", {"window_size": 1}),
        ("mistral", {"sliding_window": 8, "head_dim": 16}),
        ("ministral", {"sliding_window": 9}),
        ("ministral3", {}),
        ("qwen2", {"sliding_window": 23, "max_window_layers": 1}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2}),
        ("glm", {"tie_word_embeddings": True}),
        (
            "glm4",
            {
                "attention_bias": False,
                "rope_parameters": ROPES["yarn"] | {"partial_rotary_factor": 0.25},
            },
        ),
        ("cohere", {"rope_parameters": ROPES["linear"], "tie_word_embeddings": True}),
        ("cohere2", {"attention_bias": True, "sliding_window": 9}),
        ("gemma2", {}),
        (
            "gemma2",
            {"attn_logit_softcapping": None, "final_logit_softcapping": None, "num_key_value_heads": 4},
        ),
        ("gemma2", {"sliding_window": 64, "tie_word_embeddings": False, "attention_bias": True}),
    ],
)
def test_variants_of_families(
    family: str, overrides: dict[str, Any], tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    model = tiny_model(family, **overrides)
    model.save_pretrained(tmp_path)
    assert error_of(engine_of(tmp_path), model) < TOLERANCE


def test_names_that_checkpoints_have(tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    """GPT-NeoX's head under both of its names; GPT-2 as a bare decoder."""
    model = tiny_model("gpt_neox")
    model.save_pretrained(tmp_path / "one")
    file = tmp_path / "one" / "model.safetensors"
    tensors = load_file(file)
    assert "embed_out.weight" in tensors
    assert error_of(engine_of(tmp_path / "one"), model) < TOLERANCE
    save_file(
        tensors | {"lm_head.weight": tensors.pop("embed_out.weight")}, file, metadata={"format": "pt"}
    )
    assert error_of(engine_of(tmp_path / "one"), model) < TOLERANCE
    gpt2 = tiny_model("gpt2")
    gpt2.transformer.save_pretrained(tmp_path / "two")
    assert "h.0.attn.c_attn.weight" in load_file(tmp_path / "two" / "model.safetensors")
    assert error_of(engine_of(tmp_path / "two"), gpt2) < TOLERANCE


def test_sixteen_bit_weights(tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    tiny_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    assert error_of(engine_of(tmp_path), surgeon.load(tmp_path)) < TOLERANCE


@pytest.mark.parametrize(
    ("program", "form"),
    [
        ("A0 F0 A2 F2 A1~A3 F1~F3", "plain"),
        ("A0 F0 [A1 A2] [F1 F2] A3 F3", "fused"),
        ("A0 F0 >A1 >F1 {A2 F2 | A3 F3}", "program"),
    ],
)
def test_exported_checkpoints(program: str, form: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "original", attention_bias=True)
    plan = plan_export(open_model(folder), Program.parse(program), form)
    write_export(plan, tmp_path / form)
    expected = surgeon.edit(surgeon.load(folder), program)
    assert error_of(engine_of(tmp_path / form), expected) < TOLERANCE


@pytest.mark.parametrize("family", ["qwen3", "gpt_neo", "gpt_neox"])
def test_fused_checkpoints_of_other_architectures(family: str, tmp_path: Path) -> None:
    """Also in slices that do not have the heads of both layers."""
    folder = save_checkpoint(tmp_path / "original", family, vocab_size=97, **FUSABLE.get(family, {}))
    program = "[A0 A1] [F0 F1] [A2 A3/2:1] [F3]"
    if family == "gpt_neox":
        program = "[A0 F0 A1 F1] [A2 A3/2:1 F3]"
    write_export(plan_export(open_model(folder), Program.parse(program), "fused"), tmp_path / "fused")
    expected = surgeon.edit(surgeon.load(folder), program)
    assert error_of(engine_of(tmp_path / "fused"), expected) < TOLERANCE
    slices = " ".join(f"A0/4:{index}" for index in (3, 1, 0, 2))
    sliced = f"[{slices}] F0 A1 F1" if family != "gpt_neox" else f"[{slices} F0] [A1 F1]"
    assert error_of(engine_of(tmp_path / "fused", sliced), expected) < TOLERANCE


def test_rotation_angles() -> None:
    cosine, signed_sine = (angle[3:] for angle in rotation(Rotary((1.0, 0.1), 2.0), 5, torch.ones(1)))
    angles = torch.tensor([[3.0, 0.3], [4.0, 0.4]])
    assert torch.allclose(cosine[:, 0], 2 * torch.cat([angles.cos(), angles.cos()], 1))
    assert torch.allclose(signed_sine[:, 0], 2 * torch.cat([-angles.sin(), angles.sin()], 1))


@pytest.mark.parametrize("decoding", ["dynamic", "static"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_have_no_likeliest_token(
    decoding: Any, value: float, tmp_path: Path
) -> None:
    folder = save_checkpoint(tmp_path / "tiny")
    damage(folder, BAD, value)
    plan = replace(make_plan(folder, 1, 64), decoding=decoding)
    engine = RankEngine(plan, Alone(), torch.device("cpu"))
    cache = engine.new_cache(2)
    prompts = [Row(0, [5, 6], ([(0, 1)],), Wanted.BEST), Row(0, [5, 7], ([(1, 1)],), Wanted.BEST)]
    assert min(engine.step(prompts, cache).best) >= 0
    rows = [Row(2, [BAD], ([(0, 1)],), Wanted.BEST), Row(2, [8], ([(1, 1)],), Wanted.BEST)]
    bad, good = engine.step(rows, cache).best
    assert bad == UNDEFINED
    assert good >= 0


@pytest.mark.parametrize(
    ("program", "behind"),
    [
        ("A0 F0 A1 F1 A2 F2 A3 F3", 1),
        ("A0 F0 >A1 >F1 A2 F2 >A3 >F3", 1),
        ("A0 A1 [A2 A3] F0 [F1 F2 F3]", 4),
        ("A0 F0 {A1 F1 | A2 F2} F3 F3", 2),
        ("A0 F0 A1 {F1 | F2 F3}", 3),
        ("[A0 F0] [A1 F1]", 0),
    ],
)
def test_behind_the_last_attention_only_tokens_are_computed_that_something_is_asked_of(
    program: str, behind: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(save_checkpoint(tmp_path / "tiny"), program)
    texts, cache, widths = IDS[0, :22].tolist(), engine.new_cache(3), list[int]()
    own = [texts[:9], texts[9:16], texts[16:]]
    expected = [engine.text_logits(tokens) for tokens in own]
    rows = [
        Row(0, own[0], ([(0, 1)],), Wanted.BEST),
        Row(0, own[1], ([(1, 1)],), Wanted.NOTHING),
        Row(0, own[2], ([(2, 1)],), Wanted.LOGITS, Targets(1, own[2][2:5], 1)),
    ]
    compute = FeedForward.__call__

    def noting(self: FeedForward, x: Tensor) -> Tensor:
        widths.append(len(x))
        return compute(self, x)

    monkeypatch.setattr(FeedForward, "__call__", noting)
    found = engine.step(rows, cache)
    assert found.best == [int(expected[0][-1].argmax())]
    assert found.logits is not None
    torch.testing.assert_close(found.logits[0], expected[2][-1])
    chances = expected[2][1:4].log_softmax(-1)
    told = [chance[token].item() for chance, token in zip(chances, own[2][2:5], strict=True)]
    assert [one.logprob for one in found.scores[0]] == pytest.approx(told, abs=1e-4)
    total = program.count("F")
    assert widths == [22] * (total - behind) + [5] * behind  # two tokens' next ones, and three targets
    widths.clear()
    assert (
        engine.step([row._replace(wanted=Wanted.NOTHING, targets=None) for row in rows], cache).best
        == []
    )
    assert widths == [22] * (total - behind) + [1] * behind


def test_a_cache_is_used_again_while_it_is_large_enough_and_of_the_same_kind(tmp_path: Path) -> None:
    plan = replace(make_plan(save_checkpoint(tmp_path / "tiny"), 1, 64), decoding="static")
    engine = RankEngine(plan, Alone(), torch.device("cpu"))
    first = engine.reusable_cache(4)
    assert engine.reusable_cache(3) is engine.reusable_cache(4) is first
    there, larger = weakref.ref(first), engine.reusable_cache(5)
    assert larger.tokens > first.tokens
    del first
    assert there() is None  # nobody else holds it
    grouped = engine.reusable_cache(2, grouped=True)
    assert grouped is not larger
    assert engine.reusable_cache(2, grouped=True) is grouped
    assert engine.reusable_cache(2) is not grouped


def test_the_cache_before_is_gone_when_a_larger_one_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = replace(make_plan(save_checkpoint(tmp_path / "tiny"), 1, 64), decoding="static")
    engine = RankEngine(plan, Alone(), torch.device("cpu"))
    there, seen, new_cache = weakref.ref(engine.reusable_cache(4)), list[object](), engine.new_cache

    def noting(*arguments: Any, **more: Any) -> Any:
        seen.append(there())
        return new_cache(*arguments, **more)

    monkeypatch.setattr(engine, "new_cache", noting)
    engine.reusable_cache(5)
    assert seen == [None]


def test_without_recordings_every_cache_is_a_new_one(tmp_path: Path) -> None:
    plan = replace(make_plan(save_checkpoint(tmp_path / "tiny"), 1, 64), decoding="dynamic")
    engine = RankEngine(plan, Alone(), torch.device("cpu"))
    assert engine.reusable_cache(4) is not engine.reusable_cache(4)
