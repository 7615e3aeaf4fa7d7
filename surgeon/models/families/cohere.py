"""Cohere's: Command R, Command R+, Command R7B."""

from dataclasses import replace
from typing import Any

from surgeon.models.families.base import AttentionWindow, Factor, Family, Norms, Positions, Scales
from surgeon.models.families.llama import LLAMA
from surgeon.models.families.specs import HeadNorm


def _variant(family: Family, config: Any) -> Family:
    """Command R+ norms queries and keys."""
    if not getattr(config, "use_qk_norm", False):
        return family
    return family.with_heads(HeadNorm("each"))


COHERE = replace(
    LLAMA,
    name="Cohere",
    model_type="cohere",
    summary=(
        "attention beside MLP behind one norm without a shift; neighbouring features turn, logits have a factor."
    ),
    mlp=replace(LLAMA.mlp, stages=(LLAMA.attention.stages[0], "mlp")),
    norms=Norms("centred", "layer_norm_eps"),
    positions=Positions(neighbours=True),
    steps_per_layer=1,
    adds_in_turn=True,
    scales=Scales(logits=Factor("logit_scale")),
    variant=_variant,
)


COHERE2 = replace(
    COHERE,
    name="Cohere2",
    model_type="cohere2",
    summary="Cohere with windows in most layers; the others have no positions.",
    positions=Positions(neighbours=True, in_windows=True),
    window=AttentionWindow("sliding_window", "layer_types"),
)
