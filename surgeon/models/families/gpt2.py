"""GPT-2: layer norms with shifts, learned positions, transposed weights, q, k, v packed."""

from typing import Any

from surgeon.models.families.base import Family
from surgeon.models.families.specs import Projection, SublayerSpec


def _unsupported(config: Any) -> str | None:
    if config.add_cross_attention:
        return "it attends to an encoder (add_cross_attention)"
    if config.scale_attn_by_inverse_layer_idx:
        return (
            "its attention depends on the layer's number (scale_attn_by_inverse_layer_idx); give its folder, or what "
            "surgeon.load makes of it, where queries are divided by that instead"
        )
    return None


def _attention_scale(config: Any) -> float | None:
    if config.scale_attn_weights:
        return None
    return 1.0


def _unfused(fused: Any) -> dict[str, Any]:
    return {"scale_attn_weights": fused.attention_scaling != 1.0 or fused.head_dim == 1}


GPT2 = Family(
    name="GPT-2",
    model_type="gpt2",
    layers="transformer.h",
    embedding="transformer.wte",
    final_norm="transformer.ln_f",
    head="lm_head",
    attention=SublayerSpec(
        norm="ln_1",
        modules=("attn",),
        projections=(
            Projection("q", "attn.c_attn", "heads", transposed=True),
            Projection("k", "attn.c_attn", "heads", transposed=True),
            Projection("v", "attn.c_attn", "heads", transposed=True),
            Projection("o", "attn.c_proj", "heads", reads_stream=False, transposed=True),
        ),
        counts=("split_size", "c_attn.nf"),
        cache_slot="attn.layer_idx",
    ),
    mlp=SublayerSpec(
        norm="ln_2",
        modules=("mlp",),
        projections=(
            Projection("up", "mlp.c_fc", "neurons", transposed=True),
            Projection("down", "mlp.c_proj", "neurons", reads_stream=False, transposed=True),
        ),
        counts=("c_fc.nf",),
    ),
    norm_kind="layer",
    norm_epsilon="layer_norm_epsilon",
    activation="activation_function",
    intermediate="n_inner",
    gated=False,
    rotary=False,
    position_embedding="transformer.wpe",
    layer_counts=("num_hidden_layers", "n_layer"),
    module_dropout="resid_pdrop",
    attention_dropout="attn_pdrop",
    embedding_dropout="embd_pdrop",
    attention_scale=_attention_scale,
    heads_fill_stream=True,
    arguments=("past_key_values", "attention_mask", "encoder_hidden_states"),
    unsupported=_unsupported,
    unfused=_unfused,
)
