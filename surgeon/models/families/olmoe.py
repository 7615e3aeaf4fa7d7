"""OLMoE: mixtures of experts in every layer, and norms of all queries and all keys."""

from dataclasses import replace
from typing import Any

from surgeon.models.families.llama import LLAMA
from surgeon.models.families.mixtures import MIXTURE


def _unsupported(config: Any) -> str | None:
    if config.clip_qkv is None:
        return None
    return f"clip_qkv {config.clip_qkv} bounds what its attentions project"


OLMOE = replace(
    LLAMA,
    name="OLMoE",
    model_type="olmoe",
    attention=replace(LLAMA.attention, head_norms=("self_attn.q_norm", "self_attn.k_norm"), norms_all_heads=True),
    mlp=MIXTURE,
    heads_fill_stream=True,  # which is how wide those norms are
    unsupported=_unsupported,
)
