"""GPT-NeoX and Pythia: attention and MLP read the same stream, q, k, v packed head by head, partly rotary."""

from dataclasses import replace
from typing import Any

from surgeon.models.families.base import Family
from surgeon.models.families.specs import Projection, SublayerSpec


def _variant(family: Family, config: Any) -> Family:
    """Some models of the family run attention and MLP one after the other."""
    return replace(family, steps_per_layer=1 if config.use_parallel_residual else 2)


def _unfused(fused: Any) -> dict[str, Any]:
    return {"use_parallel_residual": fused.parallel_residual, "attention_bias": fused.qkv_bias or fused.o_bias}


GPT_NEOX = Family(
    name="GPT-NeoX",
    model_type="gpt_neox",
    layers="gpt_neox.layers",
    embedding="gpt_neox.embed_in",
    final_norm="gpt_neox.final_layer_norm",
    head="lm_head",
    attention=SublayerSpec(
        norm="input_layernorm",
        modules=("attention",),
        projections=(
            Projection("q", "attention.query_key_value", "heads", interleaved=True),
            Projection("k", "attention.query_key_value", "heads", interleaved=True),
            Projection("v", "attention.query_key_value", "heads", interleaved=True),
            Projection("o", "attention.dense", "heads", reads_stream=False),
        ),
        cache_slot="attention.layer_idx",
    ),
    mlp=SublayerSpec(
        norm="post_attention_layernorm",
        modules=("mlp",),
        projections=(
            Projection("up", "mlp.dense_h_to_4h", "neurons"),
            Projection("down", "mlp.dense_4h_to_h", "neurons", reads_stream=False),
        ),
    ),
    norm_kind="layer",
    norm_epsilon="layer_norm_eps",
    activation="hidden_act",
    intermediate="intermediate_size",
    gated=False,
    rotary=True,
    partly_rotary=True,
    stored_head="embed_out",
    dropout="hidden_dropout",
    embedding_dropout="hidden_dropout",
    heads_fill_stream=True,
    steps_per_layer=1,
    variant=_variant,
    unfused=_unfused,
)
