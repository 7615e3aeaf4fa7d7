"""Latent attention against the attentions of `transformers`, whole and as slices of its heads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import (
    DeepseekV2Attention,
    DeepseekV2RotaryEmbedding,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RotaryEmbedding,
)

from surgeon.models.families import FAMILIES
from surgeon.models.families.specs import Latent
from surgeon.runtime.kernels.functions import Weighting
from surgeon.runtime.model.attending import Pass, attention, rotation
from surgeon.runtime.model.layers import Attention, LatentMaps
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.specification import Plan, Rotary
from tests.tiny_models import HIDDEN, tiny_model

TOKENS, HEADS = 7, 4
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 8,
    "v_head_dim": 10,
    "num_hidden_layers": 1,
    "vocab_size": 97,
    "attn_implementation": "eager",
}
CASES = {
    "v2": (
        DeepseekV2Config,
        DeepseekV2Attention,
        DeepseekV2RotaryEmbedding,
        {"q_lora_rank": None},
        True,
    ),
    "v2, queries of a latent": (
        *(DeepseekV2Config, DeepseekV2Attention, DeepseekV2RotaryEmbedding),
        *({"q_lora_rank": 12, "attention_bias": True}, True),
    ),
    "v3": (DeepseekV3Config, DeepseekV3Attention, DeepseekV3RotaryEmbedding, {"q_lora_rank": 12}, True),
    "v3, halves": (
        *(DeepseekV3Config, DeepseekV3Attention, DeepseekV3RotaryEmbedding),
        *({"q_lora_rank": None, "attention_bias": True, "rope_interleave": False}, False),
    ),
}


def attend(_: int, queries: Tensor, kept: Tensor, weighting: Weighting) -> Tensor:
    """Of one text, over itself; queries (T, H, D), keys and behind them values (T, 2 * H, D)."""
    keys, values = kept.transpose(0, 1)[None].chunk(2, 1)
    found = attention(queries.transpose(0, 1)[None], keys, values, weighting, causal=True)
    return found[0].transpose(0, 1).flatten(1)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder: Path = tmp_path_factory.mktemp("latent")
    tiny_model("llama").save_pretrained(folder)
    return make_plan(folder, 1, 8)


@pytest.mark.parametrize("slices", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_attentions_of_transformers(name: str, slices: int, plan: Plan) -> None:
    config_class, attention_class, rotary_class, own, neighbours = CASES[name]
    config = config_class(**SIZES | own)
    theirs, turns = attention_class(config, 0).eval(), rotary_class(config)
    generator = torch.Generator().manual_seed(2)
    stored = {}
    for path, parameter in theirs.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(1 + 0.3 * noise if "norm" in path else noise / parameter.shape[-1] ** 0.5)
        stored[path] = parameter
    stored["norm.weight"] = torch.ones(HIDDEN)
    x = torch.nn.functional.rms_norm(
        torch.randn(1, TOKENS, HIDDEN, generator=generator), (HIDDEN,), None, plan.arithmetic.epsilon
    )
    positions = torch.arange(TOKENS)[None]
    mask = torch.full((TOKENS, TOKENS), float("-inf")).triu(1)[None, None]
    expected, _ = theirs(x, position_embeddings=turns(x, positions), attention_mask=mask)
    latent = Latent(HEADS, 14, 6, 10, 16, config.q_lora_rank, neighbours)
    own_plan = replace(plan, head_dim=latent.width, latent=latent)
    rotary = Rotary(tuple(turns.inv_freq.tolist()), turns.attention_scaling)
    angles = rotation(rotary, TOKENS, x)
    found = torch.zeros(TOKENS, HIDDEN)
    for index in range(slices):
        maps = LatentMaps(stored, latent, own_plan, (index, slices) if slices > 1 else None)
        made = Attention(maps.tensors, maps, FAMILIES["llama"].attention, own_plan, None, 0)
        assert made.heads == made.kv_heads == HEADS // slices
        found += made(x[0], 0, Pass(attend, (angles,)))
    torch.testing.assert_close(found, expected[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
def test_scores_of_longer_texts(model_type: str) -> None:
    """Yarn multiplies them by more than 1 / sqrt(D)."""
    config_class, attention_class, *_ = CASES[model_type.removeprefix("deepseek_")]
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7}
    rope |= {"original_max_position_embeddings": 64}
    config = config_class(**SIZES | {"rope_parameters": rope, "q_lora_rank": None})
    assert FAMILIES[model_type].scales.attention(config) == pytest.approx(
        attention_class(config, 0).scaling
    )
    plain = config_class(**SIZES | {"q_lora_rank": None})
    assert FAMILIES[model_type].scales.attention(plain) is None
