"""The fused form of `surgeon export`: any family's functions, in layers that may differ in width.

See `checkpoint/remote_code/modeling_surgeon_fused.py`.
"""

from dataclasses import replace
from operator import attrgetter
from typing import Any

from surgeon.models.families.base import (
    AttentionWindow,
    ConfigEntries,
    Dropouts,
    Factor,
    Family,
    Norms,
    Positions,
    Scales,
)
from surgeon.models.families.llama import LLAMA
from surgeon.models.families.registry import FAMILIES
from surgeon.models.families.specs import Clamp, Growth, HeadNorm, HeadStage, Projection

POSITIONS = "model.embed_positions"  # where positions are learned
_EPSILON = "norm_eps"
OFFSET = "rms_offset"  # what its configuration calls RMS norms that multiply by 1 + their stored gain


def _variant(family: Family, config: Any) -> Family:
    heads: list[HeadStage] = []
    if config.clip_qkv is not None:
        heads.append(Clamp(config.clip_qkv))
    if config.query_growth is not None:
        rate, length = config.query_growth
        heads.append(Growth(float(rate), int(length)))
    if config.head_norm:
        heads.append(HeadNorm("turns"))
    base = FAMILIES.get(config.base_model_type)
    positions = replace(
        family.positions,
        embedding=POSITIONS if config.learned_positions else None,
        offset=config.position_offset,
        neighbours=config.rotary_neighbours,
        computes_anew=config.anew_beyond is not None,
    )
    return replace(
        family,
        name=family.name if base is None else base.name,
        norms=Norms("rms", _EPSILON, unit_offset=True)
        if config.norm == OFFSET
        else Norms(config.norm, _EPSILON),
        positions=positions,
        attention=replace(family.attention, heads=tuple(heads)),
        mlp=family.mlp if config.gated else replace(family.mlp, projections=family.mlp.projections[1:]),
        head_bias=config.head_bias,
        steps_per_layer=1 if config.parallel_residual else 2,
    )


FUSED = replace(
    LLAMA,
    name="the fused form",
    model_type="surgeon_fused",
    summary="any family's functions, in layers that may differ in width",
    norms=Norms("rms", _EPSILON),
    positions=Positions(partial=True, layers="rotary_layers"),
    window=AttentionWindow("sliding_window", "layer_types"),
    scales=Scales(
        embedding=Factor("embedding_scale"),
        attention=attrgetter("attention_scaling"),
        output=Factor("output_scale"),
        logits=Factor("logit_scale"),
    ),
    dropout=Dropouts("residual_dropout"),
    entries=ConfigEntries(lists=("layer_types", "rotary_layers")),
    variant=_variant,
)

# Where every role of a sublayer lies in a layer, whichever family it came from.
PROJECTIONS: dict[str, Projection] = {
    projection.role: projection
    for spec in (LLAMA.attention, LLAMA.mlp)
    for projection in spec.projections
}
