"""Mixtral: Mistral's attention, and mixtures of experts whose weights add up to 1."""

from dataclasses import replace
from typing import Any

from surgeon.models.families.llama import LLAMA
from surgeon.models.families.mixtures import MIXTURE, ROUTED, stacked_experts
from surgeon.models.routing import Routing


def _routing(config: Any) -> Routing:
    return Routing(int(config.num_experts_per_tok), normalise=True)


MIXTRAL = replace(
    LLAMA,
    name="Mixtral",
    model_type="mixtral",
    mlp=replace(
        MIXTURE,
        projections=stacked_experts("w1", "w3", "w2"),
        mixture=replace(ROUTED, count="num_local_experts", routing=_routing),
    ),
    stored_names=(("mlp.", "block_sparse_moe."),),
    window="sliding_window",
)
