"""GPT-2 and those after it: GPT-Neo, GPT-J, GPT-NeoX, Falcon."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from surgeon.models.families.base import (
    AttentionWindow,
    ConfigEntries,
    Dropouts,
    Family,
    Norms,
    Positions,
    Scales,
)
from surgeon.models.families.phi import PHI
from surgeon.models.families.specs import (
    StreamNorm,
    SublayerSpec,
    attention_projections,
    plain_projections,
)


def _gpt2_unsupported(config: Any) -> str | None:
    if config.add_cross_attention:
        return "it attends to an encoder (add_cross_attention)"
    if config.scale_attn_by_inverse_layer_idx:
        return (
            "its attention depends on the layer's number (scale_attn_by_inverse_layer_idx); give its folder, or what "
            "surgeon.load makes of it, where queries are divided by that instead"
        )
    return None


def _gpt2_attention_scale(config: Any) -> float | None:
    if config.scale_attn_weights:
        return None
    return 1.0


GPT2 = Family(
    name="GPT-2",
    model_type="gpt2",
    summary="layer norms with shifts, learned positions, transposed weights, q, k, v packed.",
    layers="transformer.h",
    embedding="transformer.wte",
    final_norm="transformer.ln_f",
    head="lm_head",
    attention=SublayerSpec(
        stages=(StreamNorm("ln_1"), "attn"),
        projections=attention_projections("attn", "c_attn", "c_proj", kv="heads", transposed=True),
        counts=("split_size", "c_attn.nf"),
        cache_slot="attn.layer_idx",
    ),
    mlp=SublayerSpec(
        stages=(StreamNorm("ln_2"), "mlp"),
        projections=plain_projections("mlp.c_fc", "mlp.c_proj", transposed=True),
        counts=("c_fc.nf",),
    ),
    activation="activation_function",
    intermediate="n_inner",
    norms=Norms("layer", "layer_norm_epsilon"),
    positions=Positions("transformer.wpe"),
    scales=Scales(attention=_gpt2_attention_scale),
    dropout=Dropouts(module="resid_pdrop", attention="attn_pdrop", embedding="embd_pdrop"),
    entries=ConfigEntries(counts=("num_hidden_layers", "n_layer")),
    heads_fill_stream=True,
    arguments=("past_key_values", "attention_mask", "encoder_hidden_states"),
    unsupported=_gpt2_unsupported,
)


def _follow(config: Any, sources: Sequence[int]) -> dict[str, Any]:
    return {"attention_types": [[[config.attention_layers[k]], 1] for k in sources]}


def _gpt_neo_attention_scale(_: Any) -> float:
    return 1.0


GPT_NEO = Family(
    name="GPT-Neo",
    model_type="gpt_neo",
    summary=(
        "GPT-2's functions in plain linear layers, unscaled attention, and local windows in some layers."
    ),
    layers="transformer.h",
    embedding="transformer.wte",
    final_norm="transformer.ln_f",
    head="lm_head",
    attention=SublayerSpec(
        stages=(StreamNorm("ln_1"), "attn"),
        projections=attention_projections("attn.attention", o="out_proj", kv="heads"),
        counts=("attention.num_heads",),
        cache_slot="attn.attention.layer_id",
    ),
    mlp=SublayerSpec(
        stages=(StreamNorm("ln_2"), "mlp"),
        projections=plain_projections("mlp.c_fc", "mlp.c_proj"),
    ),
    activation="activation_function",
    intermediate="intermediate_size",
    norms=GPT2.norms,
    positions=GPT2.positions,
    window=AttentionWindow("window_size", layers="attention_layers"),
    scales=Scales(attention=_gpt_neo_attention_scale),
    dropout=Dropouts(module="resid_dropout", embedding="embed_dropout"),
    entries=ConfigEntries(
        counts=("num_hidden_layers", "num_layers", "attention_types"),
        lists=("layer_types", "attention_layers"),
        follow=_follow,
    ),
    heads_fill_stream=True,
    returns_tuple=True,
)


def _gptj_unsupported(config: Any) -> str | None:
    turned = config.rotary_dim
    most = config.hidden_size // config.num_attention_heads
    if not 0 < turned <= most or turned % 2:
        return f"rotary_dim must be an even number, of a head's {most} features, not {turned}"
    return None


def _rope(config: Any) -> dict[str, Any]:
    turned = config.rotary_dim
    features = config.hidden_size // config.num_attention_heads
    part = turned / features
    if int(features * part) < turned:  # it was rounded down
        part = math.nextafter(part, 1.0)
    return {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": part}


GPTJ = replace(
    PHI,
    name="GPT-J",
    model_type="gptj",
    summary=(
        "attention beside a plain MLP behind one layer norm; neighbouring features turn, in a part of each head's."
    ),
    layers="transformer.h",
    embedding="transformer.wte",
    final_norm="transformer.ln_f",
    attention=replace(
        GPT2.attention,
        projections=attention_projections("attn", o="out_proj", kv="heads"),
        counts=("num_attention_heads",),
    ),
    mlp=replace(
        PHI.mlp,
        stages=(GPT2.attention.stages[0], "mlp"),
        projections=plain_projections("mlp.fc_in", "mlp.fc_out"),
    ),
    activation=GPT2.activation,
    intermediate=GPT2.intermediate,
    norms=GPT2.norms,
    positions=Positions(partial=True, neighbours=True, rope=_rope),
    dropout=GPT2.dropout,
    entries=GPT2.entries,
    heads_fill_stream=True,
    returns_tuple=True,
    unsupported=_gptj_unsupported,
)


def _gpt_neox_variant(family: Family, config: Any) -> Family:
    return replace(family, steps_per_layer=1 if config.use_parallel_residual else 2)


GPT_NEOX = Family(
    name="GPT-NeoX",
    model_type="gpt_neox",
    summary="attention and MLP read the same stream, q, k, v packed head by head, partly rotary.",
    layers="gpt_neox.layers",
    embedding="gpt_neox.embed_in",
    final_norm="gpt_neox.final_layer_norm",
    head="lm_head",
    attention=SublayerSpec(
        stages=(StreamNorm("input_layernorm"), "attention"),
        projections=attention_projections(
            "attention", "query_key_value", "dense", kv="heads", interleaved=True
        ),
        cache_slot="attention.layer_idx",
    ),
    mlp=SublayerSpec(
        stages=(StreamNorm("post_attention_layernorm"), "mlp"),
        projections=plain_projections("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    ),
    activation="hidden_act",
    intermediate="intermediate_size",
    norms=Norms("layer", "layer_norm_eps"),
    positions=Positions(partial=True),
    dropout=Dropouts("hidden_dropout", embedding="hidden_dropout"),
    stored_head="embed_out",
    heads_fill_stream=True,
    steps_per_layer=1,
    variant=_gpt_neox_variant,
)


def _falcon_unsupported(config: Any) -> str | None:
    if config.alibi:
        return "its positions are ALiBi's (alibi is true, as in falcon-rw)"
    drops = config.hidden_dropout or (config.attention_dropout and not _beside(config))
    if drops:
        return f"it drops sums of sublayers while training; set hidden_dropout and attention_dropout to 0, not {drops}"
    new = config.new_decoder_architecture
    norms = config.num_ln_in_parallel_attn
    if new and not config.parallel_attn:
        return "parallel_attn is false beside new_decoder_architecture, which no class computes"
    if norms not in ((None, 1, 2) if new else (None, 1)) and config.parallel_attn:
        return f"num_ln_in_parallel_attn must be 1, or 2 with new_decoder_architecture, not {norms}"
    if not (new or config.multi_query) and config.num_kv_heads != config.num_attention_heads:
        return (
            f"num_kv_heads must be {config.num_attention_heads}, as its heads, not {config.num_kv_heads}"
        )
    return None


def _beside(config: Any) -> bool:
    return bool(config.new_decoder_architecture or config.parallel_attn)


def _falcon_variant(family: Family, config: Any) -> Family:
    """Place norms and KV heads as Falcon 40B and 180B, or models older than 7B, have them."""
    attention = family.attention
    mlp = family.mlp
    steps = 1
    if not _beside(config):
        mlp = GPT_NEOX.mlp
        steps = 2
    elif config.new_decoder_architecture and config.num_ln_in_parallel_attn != 1:
        attention = replace(attention, stages=(StreamNorm("ln_attn"), "self_attention"))
        mlp = replace(mlp, stages=(StreamNorm("ln_mlp"), "mlp"))
    one = config.multi_query and not config.new_decoder_architecture
    return replace(
        family,
        attention=attention,
        mlp=mlp,
        steps_per_layer=steps,
        kv_heads=1 if one else "num_kv_heads",
    )


FALCON = replace(
    GPT_NEOX,
    name="Falcon",
    model_type="falcon",
    summary=(
        "attention beside a plain MLP, behind one layer norm or one each; q, k, v packed KV group by KV group."
    ),
    layers="transformer.h",
    embedding="transformer.word_embeddings",
    final_norm="transformer.ln_f",
    attention=replace(
        GPT_NEOX.attention,
        stages=(StreamNorm("input_layernorm"), "self_attention"),
        projections=attention_projections(
            "self_attention", "query_key_value", "dense", interleaved=True
        ),
        counts=("num_heads", "num_kv_heads"),
        cache_slot="self_attention.layer_idx",
    ),
    mlp=replace(GPT_NEOX.mlp, stages=(StreamNorm("input_layernorm"), "mlp")),
    activation="activation",
    intermediate="ffn_hidden_size",
    norms=GPT2.norms,
    positions=Positions(),
    dropout=Dropouts(attention=None),
    kv_heads=1,
    stored_head=None,
    returns_tuple=True,
    unsupported=_falcon_unsupported,
    variant=_falcon_variant,
)
