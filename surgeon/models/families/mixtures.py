"""Mixtures of experts as `transformers` stacks them, and their routers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from surgeon.models.families.llama import LLAMA
from surgeon.models.families.specs import MixtureSpec, Projection, SublayerSpec, route_by_config


def stacked_experts(
    gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple[Projection, ...]:
    """The matrices of gated experts: gate and up packed in one parameter, down in another.

    Args:
        gate, up, down: names of an expert's own in files.
    """

    def of(role: str, name: str, stored: str) -> Projection:
        path = f"mlp.experts.{name}"
        alone = f"mlp.experts.{{}}.{stored}"
        return Projection(role, path, "neurons", role != "down", stacked=True, stored=alone)

    return (
        of("gate", "gate_up_proj", gate),
        of("up", "gate_up_proj", up),
        of("down", "down_proj", down),
    )


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
