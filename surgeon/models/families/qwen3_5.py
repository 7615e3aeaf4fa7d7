"""Qwen3.5 without its images: Qwen3-Next with dense MLPs or with mixtures in all layers, its projections unpacked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from surgeon.models.families.base import Family
from surgeon.models.families.qwen3 import QWEN3
from surgeon.models.families.qwen3_next import GATED, WEIGHED, linear_attention, with_linear_layers
from surgeon.models.routing import Routing

_LINEAR = linear_attention("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")


def _variant(family: Family, config: Any) -> Family:
    return with_linear_layers(family, config, _LINEAR)


def _routing(config: Any) -> Routing:
    return Routing(int(config.num_experts_per_tok), normalise=True)


def _unfusable(_: Any) -> str:
    return "layers stored side by side have neither linear attention nor gates behind their heads"


QWEN3_5 = replace(
    QWEN3,
    name="Qwen3.5",
    model_type="qwen3_5_text",
    attention=GATED,
    unit_offset=True,
    partly_rotary=True,
    window=None,
    window_layers=None,
    variant=_variant,
    unfusable=_unfusable,
)
assert WEIGHED.mixture is not None
QWEN3_5_MOE = replace(
    QWEN3_5,
    name="Qwen3.5-MoE",
    model_type="qwen3_5_moe_text",
    mlp=replace(WEIGHED, mixture=replace(WEIGHED.mixture, routing=_routing)),
    intermediate="moe_intermediate_size",
)
