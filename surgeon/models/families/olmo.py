"""OLMo's: OLMo, OLMo2, OLMo3, OLMoE; and EXAONE-4, which is made like OLMo3."""

from dataclasses import replace
from typing import Any

from surgeon.models.families.base import AttentionWindow, Family, Norms, Positions
from surgeon.models.families.llama import LLAMA
from surgeon.models.families.mixtures import MIXTURE
from surgeon.models.families.specs import Clamp, HeadNorm, StreamNorm


def _olmo_variant(family: Family, config: Any) -> Family:
    if config.clip_qkv is None:
        return family
    return family.with_heads(Clamp(float(config.clip_qkv)))


OLMO = replace(
    LLAMA,
    name="OLMo",
    model_type="olmo",
    summary="Llama's layout with layer norms that have neither gain nor shift, and bounded projections.",
    norms=Norms("plain", 1e-5),
    variant=_olmo_variant,
)


OLMO2 = replace(
    LLAMA,
    name="OLMo2",
    model_type="olmo2",
    summary=(
        "Llama's layout with norms behind sublayers in place of those before, and norms of all queries and all keys."
    ),
    attention=replace(
        LLAMA.attention,
        stages=("self_attn", StreamNorm("post_attention_layernorm")),
        heads=(HeadNorm("together"),),
    ),
    mlp=replace(LLAMA.mlp, stages=("mlp", StreamNorm("post_feedforward_layernorm"))),
)


OLMO3 = replace(
    OLMO2,
    name="OLMo3",
    model_type="olmo3",
    summary="OLMo2 with windows in most layers, and rotary positions by kind of layer.",
    window=AttentionWindow("sliding_window", "layer_types"),
)


def _reason_against(config: Any) -> str | None:
    if config.clip_qkv is None:
        return None
    return f"clip_qkv {config.clip_qkv} bounds what its attentions project"


OLMOE = replace(
    LLAMA,
    name="OLMoE",
    model_type="olmoe",
    summary="mixtures of experts in every layer, and norms of all queries and all keys.",
    attention=replace(LLAMA.attention, heads=(HeadNorm("together"),)),
    mlp=MIXTURE,
    heads_fill_stream=True,  # which is how wide those norms are
    unsupported=_reason_against,
)


def _variant(family: Family, config: Any) -> Family:
    return replace(family, positions=Positions(in_windows=config.sliding_window is not None))


EXAONE4 = replace(
    OLMO3,
    name="EXAONE-4",
    model_type="exaone4",
    summary=(
        "norms behind sublayers only, norms of heads; where some layers have windows, only these have positions."
    ),
    attention=replace(OLMO3.attention, heads=(HeadNorm(),)),
    variant=_variant,
)
