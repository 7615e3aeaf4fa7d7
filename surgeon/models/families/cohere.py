"""Cohere: attention beside MLP behind one norm without a shift; neighbouring features turn, logits have a factor."""

from dataclasses import replace
from typing import Any

from surgeon.models.families.base import Factor
from surgeon.models.families.llama import LLAMA


def _unsupported(config: Any) -> str | None:
    if getattr(config, "use_qk_norm", False):
        return "it norms queries and keys with a gain for each head (use_qk_norm is true, as in Command R+)"
    return None


def _unfused(fused: Any) -> dict[str, Any]:
    return {"attention_bias": fused.qkv_bias or fused.o_bias}


COHERE = replace(
    LLAMA,
    name="Cohere",
    model_type="cohere",
    mlp=replace(LLAMA.mlp, norm=LLAMA.attention.norm),
    norm_kind="centred",
    norm_epsilon="layer_norm_eps",
    rotary_neighbours=True,
    steps_per_layer=1,
    adds_in_turn=True,
    logit_scale=Factor("logit_scale"),
    unsupported=_unsupported,
    unfused=_unfused,
)
