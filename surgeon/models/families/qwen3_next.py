"""Qwen3-Next: linear attention in most layers, gated attention in the others, and mixtures with a gated shared expert.

Linear attentions (gated delta nets, arXiv:2412.06464) have a state in place of keys and values; they stay as they are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from surgeon.models.families.base import Family
from surgeon.models.families.llama import LLAMA
from surgeon.models.families.mixtures import MIXTURE, ROUTED
from surgeon.models.families.qwen3_moe import QWEN3_MOE
from surgeon.models.families.specs import Projection, SublayerSpec

GATED = replace(
    LLAMA.attention,
    projections=(
        Projection("q", "self_attn.q_proj", "heads", interleaved=True),
        Projection("g", "self_attn.q_proj", "heads", interleaved=True),
        *LLAMA.attention.projections[1:],
    ),
    head_norms=("self_attn.q_norm", "self_attn.k_norm"),
    apart="what their heads give is multiplied by a gate, which no rank has",
)
_BESIDE = ("conv1d.weight", "dt_bias", "A_log", "norm.weight", "out_proj.weight")


def linear_attention(*projections: str) -> SublayerSpec:
    """A gated delta net with these projections of the stream."""
    return SublayerSpec(
        norm="input_layernorm",
        modules=("linear_attn",),
        projections=(),
        cache_slot="linear_attn.layer_idx",
        renamed=(("past_key_values", "cache_params"), ("position_ids", None), ("position_embeddings", None)),
        counted_by=(("layer_types", "full_attention"),),
        beside=tuple(f"linear_attn.{name}" for name in (*(f"{one}.weight" for one in projections), *_BESIDE)),
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


def _shared_neurons(config: Any) -> int:
    return int(config.shared_expert_intermediate_size)


def with_linear_layers(family: Family, config: Any, linear: SublayerSpec) -> Family:
    """A family whose configuration says which layers have linear attention."""
    layers = [layer for layer, kind in enumerate(config.layer_types) if kind == "linear_attention"]
    return replace(family, layer_specs=(*family.layer_specs, *(("A", layer, linear) for layer in layers)))


_LINEAR = linear_attention("in_proj_qkvz", "in_proj_ba")


def _variant(family: Family, config: Any) -> Family:
    return with_linear_layers(QWEN3_MOE.variant(family, config), config, _LINEAR)


WEIGHED = replace(
    MIXTURE,
    projections=(
        *MIXTURE.projections,
        Projection("shared_gate", "mlp.shared_expert.gate_proj", "shared_neurons"),
        Projection("shared_up", "mlp.shared_expert.up_proj", "shared_neurons"),
        Projection("shared_down", "mlp.shared_expert.down_proj", "shared_neurons", reads_stream=False),
    ),
    mixture=replace(ROUTED, shared_router="mlp.shared_expert_gate", shared=_shared_neurons),
)

QWEN3_NEXT = replace(
    QWEN3_MOE,
    name="Qwen3-Next",
    model_type="qwen3_next",
    attention=GATED,
    mlp=WEIGHED,
    unit_offset=True,
    partly_rotary=True,
    window=None,
    variant=_variant,
)
