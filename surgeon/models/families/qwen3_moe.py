"""Qwen3-MoE: Qwen3's attention, and mixtures of experts in most layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from surgeon.models.families.base import Family
from surgeon.models.families.llama import LLAMA
from surgeon.models.families.mixtures import MIXTURE
from surgeon.models.families.qwen3 import QWEN3


def _is_dense(config: Any, layer: int) -> bool:
    return layer in config.mlp_only_layers or (layer + 1) % config.decoder_sparse_step != 0


def _variant(family: Family, config: Any) -> Family:
    dense = replace(LLAMA.mlp, width="intermediate_size")
    layers = [layer for layer in range(config.num_hidden_layers) if _is_dense(config, layer)]
    return replace(family, layer_specs=tuple(("F", layer, dense) for layer in layers))


def _follow_mlp(config: Any, sources: Sequence[int]) -> dict[str, Any]:
    dense = [place for place, source in enumerate(sources) if _is_dense(config, source)]
    return {"mlp_only_layers": dense, "decoder_sparse_step": 1}


QWEN3_MOE = replace(
    QWEN3,
    name="Qwen3-MoE",
    model_type="qwen3_moe",
    mlp=MIXTURE,
    intermediate="moe_intermediate_size",
    window_layers=None,
    variant=_variant,
    follow_mlp=_follow_mlp,
)
