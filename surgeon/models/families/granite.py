"""Granite: Llama's layout, with factors on embeddings, attention scores, sublayer outputs and logits."""

import math
from dataclasses import replace
from typing import Any

from surgeon.errors import shown
from surgeon.models.families.base import Factor
from surgeon.models.families.llama import LLAMA

_FACTORS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


def _unsupported(config: Any) -> str | None:
    for name in _FACTORS:
        factor = getattr(config, name)
        if not math.isfinite(factor) or factor == 0:
            return f"{name} must be a number other than 0, not {shown(factor)}"
    return None


def _attention_scale(config: Any) -> float:
    return float(config.attention_multiplier)


def _logit_scale(config: Any) -> float | None:
    scaling: float = config.logits_scaling
    if scaling == 1:
        return None
    return 1 / scaling


def _unfused(fused: Any) -> dict[str, Any]:
    factors = {"attention_multiplier": fused.attention_scaling, "logits_scaling": 1 / fused.logit_scale}
    return LLAMA.unfused(fused) | factors


GRANITE = replace(
    LLAMA,
    name="Granite",
    model_type="granite",
    embedding_scale=Factor("embedding_multiplier"),
    attention_scale=_attention_scale,
    output_scale=Factor("residual_multiplier"),
    logit_scale=_logit_scale,
    unsupported=_unsupported,
    unfused=_unfused,
)
