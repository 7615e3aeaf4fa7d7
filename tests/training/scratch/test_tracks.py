"""Narrow models of native tracks: their sizes, counted on real models, and algorithm 1 over separate ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import surgeon
from surgeon.checkpoint.forms import PROGRAM
from surgeon.models.edit import edit, edited_layers, program_of
from surgeon.models.families import FAMILIES, family_of
from surgeon.opened import load
from surgeon.training.scope import routers_of
from surgeon.training.scratch.tracks import narrow
from tests.tiny_models import DENSE_FAMILIES, disturb, sizes_of, tiny_model

BIASED = {"attention_bias": True, "mlp_bias": True}
NARROW = {"hidden_size": 8, "intermediate_size": 1, "num_key_value_heads": 4, "head_dim": 64}
HEAD_DIM = {"qwen3": 24, "gemma2": 24, "gemma3_text": 24}  # narrower than hidden / heads
UNGROUPED = ("opt", "gpt2", "gpt_neo", "gptj", "gpt_neox")


def dense_config(family: str, width: int = 256, heads: int = 8, layers: int = 5, **more: Any) -> Any:
    """A configuration of a family that is large enough to be split, without its numbers."""
    sizes: dict[str, Any] = {"hidden_size": width, "num_attention_heads": heads, "vocab_size": 997}
    sizes[FAMILIES[family].intermediate] = 688
    if family not in UNGROUPED:
        sizes["num_kv_heads" if family == "falcon" else "num_key_value_heads"] = heads // 2
    if family == "opt":
        sizes["word_embed_proj_dim"] = width
    if family in HEAD_DIM:
        sizes["head_dim"] = HEAD_DIM[family]
    with torch.device("meta"):
        return tiny_model(family, layers, **(sizes | more)).config


def narrow_model(family: str, count: int, depth: int, **config: Any) -> Any:
    """A random model of native tracks, which runs its program."""
    narrowed, program = narrow(tiny_model(family, **config).config, count, depth)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(narrowed, dtype=torch.float32)
    disturb(model)
    return edit(model.eval(), program)


@pytest.mark.sampled
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("family", [*DENSE_FAMILIES, "mixtral", "qwen3_moe"])
def test_layers_have_the_dense_models_parameters(family: str, count: int) -> None:
    config = dense_config(family, **(BIASED if family in ("llama", "granite", "smollm3") else {}))
    narrowed, program = narrow(config, count, 2)
    own, ends = sizes_of(narrowed)
    dense, dense_ends = sizes_of(config)
    assert own == pytest.approx(dense, rel=0.01)
    assert ends < 0.9 * dense_ends  # they are narrower
    described, units = family_of(config), family_of(narrowed).units(narrowed)
    assert narrowed.num_hidden_layers == 5 * count
    assert {unit: units[unit] * count for unit in ("heads", "kv_heads")} == {
        unit: described.units(config)[unit] for unit in ("heads", "kv_heads")
    }
    assert narrowed.hidden_size == pytest.approx(config.hidden_size / count**0.5, rel=0.1)
    assert narrowed.hidden_size % 8 == 0
    if not described.heads_fill_stream:
        assert family_of(narrowed).head_dim(narrowed) == described.head_dim(config)
    assert {sublayer.layers[0] for sublayer in program.sublayers()} == set(range(5 * count))


def test_the_papers_30_billion() -> None:
    """Table 1: each of 8 tracks has 8 of 64 heads and 1 of 8 KV heads (the other sizes are those of such models)."""
    config = dense_config(
        "llama", 6144, 64, 48, num_key_value_heads=8, intermediate_size=24576, vocab_size=150_000
    )
    narrowed, program = narrow(config, 8, 4)
    assert (narrowed.num_attention_heads, narrowed.num_key_value_heads, narrowed.head_dim) == (8, 1, 96)
    assert narrowed.hidden_size == 2176  # 6144 / sqrt(8) is 2172.2
    assert program.sync_points(8) == 48 // 4
    layers, ends = sizes_of(narrowed)
    assert layers == pytest.approx(sizes_of(config)[0], rel=0.005)
    assert ends == 2 * 150_000 * 2176 + 2176


def test_layers_are_numbered_block_by_block() -> None:
    _, program = narrow(tiny_model("llama", num_layers=5).config, count=2, depth=2)
    assert str(program) == "{A0 F0 A1 F1 | A2 F2 A3 F3} {A4 F4 A5 F5 | A6 F6 A7 F7} {A8 F8 | A9 F9}"
    _, program = narrow(tiny_model("gpt_neox", num_layers=2).config, count=2, depth=1)
    assert str(program) == "{[A0 F0] | [A1 F1]} {[A2 F2] | [A3 F3]}"
    assert narrow(tiny_model("llama").config, count=2, depth=9)[1].sync_points(2) == 1


def test_layers_keep_what_is_said_of_them() -> None:
    """Windows, layers without positions: layer l of every track is described as the dense model's layer l."""
    config = tiny_model("smollm3").config
    narrowed, _ = narrow(config, count=2, depth=2)
    order = [0, 1, 0, 1, 2, 3, 2, 3]
    for entry in ("layer_types", "no_rope_layers"):
        assert getattr(narrowed, entry) == [getattr(config, entry)[layer] for layer in order]
    neo = tiny_model("gpt_neo").config
    narrowed, _ = narrow(neo, count=4, depth=4)
    assert narrowed.attention_layers == neo.attention_layers * 4


