"""OLMo2: Llama's layout with norms behind sublayers in place of those before, and norms of all queries and all keys."""

from dataclasses import replace

from surgeon.models.families.llama import LLAMA

OLMO2 = replace(
    LLAMA,
    name="OLMo2",
    model_type="olmo2",
    attention=replace(
        LLAMA.attention,
        norm=None,
        modules=("self_attn", "post_attention_layernorm"),
        head_norms=("self_attn.q_norm", "self_attn.k_norm"),
        norms_all_heads=True,
        post_norm="post_attention_layernorm",
    ),
    mlp=replace(
        LLAMA.mlp,
        norm=None,
        modules=("mlp", "post_feedforward_layernorm"),
        post_norm="post_feedforward_layernorm",
    ),
)
