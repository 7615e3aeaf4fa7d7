"""Qwen's: Qwen2, Qwen3, Qwen3-MoE, Qwen3-Next, Qwen3.5, Qwen2-MoE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

from surgeon.models.families.base import AttentionWindow, ConfigEntries, Family, Norms, Positions
from surgeon.models.families.llama import LLAMA
from surgeon.models.families.mixtures import MIXTURE, ROUTED
from surgeon.models.families.specs import (
    HeadNorm,
    Projection,
    StreamNorm,
    SublayerSpec,
    route_by_config,
    shared_projections,
)

QWEN2 = replace(
    LLAMA,
    name="Qwen2",
    model_type="qwen2",
    summary="Llama's layout with biases on q, k and v, and sliding windows in some layers if configured.",
    window=AttentionWindow("sliding_window", "layer_types"),
)


QWEN3 = replace(
    LLAMA,
    name="Qwen3",
    model_type="qwen3",
    summary="Llama's layout with a norm on every head's query and key.",
    attention=replace(LLAMA.attention, heads=(HeadNorm(),)),
    window=AttentionWindow("sliding_window", "layer_types"),
)


def _is_dense(config: Any, layer: int) -> bool:
    return layer in config.mlp_only_layers or (layer + 1) % config.decoder_sparse_step != 0


def _qwen3_moe_variant(family: Family, config: Any) -> Family:
    dense = replace(LLAMA.mlp, width="intermediate_size")
    layers = [layer for layer in range(config.num_hidden_layers) if _is_dense(config, layer)]
    return family.with_spec("F", layers, dense)


def _follow_mlp(config: Any, sources: Sequence[int]) -> dict[str, Any]:
    dense = [place for place, source in enumerate(sources) if _is_dense(config, source)]
    return {"mlp_only_layers": dense, "decoder_sparse_step": 1}


QWEN3_MOE = replace(
    QWEN3,
    name="Qwen3-MoE",
    model_type="qwen3_moe",
    summary="Qwen3's attention, and mixtures of experts in most layers.",
    mlp=MIXTURE,
    intermediate="moe_intermediate_size",
    window=AttentionWindow("sliding_window"),
    entries=ConfigEntries(follow_mlp=_follow_mlp),
    variant=_qwen3_moe_variant,
)


# Linear attentions (gated delta nets, arXiv:2412.06464) have a state in place of keys and values; they stay.

GATED = replace(
    LLAMA.attention,
    projections=(
        Projection("q", "self_attn.q_proj", "heads", interleaved=True),
        Projection("g", "self_attn.q_proj", "heads", interleaved=True),
        *LLAMA.attention.projections[1:],
    ),
    heads=(HeadNorm(),),
    apart="what their heads give is multiplied by a gate, which no rank has",
)
_BESIDE = ("conv1d.weight", "dt_bias", "A_log", "norm.weight", "out_proj.weight")


def linear_attention(*projections: str) -> SublayerSpec:
    """A gated delta net with these projections of the stream."""
    return SublayerSpec(
        stages=(StreamNorm("input_layernorm"), "linear_attn"),
        projections=(),
        cache_slot="linear_attn.layer_idx",
        renamed=(
            ("past_key_values", "cache_params"),
            ("position_ids", None),
            ("position_embeddings", None),
        ),
        counted_by=(("layer_types", "full_attention"),),
        beside=tuple(
            f"linear_attn.{name}" for name in (*(f"{one}.weight" for one in projections), *_BESIDE)
        ),
        kept="they are linear attention, which stays as it is",
        apart="they are linear attention, whose state no rank keeps",
        numbers=_numbers,
    )


def _numbers(config: Any) -> int:
    """The parameters of a linear attention, and its norm's."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    heads = config.linear_num_value_heads
    width = config.linear_value_head_dim
    mixed = 2 * keys + heads * width
    projected = config.hidden_size * (mixed + 2 * heads * width + 2 * heads)
    return int(projected + mixed * config.linear_conv_kernel_dim + 2 * heads + width)


def with_linear_layers(family: Family, config: Any, base: Family, linear: SublayerSpec) -> Family:
    """A family whose configuration says which layers have linear attention; otherwise it varies as `base` does."""
    layers = [layer for layer, kind in enumerate(config.layer_types) if kind == "linear_attention"]
    return base.variant(family, config).with_spec("A", layers, linear)


WEIGHED = replace(
    MIXTURE,
    projections=(
        *MIXTURE.projections,
        *shared_projections("mlp.shared_expert"),
    ),
    mixture=replace(
        ROUTED,
        shared_router="mlp.shared_expert_gate",
        shared=attrgetter("shared_expert_intermediate_size"),
    ),
)

QWEN3_NEXT = replace(
    QWEN3_MOE,
    name="Qwen3-Next",
    model_type="qwen3_next",
    summary=(
        "linear attention in most layers, gated attention in the others, and mixtures with a gated shared expert."
    ),
    attention=GATED,
    mlp=WEIGHED,
    norms=Norms(unit_offset=True),
    positions=Positions(partial=True),
    window=AttentionWindow(),
    variant=partial(
        with_linear_layers,
        base=QWEN3_MOE,
        linear=linear_attention("in_proj_qkvz", "in_proj_ba"),
    ),
)


def _unfusable(_: Any) -> str:
    return "layers stored side by side have neither linear attention nor gates behind their heads"


QWEN3_5 = replace(
    QWEN3,
    name="Qwen3.5",
    model_type="qwen3_5_text",
    summary="Qwen3-Next with dense MLPs or with mixtures in all layers, its projections unpacked.",
    attention=GATED,
    norms=Norms(unit_offset=True),
    positions=Positions(partial=True),
    window=AttentionWindow(),
    variant=partial(
        with_linear_layers,
        base=QWEN3,
        linear=linear_attention("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    ),
    unfusable=_unfusable,
)
assert WEIGHED.mixture is not None
QWEN3_5_MOE = replace(
    QWEN3_5,
    name="Qwen3.5-MoE",
    model_type="qwen3_5_moe_text",
    mlp=replace(
        WEIGHED, mixture=replace(WEIGHED.mixture, routing=partial(route_by_config, normalise=True))
    ),
    intermediate="moe_intermediate_size",
)


QWEN2_MOE = replace(
    QWEN3_MOE,
    name="Qwen2-MoE",
    model_type="qwen2_moe",
    summary="Qwen2's attention, and mixtures of experts with a gated shared one in most layers.",
    attention=QWEN2.attention,
    mlp=WEIGHED,
    window=QWEN2.window,
)
