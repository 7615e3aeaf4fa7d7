"""Phi3: Llama's functions with q, k, v packed into one projection, and gate and up into another."""

from dataclasses import replace

from surgeon.models.families.llama import LLAMA
from surgeon.models.families.specs import Projection

PHI3 = replace(
    LLAMA,
    name="Phi3",
    model_type="phi3",
    attention=replace(
        LLAMA.attention,
        projections=(
            Projection("q", "self_attn.qkv_proj", "heads"),
            Projection("k", "self_attn.qkv_proj", "kv_heads"),
            Projection("v", "self_attn.qkv_proj", "kv_heads"),
            Projection("o", "self_attn.o_proj", "heads", reads_stream=False),
        ),
        # It tells queries, keys and values apart by these counts.
        counts=("config.num_attention_heads", "num_key_value_heads"),
    ),
    mlp=replace(
        LLAMA.mlp,
        projections=(
            Projection("gate", "mlp.gate_up_proj", "neurons"),
            Projection("up", "mlp.gate_up_proj", "neurons"),
            Projection("down", "mlp.down_proj", "neurons", reads_stream=False),
        ),
    ),
    partly_rotary=True,
    computes_anew=True,
    dropout="resid_pdrop",
    window="sliding_window",
)
