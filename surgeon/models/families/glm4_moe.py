"""GLM-4.5 with experts: Llama's attention, a part of whose features turns, and DeepSeek-V3's mixtures.

Heads of queries and keys are normed where the configuration says so.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from surgeon.models.families.base import Family
from surgeon.models.families.deepseek import DEEPSEEK_V3
from surgeon.models.families.llama import LLAMA
from surgeon.models.families.qwen3 import QWEN3


def _variant(family: Family, config: Any) -> Family:
    attention = QWEN3.attention if config.use_qk_norm else LLAMA.attention
    return replace(DEEPSEEK_V3.variant(family, config), attention=attention)


GLM4_MOE = replace(
    LLAMA,
    name="GLM-4.5-MoE",
    model_type="glm4_moe",
    mlp=DEEPSEEK_V3.mlp,
    intermediate=DEEPSEEK_V3.intermediate,
    partly_rotary=True,
    variant=_variant,
    follow_mlp=DEEPSEEK_V3.follow_mlp,
)
