"""Mixtures of experts as `transformers` stacks them, and their routers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from surgeon.models.families.llama import LLAMA
from surgeon.models.families.specs import MixtureSpec, SublayerSpec, route_by_config, stacked_experts

ROUTED = MixtureSpec(
    router="mlp.gate",
    experts="mlp.experts",
    count="num_experts",
    routing=partial(route_by_config, normalise=None),
    counts=("mlp.experts.num_experts", "mlp.gate.num_experts"),
    top_k=("mlp.gate.top_k",),
)
MIXTURE: SublayerSpec = replace(
    LLAMA.mlp, projections=stacked_experts(), counts=("experts.intermediate_dim",), mixture=ROUTED
)
