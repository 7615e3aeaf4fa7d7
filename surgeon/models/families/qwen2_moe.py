"""Qwen2-MoE: Qwen2's attention, and mixtures of experts with a gated shared one in most layers."""

from dataclasses import replace

from surgeon.models.families.qwen2 import QWEN2
from surgeon.models.families.qwen3_moe import QWEN3_MOE
from surgeon.models.families.qwen3_next import WEIGHED

QWEN2_MOE = replace(
    QWEN3_MOE,
    name="Qwen2-MoE",
    model_type="qwen2_moe",
    attention=QWEN2.attention,
    mlp=WEIGHED,
    window_layers=QWEN2.window_layers,
)
