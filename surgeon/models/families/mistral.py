"""Mistral's: Mistral, Ministral, Ministral 3, Mixtral."""

from dataclasses import replace
from functools import partial
from typing import Any

from surgeon.models.families.base import AttentionWindow, Family
from surgeon.models.families.llama import LLAMA
from surgeon.models.families.mixtures import MIXTURE, ROUTED
from surgeon.models.families.specs import Growth, route_by_config, stacked_experts

MISTRAL = replace(
    LLAMA,
    name="Mistral",
    model_type="mistral",
    summary="Llama's layout; some versions have a sliding attention window in every layer.",
    window=AttentionWindow("sliding_window"),
)


MINISTRAL = replace(
    MISTRAL,
    name="Ministral",
    model_type="ministral",
    summary="Mistral with windows in some layers.",
    window=AttentionWindow("sliding_window", "layer_types"),
)


def _variant(family: Family, config: Any) -> Family:
    rope = config.rope_parameters
    rate = rope.get("llama_4_scaling_beta")
    if rate is None:
        return family
    return family.with_heads(Growth(float(rate), int(rope["original_max_position_embeddings"])))


MINISTRAL3 = replace(
    MISTRAL,
    name="Ministral 3",
    model_type="ministral3",
    summary="Mistral with a factor on queries that grows with their positions.",
    variant=_variant,
)


MIXTRAL = replace(
    LLAMA,
    name="Mixtral",
    model_type="mixtral",
    summary="Mistral's attention, and mixtures of experts whose weights add up to 1.",
    mlp=replace(
        MIXTURE,
        projections=stacked_experts(stored=("w1", "w3", "w2")),
        mixture=replace(
            ROUTED, count="num_local_experts", routing=partial(route_by_config, normalise=True)
        ),
    ),
    stored_names=(("mlp.", "block_sparse_moe."),),
    window=AttentionWindow("sliding_window"),
)
