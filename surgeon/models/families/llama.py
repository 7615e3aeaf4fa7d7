"""Llama 1, 2, 3: RMS norms, rotary positions, grouped KV heads, gated MLP."""

from typing import Any

from surgeon.models.families.base import Family
from surgeon.models.families.specs import Projection, SublayerSpec


def _unfused(fused: Any) -> dict[str, Any]:
    biases = {"attention_bias": fused.qkv_bias or fused.o_bias, "mlp_bias": fused.up_bias or fused.down_bias}
    return biases | {"use_sliding_window": fused.sliding_window is not None}


LLAMA = Family(
    name="Llama",
    model_type="llama",
    layers="model.layers",
    embedding="model.embed_tokens",
    final_norm="model.norm",
    head="lm_head",
    attention=SublayerSpec(
        norm="input_layernorm",
        modules=("self_attn",),
        projections=(
            Projection("q", "self_attn.q_proj", "heads"),
            Projection("k", "self_attn.k_proj", "kv_heads"),
            Projection("v", "self_attn.v_proj", "kv_heads"),
            Projection("o", "self_attn.o_proj", "heads", reads_stream=False),
        ),
    ),
    mlp=SublayerSpec(
        norm="post_attention_layernorm",
        modules=("mlp",),
        projections=(
            Projection("gate", "mlp.gate_proj", "neurons"),
            Projection("up", "mlp.up_proj", "neurons"),
            Projection("down", "mlp.down_proj", "neurons", reads_stream=False),
        ),
    ),
    norm_kind="rms",
    norm_epsilon="rms_norm_eps",
    activation="hidden_act",
    intermediate="intermediate_size",
    gated=True,
    rotary=True,
    unfused=_unfused,
)
