"""Ministral 3: Mistral with a factor on queries that grows with their positions."""

from dataclasses import replace
from typing import Any

from surgeon.models.families.base import Growth
from surgeon.models.families.mistral import MISTRAL


def _query_growth(config: Any) -> Growth | None:
    rope = config.rope_parameters
    rate = rope.get("llama_4_scaling_beta")
    if rate is None:
        return None
    return Growth(float(rate), int(rope["original_max_position_embeddings"]))


MINISTRAL3 = replace(MISTRAL, name="Ministral 3", model_type="ministral3", query_growth=_query_growth)
