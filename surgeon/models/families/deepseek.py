"""DeepSeek-V2 and V3: attentions over compressed keys and values, and mixtures with shared experts behind dense layers.

Heads have one small latent in common (multi-head latent attention, DeepSeek-V2, section 2.1), so that attentions are
kept as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import log
from typing import Any

from surgeon.models.families.base import ConfigEntries, Family, Scales
from surgeon.models.families.llama import LLAMA
from surgeon.models.families.mixtures import MIXTURE, ROUTED
from surgeon.models.families.specs import Latent, SublayerSpec, shared_projections
from surgeon.models.routing import Routing

_ATTENTION = (
    "q_proj",
    "q_a_proj",
    "q_a_layernorm",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_a_layernorm",
    "kv_b_proj",
)


def _latent(config: Any) -> Latent:
    return Latent(
        heads=int(config.num_attention_heads),
        width=int(config.qk_nope_head_dim + config.qk_rope_head_dim),
        turned=int(config.qk_rope_head_dim),
        value=int(config.v_head_dim),
        rank=int(config.kv_lora_rank),
        query_rank=config.q_lora_rank,
        neighbours=bool(getattr(config, "rope_interleave", True)),
    )


def _scale(config: Any) -> float | None:
    """Scale attention more in longer texts (yarn), as its `mscale_all_dim` says."""
    rope = config.rope_parameters
    if (
        rope.get("rope_type", "default") == "default"
        or not rope.get("mscale_all_dim")
        or rope["factor"] <= 1
    ):
        return None
    more = 0.1 * rope["mscale_all_dim"] * log(rope["factor"]) + 1.0
    return float(more**2 * (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5)


def _shared_neurons(config: Any) -> int:
    return int(config.moe_intermediate_size * config.n_shared_experts)


def _read_routing(config: Any) -> Routing:
    return Routing(
        int(config.num_experts_per_tok),
        "sigmoid",
        normalise=bool(config.norm_topk_prob),
        scale=float(config.routed_scaling_factor),
        groups=int(config.n_group or 1),
        top_groups=int(config.topk_group or 1),
        group_best=2,
    )


def _routing_v2(config: Any) -> Routing:
    limited = config.topk_method == "group_limited_greedy"
    return Routing(
        int(config.num_experts_per_tok),
        scale=float(config.routed_scaling_factor),
        groups=int(config.n_group) if limited else 1,
        top_groups=int(config.topk_group) if limited else 1,
    )


def _reason_against(config: Any) -> str | None:
    if config.num_experts_per_tok is None:
        return "its configuration has no num_experts_per_tok"
    return None


def _variant(family: Family, config: Any) -> Family:
    dense = replace(LLAMA.mlp, width="intermediate_size")
    first = min(config.first_k_dense_replace, config.num_hidden_layers)
    return family.with_spec("F", range(first), dense)


def _follow_mlp(config: Any, sources: Sequence[int]) -> dict[str, Any]:
    dense = [source < config.first_k_dense_replace for source in sources]
    if dense != sorted(dense, reverse=True):
        raise ValueError(
            "its dense layers come first in every configuration, and here a mixture stands before one"
        )
    return {"first_k_dense_replace": sum(dense)}


_ROUTED = replace(
    ROUTED,
    count="n_routed_experts",
    routing=_read_routing,
    correction="mlp.gate.e_score_correction_bias",
    shared=_shared_neurons,
)
_MIXTURE = replace(
    MIXTURE,
    projections=(
        *MIXTURE.projections,
        *shared_projections("mlp.shared_experts"),
    ),
    mixture=_ROUTED,
)

DEEPSEEK_V3 = replace(
    LLAMA,
    name="DeepSeek-V3",
    model_type="deepseek_v3",
    summary=(
        "attentions over compressed keys and values, and mixtures with shared experts behind dense layers."
    ),
    attention=SublayerSpec(
        stages=LLAMA.attention.stages,
        projections=(),
        beside=tuple(
            f"self_attn.{name}.{part}" for name in (*_ATTENTION, "o_proj") for part in ("weight", "bias")
        ),
        kept="their heads share compressed keys and values",
        latent=_latent,
    ),
    mlp=_MIXTURE,
    intermediate="moe_intermediate_size",
    scales=Scales(attention=_scale),
    entries=ConfigEntries(follow_mlp=_follow_mlp),
    variant=_variant,
    unsupported=_reason_against,
)

DEEPSEEK_V2 = replace(
    DEEPSEEK_V3,
    name="DeepSeek-V2",
    model_type="deepseek_v2",
    mlp=replace(_MIXTURE, mixture=replace(_ROUTED, routing=_routing_v2, correction=None)),
)
