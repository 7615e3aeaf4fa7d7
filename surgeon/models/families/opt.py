"""OPT: layer norms with shifts, learned positions, biases everywhere, a plain ReLU MLP."""

from dataclasses import replace
from typing import Any

from surgeon.models.families.base import ConfigEntries, Dropouts, Family, Norms, Positions
from surgeon.models.families.specs import (
    StreamNorm,
    SublayerSpec,
    attention_projections,
    plain_projections,
)


def _reason_against(config: Any) -> str | None:
    if not config.do_layer_norm_before:
        return "its norms come after the sublayers (do_layer_norm_before is false, as in OPT-350m)"
    if config._remove_final_layer_norm:
        return "it has no final norm (_remove_final_layer_norm)"
    if config.layerdrop:
        return f"it drops layers at random while training (layerdrop is {config.layerdrop}); set layerdrop to 0"
    return None


def _unfusable(config: Any) -> str | None:
    if config.word_embed_proj_dim not in (None, config.hidden_size):
        return f"its embeddings are projected to the stream's width (word_embed_proj_dim {config.word_embed_proj_dim})"
    return None


def _variant(family: Family, config: Any) -> Family:
    family = replace(family, off_ranks=_unfusable(config))
    if config.layer_norm_elementwise_affine:
        return family
    return replace(family, norms=replace(family.norms, kind="plain"))


def _follow_width(config: Any, width: int) -> dict[str, Any]:
    if config.word_embed_proj_dim == config.hidden_size:
        return {"word_embed_proj_dim": width}
    return {}


OPT = Family(
    name="OPT",
    model_type="opt",
    summary="layer norms with shifts, learned positions, biases everywhere, a plain ReLU MLP.",
    layers="model.decoder.layers",
    embedding="model.decoder.embed_tokens",
    final_norm="model.decoder.final_layer_norm",
    head="lm_head",
    attention=SublayerSpec(
        stages=(StreamNorm("self_attn_layer_norm"), "self_attn"),
        projections=attention_projections("self_attn", o="out_proj", kv="heads"),
        counts=("num_heads",),
    ),
    mlp=SublayerSpec(
        stages=(StreamNorm("final_layer_norm"), "fc1", "activation_fn", "fc2"),
        projections=plain_projections("fc1", "fc2"),
    ),
    activation="activation_function",
    intermediate="ffn_dim",
    norms=Norms("layer", 1e-5),
    positions=Positions("model.decoder.embed_positions", offset=2, from_mask=True),
    dropout=Dropouts("dropout"),
    entries=ConfigEntries(follow_width=_follow_width),
    heads_fill_stream=True,
    unsupported=_reason_against,
    unfusable=_unfusable,
    variant=_variant,
)
