"""Qwen2: Llama's layout with biases on q, k and v, and sliding windows in some layers if configured."""

from dataclasses import replace

from surgeon.models.families.llama import LLAMA

QWEN2 = replace(LLAMA, name="Qwen2", model_type="qwen2", window="sliding_window", window_layers="layer_types")
