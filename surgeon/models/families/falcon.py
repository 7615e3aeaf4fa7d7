"""Falcon: attention beside a plain MLP, behind one layer norm or one each; q, k, v packed KV group by KV group."""

from dataclasses import replace
from typing import Any

from surgeon.models.families.base import Family
from surgeon.models.families.gpt_neox import GPT_NEOX
from surgeon.models.families.specs import Projection


def _unsupported(config: Any) -> str | None:
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
        return f"num_kv_heads must be {config.num_attention_heads}, as its heads, not {config.num_kv_heads}"
    return None


def _beside(config: Any) -> bool:
    return bool(config.new_decoder_architecture or config.parallel_attn)


def _variant(family: Family, config: Any) -> Family:
    """Norms, their order and KV heads are otherwise in Falcon 40B and 180B, and in older models than 7B."""
    attention = family.attention
    mlp = family.mlp
    if not _beside(config):
        mlp = replace(mlp, norm="post_attention_layernorm")
    elif config.new_decoder_architecture and config.num_ln_in_parallel_attn != 1:
        attention = replace(attention, norm="ln_attn")
        mlp = replace(mlp, norm="ln_mlp")
    one = config.multi_query and not config.new_decoder_architecture
    steps = 1 if _beside(config) else 2
    return replace(family, attention=attention, mlp=mlp, steps_per_layer=steps, kv_heads=1 if one else "num_kv_heads")


def _unfused(fused: Any) -> dict[str, Any]:
    kv_heads = fused.num_key_value_heads
    beside = fused.parallel_residual
    return {
        "bias": fused.qkv_bias or fused.o_bias or fused.up_bias or fused.down_bias,
        "new_decoder_architecture": beside,  # which has room for all norms that there may be
        "parallel_attn": beside,
        "num_kv_heads": kv_heads,
        "multi_query": kv_heads == 1,
    }


FALCON = replace(
    GPT_NEOX,
    name="Falcon",
    model_type="falcon",
    layers="transformer.h",
    embedding="transformer.word_embeddings",
    final_norm="transformer.ln_f",
    attention=replace(
        GPT_NEOX.attention,
        modules=("self_attention",),
        projections=(
            Projection("q", "self_attention.query_key_value", "heads", interleaved=True),
            Projection("k", "self_attention.query_key_value", "kv_heads", interleaved=True),
            Projection("v", "self_attention.query_key_value", "kv_heads", interleaved=True),
            Projection("o", "self_attention.dense", "heads", reads_stream=False),
        ),
        counts=("num_heads", "num_kv_heads"),
        cache_slot="self_attention.layer_idx",
    ),
    mlp=replace(GPT_NEOX.mlp, norm=GPT_NEOX.attention.norm),
    norm_epsilon="layer_norm_epsilon",
    activation="activation",
    intermediate="ffn_hidden_size",
    kv_heads=1,
    partly_rotary=False,
    stored_head=None,
    dropout=None,
    attention_dropout=None,
    embedding_dropout=None,
    returns_tuple=True,
    unsupported=_unsupported,
    variant=_variant,
    unfused=_unfused,
)
