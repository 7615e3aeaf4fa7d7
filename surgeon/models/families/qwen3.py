"""Qwen3: Llama's layout with a norm on every head's query and key."""

from dataclasses import replace

from surgeon.models.families.llama import LLAMA

QWEN3 = replace(
    LLAMA,
    name="Qwen3",
    model_type="qwen3",
    attention=replace(LLAMA.attention, head_norms=("self_attn.q_norm", "self_attn.k_norm")),
    window="sliding_window",
    window_layers="layer_types",
)
