"""OLMo, the first: Llama's layout with layer norms that have neither gain nor shift, and bounded projections."""

from dataclasses import replace
from typing import Any

from surgeon.models.families.llama import LLAMA


def _bound(config: Any) -> float | None:
    if config.clip_qkv is None:
        return None
    return float(config.clip_qkv)


def _unfused(fused: Any) -> dict[str, Any]:
    return LLAMA.unfused(fused) | {"clip_qkv": fused.clip_qkv}


OLMO = replace(
    LLAMA,
    name="OLMo",
    model_type="olmo",
    norm_kind="plain",
    norm_epsilon=1e-5,
    bound=_bound,
    unfused=_unfused,
)
