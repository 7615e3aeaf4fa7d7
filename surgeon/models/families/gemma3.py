"""Gemma3 without its images: Gemma2 with norms of heads in place of caps, and rotary positions by kind of layer."""

from dataclasses import replace
from typing import Any

from surgeon.models.families.gemma2 import GEMMA2


def _unsupported(config: Any) -> str | None:
    if config.use_bidirectional_attention:
        return "its tokens look at those behind them, too (use_bidirectional_attention), as a language model's must not"
    return None


GEMMA3 = replace(
    GEMMA2,
    name="Gemma3",
    model_type="gemma3_text",
    attention=replace(GEMMA2.attention, head_norms=("self_attn.q_norm", "self_attn.k_norm")),
    attention_softcap=None,  # transformers caps no scores here, whatever attn_logit_softcapping says
    unsupported=_unsupported,
)
