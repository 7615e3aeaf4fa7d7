"""GLM's: GLM, GLM-4, GLM-4.5 with experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from surgeon.models.families.base import Family, Positions
from surgeon.models.families.deepseek import DEEPSEEK_V3
from surgeon.models.families.llama import LLAMA
from surgeon.models.families.phi import PHI3
from surgeon.models.families.qwen import QWEN3
from surgeon.models.families.specs import StreamNorm

GLM = replace(
    LLAMA,
    name="GLM",
    model_type="glm",
    summary=(
        "Llama's functions with gate and up packed into one projection; neighbouring features turn, half of a head's."
    ),
    mlp=PHI3.mlp,
    positions=Positions(partial=True, neighbours=True),
)


GLM4 = replace(
    GLM,
    name="GLM-4",
    model_type="glm4",
    summary="GLM with norms after sublayers, too.",
    attention=replace(
        GLM.attention, stages=(*GLM.attention.stages, StreamNorm("post_self_attn_layernorm"))
    ),
    mlp=replace(GLM.mlp, stages=(*GLM.mlp.stages, StreamNorm("post_mlp_layernorm"))),
)


# Heads of queries and keys are normed where the configuration says so.


def _variant(family: Family, config: Any) -> Family:
    if config.use_qk_norm:
        attention = QWEN3.attention
    else:
        attention = LLAMA.attention
    return replace(DEEPSEEK_V3.variant(family, config), attention=attention)


GLM4_MOE = replace(
    LLAMA,
    name="GLM-4.5-MoE",
    model_type="glm4_moe",
    summary="Llama's attention, a part of whose features turns, and DeepSeek-V3's mixtures.",
    mlp=DEEPSEEK_V3.mlp,
    intermediate=DEEPSEEK_V3.intermediate,
    positions=Positions(partial=True),
    entries=DEEPSEEK_V3.entries,
    variant=_variant,
)
