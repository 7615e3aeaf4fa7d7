"""Gemma's: Gemma, Gemma 2, Gemma 3."""

from dataclasses import replace
from typing import Any

from surgeon.models.families.base import AttentionWindow, Norms, Scales
from surgeon.models.families.llama import LLAMA
from surgeon.models.families.specs import HeadNorm, StreamNorm
from surgeon.words import show_value

MOST_FEATURES = 1 << 40  # of a head


def embedding_scale(config: Any) -> float:
    """The root of the stream's width."""
    return float(config.hidden_size**0.5)


def _attention_scale(config: Any) -> float:
    scalar = config.query_pre_attn_scalar
    if not 0 < scalar < MOST_FEATURES:
        raise ValueError(
            f"query_pre_attn_scalar in config.json must be above 0, not {show_value(scalar)}"
        )
    return float(scalar**-0.5)


GEMMA2 = replace(
    LLAMA,
    name="Gemma2",
    model_type="gemma2",
    summary=(
        "norms after sublayers too, gains stored as 1 + weight, windows in every other layer, capped logits."
    ),
    attention=replace(
        LLAMA.attention, stages=(*LLAMA.attention.stages, StreamNorm("post_attention_layernorm"))
    ),
    mlp=replace(
        LLAMA.mlp,
        stages=(
            StreamNorm("pre_feedforward_layernorm"),
            "mlp",
            StreamNorm("post_feedforward_layernorm"),
        ),
    ),
    norms=Norms(unit_offset=True),
    activation="hidden_activation",
    window=AttentionWindow("sliding_window", "layer_types"),
    scales=Scales(
        embedding=embedding_scale,
        attention=_attention_scale,
        attention_cap="attn_logit_softcapping",
        logit_cap="final_logit_softcapping",
    ),
)


def _reason_against(config: Any) -> str | None:
    if config.use_bidirectional_attention:
        return "its tokens look at those behind them, too (use_bidirectional_attention), as a language model's must not"
    return None


GEMMA = replace(
    LLAMA,
    name="Gemma",
    model_type="gemma",
    summary="Llama's layout with gains stored as 1 + weight, embeddings times the root of their width.",
    norms=Norms(unit_offset=True),
    scales=Scales(embedding=embedding_scale),
    unsupported=_reason_against,
)


GEMMA3 = replace(
    GEMMA2,
    name="Gemma3",
    model_type="gemma3_text",
    summary="Gemma2 with norms of heads in place of caps, and rotary positions by kind of layer.",
    attention=replace(GEMMA2.attention, heads=(HeadNorm(),)),
    # transformers caps no scores here, whatever attn_logit_softcapping says
    scales=replace(GEMMA2.scales, attention_cap=None),
    unsupported=_reason_against,
)