@pytest.mark.parametrize(
    ("config", "count", "depth", "message"),
    [
        ({}, 1, 2, "at least 2 tracks, not 1"),
        ({}, 2, 0, "at least 1 layer, not 0"),
        ({}, 4, 2, "4 heads and 2 KV heads do not divide among 4 tracks; 2 tracks can"),
        ({"num_key_value_heads": 1}, 2, 2, "4 heads and 1 KV heads .* no number of tracks can"),
        (
            {"hidden_size": 8, "intermediate_size": 1, "num_key_value_heads": 4, "head_dim": 64},
            4,
            2,
            "use fewer tracks or a wider model",
        ),
    ],
)
def test_what_is_refused(config: dict[str, Any], count: int, depth: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        narrow(tiny_model("llama", **config).config, count, depth)


@torch.no_grad()
def algorithm_1(model: Any, ids: Tensor, count: int, depth: int) -> Tensor:
    """Logits of separate narrow models of `transformers`, one for each track and block, which share embedding and head.

    Each is a stock model of a block's layers that begins with a stream in place of tokens, and has no final norm.
    """
    (layers,), own = model.model.layers.original, model.config
    kinds = getattr(own, "layer_types", None)
    stream, first = model.model.embed_tokens(ids), 0
    while first < len(layers):
        block = min(depth, (len(layers) - first) // count)
        total = torch.zeros_like(stream)
        for _ in range(count):
            config = type(own).from_dict(
                own.to_dict()
                | {"num_hidden_layers": block}
                | ({} if kinds is None else {"layer_types": kinds[first : first + block]})
            )
            track = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().model
            for copy, layer in zip(track.layers, layers[first:], strict=False):
                copy.load_state_dict(layer.state_dict())
            track.norm = nn.Identity()
            total += track(inputs_embeds=stream, use_cache=False).last_hidden_state - stream
            first += block
        stream = stream + total
    logits: Tensor = model.lm_head(model.model.norm(stream))
    return logits


@pytest.mark.parametrize(
    ("family", "layers", "config"),
    [
        *[("llama", 4, BIASED), ("qwen2", 5, {}), ("qwen3", 3, {}), ("phi3", 4, {})],
        *[("mixtral", 3, {}), ("qwen3_moe", 3, {"mlp_only_layers": []})],
    ],
)
def test_algorithm_1_over_separate_models(
    family: str, layers: int, config: dict[str, Any], tokens: Tensor
) -> None:
    model = narrow_model(family, 2, 2, num_layers=layers, dropout=0.0, **config)
    with torch.no_grad():
        found = model(input_ids=tokens).logits
    torch.testing.assert_close(found, algorithm_1(model, tokens, 2, 2), rtol=1e-4, atol=1e-4)


def test_mixtures_keep_their_experts() -> None:
    """PT-MoE: each track has as many experts of its own, and dense layers where the model has them."""
    config = dense_config("qwen3_moe", layers=4)
    narrowed, _ = narrow(config, 2, 2)
    assert (narrowed.num_experts, narrowed.num_experts_per_tok) == (
        config.num_experts,
        config.num_experts_per_tok,
    )
    assert narrowed.mlp_only_layers == [4, 6]  # layer 2 of both
    assert narrowed.moe_intermediate_size == pytest.approx(
        config.moe_intermediate_size / 2**0.5, rel=0.02
    )
    model = edit(AutoModelForCausalLM.from_config(narrowed), narrow(config, 2, 2)[1])
    assert len(routers_of(edited_layers(model))) == 6


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox", "qwen3_moe"])
def test_export_and_reload(family: str, tokens: Tensor, tmp_path: Path) -> None:
    """Gemma2's norms after sublayers keep it from being cut into slices, and not from having tracks."""
    model = narrow_model(family, 2, 2, num_layers=3)
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
    surgeon.export(model, tmp_path / "tracks")
    shipped: Any = PROGRAM.shipped.model_class(model.config.model_type, tmp_path / "tracks")
    loaded = load(tmp_path / "tracks")
    assert program_of(loaded) == program_of(model)
    for written in (loaded, shipped.from_pretrained(tmp_path / "tracks").eval()):
        with torch.no_grad():
            torch.testing.assert_close(written(input_ids=tokens).logits, expected, rtol=1e-5, atol=1e-5)
        greedy = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 6, "do_sample": False}
        cached, uncached = (
            written.generate(tokens, use_cache=use, eos_token_id=None, **greedy) for use in (True, False)
        )
        assert torch.equal(cached, uncached)
