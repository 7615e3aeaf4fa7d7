"""Llama, and those with its layout: SmolLM3, Granite, Seed-OSS, StarCoder2, StableLM, Llama 4."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

from surgeon.models.families.base import (
    AttentionWindow,
    ConfigEntries,
    Dropouts,
    Factor,
    Family,
    Norms,
    Positions,
    Scales,
)
from surgeon.models.families.specs import (
    Growth,
    HeadNorm,
    HeadStage,
    MixtureSpec,
    StreamNorm,
    SublayerSpec,
    attention_projections,
    gated_projections,
    plain_projections,
    route_by_config,
    shared_projections,
    stacked_experts,
)
from surgeon.words import show_value

LLAMA = Family(
    name="Llama",
    model_type="llama",
    summary="RMS norms, rotary positions, grouped KV heads, gated MLP.",
    layers="model.layers",
    embedding="model.embed_tokens",
    final_norm="model.norm",
    head="lm_head",
    attention=SublayerSpec(
        stages=(StreamNorm("input_layernorm"), "self_attn"),
        projections=attention_projections("self_attn"),
    ),
    mlp=SublayerSpec(
        stages=(StreamNorm("post_attention_layernorm"), "mlp"),
        projections=gated_projections("mlp"),
    ),
    activation="hidden_act",
    intermediate="intermediate_size",
)


def _smollm3_unsupported(config: Any) -> str | None:
    listed = len(config.no_rope_layers)
    layers = config.num_hidden_layers
    if listed != layers:
        return f"no_rope_layers has an entry for each of {listed} layers, and there are {layers}"
    return None


SMOLLM3 = replace(
    LLAMA,
    name="SmolLM3",
    model_type="smollm3",
    summary="Llama's layout; some layers have no positions at all, and windows if configured.",
    positions=Positions(layers="no_rope_layers"),  # 1 for a layer that has them, whatever the name says
    window=AttentionWindow("sliding_window", "layer_types"),
    entries=ConfigEntries(lists=("layer_types", "no_rope_layers")),
    unsupported=_smollm3_unsupported,
)


_FACTORS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


def _granite_unsupported(config: Any) -> str | None:
    for name in _FACTORS:
        factor = getattr(config, name)
        if not math.isfinite(factor) or factor == 0:
            return f"{name} must be a number other than 0, not {show_value(factor)}"
    return None


GRANITE = replace(
    LLAMA,
    name="Granite",
    model_type="granite",
    summary="Llama's layout, with factors on embeddings, attention scores, sublayer outputs and logits.",
    scales=Scales(
        embedding=Factor("embedding_multiplier"),
        attention=attrgetter("attention_multiplier"),
        output=Factor("residual_multiplier"),
        logits=Factor("logits_scaling", inverse=True),
    ),
    unsupported=_granite_unsupported,
)


SEED_OSS = replace(
    LLAMA,
    name="Seed-OSS",
    model_type="seed_oss",
    summary=(
        "Llama's layout, with heads of a width of their own, biases to configure, and dropout inside sublayers."
    ),
    dropout=Dropouts(module="residual_dropout"),
)


STARCODER2 = replace(
    LLAMA,
    name="StarCoder2",
    model_type="starcoder2",
    summary=(
        "Llama's attention with layer norms that have shifts, a plain MLP, biases; all layers may have windows."
    ),
    mlp=replace(LLAMA.mlp, projections=plain_projections("mlp.c_fc", "mlp.c_proj")),
    norms=Norms("layer", "norm_epsilon"),
    window=AttentionWindow("sliding_window"),
    dropout=Dropouts(module="residual_dropout", embedding="embedding_dropout"),
)


def _stablelm_variant(family: Family, config: Any) -> Family:
    """Put attention and MLP side by side behind one norm; keep attentions whose every head has a norm of its own."""
    attention = family.attention
    if config.qk_layernorm:
        heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
        norms = [
            f"self_attn.{role}_layernorm.norms.{head}" for role in heads for head in range(heads[role])
        ]
        attention = replace(
            attention,
            beside=tuple(f"{norm}.weight" for norm in norms),
            kept="each of their heads has a norm of its own",
            apart="each of their heads has a norm of its own, which no rank has",
            numbers=_numbers,
        )
    if not config.use_parallel_residual:
        return replace(family, attention=attention)
    mlp = replace(family.mlp, stages=(attention.stages[0], *family.mlp.modules))
    return replace(family, attention=attention, mlp=mlp, steps_per_layer=1, adds_in_turn=True)


def _numbers(config: Any) -> int:
    heads = config.num_attention_heads + config.num_key_value_heads
    return int(heads * config.hidden_size // config.num_attention_heads)


def _unfusable(config: Any) -> str | None:
    if config.qk_layernorm:
        return "layers stored side by side have no norm for each head"
    return None


STABLELM = replace(
    LLAMA,
    name="StableLM",
    model_type="stablelm",
    summary=(
        "Llama's layout with layer norms that have shifts, partly rotary; attention beside MLP if configured."
    ),
    attention=replace(LLAMA.attention, counts=("num_heads", "num_key_value_heads")),
    mlp=replace(LLAMA.mlp, stages=(*LLAMA.mlp.stages, "dropout")),
    norms=Norms("layer", "layer_norm_eps"),
    positions=Positions(partial=True),
    dropout=Dropouts(mlp="hidden_dropout"),
    heads_fill_stream=True,
    variant=_stablelm_variant,
    unfusable=_unfusable,
)


def _llama4_variant(family: Family, config: Any) -> Family:
    dense = [layer for layer in range(config.num_hidden_layers) if layer not in config.moe_layers]
    heads: list[HeadStage] = []
    if config.attn_temperature_tuning:
        heads.append(Growth(float(config.attn_scale), int(config.floor_scale), ahead=1, unturned=True))
    if config.use_qk_norm:
        heads.append(HeadNorm("none"))
    return family.with_spec("F", dense, _DENSE).with_heads(*heads)


def _follow_mlp(config: Any, sources: Sequence[int]) -> dict[str, Any]:
    return {"moe_layers": [place for place, source in enumerate(sources) if source in config.moe_layers]}


def _llama4_unsupported(config: Any) -> str | None:
    if not config.attention_chunk_size:
        return "its configuration has no attention_chunk_size"
    return _smollm3_unsupported(config)


_STAGES = (LLAMA.mlp.stages[0], "feed_forward")
_DENSE: SublayerSpec = replace(
    LLAMA.mlp,
    stages=_STAGES,
    projections=gated_projections("feed_forward"),
    width="intermediate_size_mlp",
)
_MIXTURE: SublayerSpec = replace(
    LLAMA.mlp,
    stages=_STAGES,
    projections=(
        *(replace(one, stored=None, transposed=True) for one in stacked_experts("feed_forward.experts")),
        *shared_projections("feed_forward.shared_expert"),
    ),
    counts=("experts.intermediate_size", "experts.expert_dim"),
    mixture=MixtureSpec(
        router="feed_forward.router",
        experts="feed_forward.experts",
        count="num_local_experts",
        routing=partial(route_by_config, scores="sigmoid"),
        counts=(
            "feed_forward.num_experts",
            "feed_forward.experts.num_experts",
            "feed_forward.router.num_experts",
        ),
        top_k=("feed_forward.top_k", "feed_forward.router.top_k"),
        shared=attrgetter("intermediate_size"),
        weighs_inputs=True,
        logits=1,
    ),
)

LLAMA4 = replace(
    LLAMA,
    name="Llama 4",
    model_type="llama4_text",
    summary=(
        "attentions over chunks, layers without positions, and mixtures whose experts read weighed inputs."
    ),
    mlp=_MIXTURE,
    positions=Positions(neighbours=True, layers="no_rope_layers"),
    window=AttentionWindow("attention_chunk_size", layers="layer_types", chunked=True),
    entries=replace(SMOLLM3.entries, follow_mlp=_follow_mlp),
    variant=_llama4_variant,
    unsupported=_llama4_unsupported,
)
