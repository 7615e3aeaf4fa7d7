"""The stock configuration of the model that a fused checkpoint was made of, from the fused one alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from transformers import CONFIG_MAPPING

from surgeon.checkpoint.forms import FORMS
from surgeon.checkpoint.forms.fused import CARRIED, fused_config
from surgeon.checkpoint.read import Checkpoint
from surgeon.language.program import Program
from surgeon.models.families import FAMILIES, Family, family_of
from surgeon.models.families.base import Factor

_TOLERANCE = 1e-6  # relative, between factors that went through a division


def unfused_config(checkpoint: Checkpoint, fused: Any, layers: list[int], program: Program) -> Any:
    """A configuration of the original's architecture, of which the fused one follows.

    Args:
        fused: the checkpoint's.
        layers: how many of the model's layers lie in each of the checkpoint's.
        program: over the model's layers.

    Raises:
        ValueError: if there is none, naming the entry that would be another one.
    """
    family = FAMILIES[fused.base_model_type]
    config_class = CONFIG_MAPPING[fused.base_model_type]
    known = config_class()
    # What the fused configuration says, its lists with an entry for each of the model's own layers.
    of_each = fused.to_dict()
    for key in ("layer_types", "rotary_layers"):
        if (values := getattr(fused, key)) is not None:
            of_each[key] = [value for value, count in zip(values, layers, strict=True) for _ in range(count)]
    whole = SimpleNamespace(**of_each | {"num_hidden_layers": sum(layers)})
    entries = _entries(family, checkpoint, whole)
    config = config_class(**{key: value for key, value in entries.items() if hasattr(known, key)})
    config.dtype = fused.dtype
    layout = FORMS["fused"].lay_out(program, family_of(config), config)
    shapes = {name: checkpoint.shape(name) for name in checkpoint.names()}
    again = fused_config(family_of(config), config, layout, shapes)
    said = fused.to_dict()
    for key, value in again.items():
        stored = checkpoint.config.get(key)
        if not _agree(value, said.get(key), stored):
            raise ValueError(
                f"{checkpoint.folder} cannot be taken apart ({family.name} would have {key}: {value} in the fused "
                f"form, and config.json has {stored}); use the recipe and the original that it was made of"
            )
    return config


def _entries(family: Family, checkpoint: Checkpoint, said: SimpleNamespace) -> dict[str, Any]:
    """The stock configuration's entries, of which the architecture may lack some."""
    entries = {key: checkpoint.config[key] for key in CARRIED if key in checkpoint.config} | {
        "tie_word_embeddings": said.tie_word_embeddings,
        "num_hidden_layers": said.num_hidden_layers,
        "num_attention_heads": said.num_attention_heads,
        "num_key_value_heads": said.num_key_value_heads,
        "head_dim": said.head_dim,
        "rope_parameters": said.rope_parameters,
        family.intermediate: said.intermediate_size,
        family.activation: said.hidden_act,
        family.attention_dropout: said.attention_dropout,
    }
    optional = {
        family.norm_epsilon: said.norm_eps,
        family.window: said.sliding_window,
        family.dropout or family.module_dropout: said.residual_dropout,
        family.embedding_dropout: said.embedding_dropout,
        family.rotary_layers: None if said.rotary_layers is None else list(map(int, said.rotary_layers)),
    }
    if family.window_layers == "layer_types":
        optional["layer_types"] = said.layer_types
    factors = [
        (family.embedding_scale, said.embedding_scale),
        (family.attention_scale, said.attention_scaling),
        (family.output_scale, said.output_scale),
        (family.logit_scale, said.logit_scale),
    ]
    named = {scale.attribute: value for scale, value in factors if isinstance(scale, Factor)}
    has = {key: value for key, value in optional.items() if isinstance(key, str)}
    return entries | has | named | family.unfused(said)


def _agree(value: Any, found: Any, stored: Any) -> bool:
    """Whether an entry is what the checkpoint has, as `transformers` reads it or as it is stored."""
    if isinstance(value, float) and isinstance(found, float):
        return abs(value - found) <= _TOLERANCE * abs(found)
    return bool(value in (found, stored))
