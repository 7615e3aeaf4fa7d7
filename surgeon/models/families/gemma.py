"""Gemma, the first: Llama's layout with gains stored as 1 + weight, embeddings times the root of their width."""

from dataclasses import replace
from typing import Any

from surgeon.models.families.gemma2 import embedding_scale
from surgeon.models.families.llama import LLAMA


def _unsupported(config: Any) -> str | None:
    if config.use_bidirectional_attention:
        return "its tokens attend to those behind them, too (use_bidirectional_attention)"
    return None


GEMMA = replace(
    LLAMA,
    name="Gemma",
    model_type="gemma",
    unit_offset=True,
    embedding_scale=embedding_scale,
    unsupported=_unsupported,
)
