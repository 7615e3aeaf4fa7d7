"""Gemma2: norms after sublayers too, gains stored as 1 + weight, windows in every other layer, capped logits."""

from dataclasses import replace

from surgeon.families.llama import LLAMA

GEMMA2 = replace(
    LLAMA,
    name="Gemma2",
    model_type="gemma2",
    attention=replace(
        LLAMA.attention,
        modules=("self_attn", "post_attention_layernorm"),
        post_norm="post_attention_layernorm",
    ),
    mlp=replace(
        LLAMA.mlp,
        norm="pre_feedforward_layernorm",
        modules=("mlp", "post_feedforward_layernorm"),
        post_norm="post_feedforward_layernorm",
    ),
    unit_offset=True,
    activation="hidden_activation",
    softcap="final_logit_softcapping",
    attention_softcap="attn_logit_softcapping",
    window="sliding_window",
    window_layers="layer_types",
    scaled_embedding=True,
)
