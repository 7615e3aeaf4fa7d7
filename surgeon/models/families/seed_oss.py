"""Seed-OSS: Llama's layout, with heads of a width of their own, biases to configure, and dropout inside sublayers."""

from dataclasses import replace
from typing import Any

from surgeon.models.families.llama import LLAMA


def _unfused(fused: Any) -> dict[str, Any]:
    return LLAMA.unfused(fused) | {"attention_bias": fused.qkv_bias, "attention_out_bias": fused.o_bias}


SEED_OSS = replace(LLAMA, name="Seed-OSS", model_type="seed_oss", module_dropout="residual_dropout", unfused=_unfused)
