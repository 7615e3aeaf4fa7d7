"""A fused checkpoint as the model that it was made of: a stock model whose layers run side by side again.

It can be trained with the tools for stock models, edited and exported again. Folded norms stay so: of a pair the norm's
gain is 1, and its shift is in the biases behind it, for which the architecture must have a place.

The inverse of `surgeon.checkpoint.forms.fused`: heads take turns, one KV group of each layer at a time, and neurons lie
one layer after the other, in rows of q, k, v, gate and up and in columns of o and down.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, GenerationConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from surgeon.checkpoint.belongings import GENERATION
from surgeon.checkpoint.config import dense_config, open_stored
from surgeon.checkpoint.describe import layers_by_recipe, read_report
from surgeon.checkpoint.forms import FORMS, form_of
from surgeon.checkpoint.forms.base import config_beside
from surgeon.checkpoint.forms.fused import CARRIED, ORIGINAL_KEY, fused_config
from surgeon.checkpoint.stored import StoredModel
from surgeon.errors import NotProven
from surgeon.language.program import Program, Step
from surgeon.language.sublayer import ATTENTION, KINDS, WRITING, Sublayer
from surgeon.models.edit import edit
from surgeon.models.families import FAMILIES, family_of
from surgeon.models.families.fused import FUSED, POSITIONS
from surgeon.models.weights import ModelWeights, pack_tensors

# Entries by which configurations say that there are biases.
BIAS_SWITCHES = ("attention_bias", "use_bias", "bias", "enable_bias")
# How many sublayers of each kind lie side by side in a layer of a fused checkpoint.
Parts = dict[str, int]


def unfuse(model: str | Path | StoredModel) -> PreTrainedModel:
    """Return the stock model of a fused checkpoint, edited so that its layers run side by side, in evaluation mode.

    Its layers are numbered as they lie in the checkpoint: a first pair is [A0 A1] [F0 F1], whichever layers of the
    original it has.
    """
    stored = open_stored(model)
    checkpoint = stored.checkpoint
    fused = stored.config
    weights = stored.weights
    if form_of(checkpoint) is not FORMS["fused"] or fused.model_type != checkpoint.config["model_type"]:
        raise ValueError(f"{checkpoint.folder} is not in the fused form; surgeon.load opens it as it is")
    if stored.own is not None:
        raise ValueError(_advice(checkpoint.where, "some of its layers have no attention or no MLP"))
    if fused.base_model_type not in FAMILIES:
        raise ValueError(
            _advice(checkpoint.where, f"its architecture {fused.base_model_type!r} is not known here")
        )
    said = fused.to_dict()  # its attributes are those of single layers where these differ
    parts = [_parts_of(index, said, weights) for index in range(stored.num_layers)]
    # Of the stock model's program: the layers of each fused one read the same stream.
    nodes: list[Step] = []
    first = 0
    for part in parts:
        steps = [
            tuple(Sublayer(kind, (first + index,)) for index in range(part[kind])) for kind in KINDS
        ]
        if fused.parallel_residual:
            steps = [sum(steps, ())]
        nodes += map(Step, steps)
        first += max(part.values())
    program = Program(tuple(nodes))
    if (report := read_report(stored)) is not None:
        try:  # it may say that it is made of something else than whole layers
            layers_by_recipe(Program.parse(report["program"]), program)
        except NotProven as difference:
            raise ValueError(_advice(checkpoint.where, str(difference))) from difference
    config = _config_of(stored, program)
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with no_init_weights():
        stock = model_class._from_config(config, dtype=stored.compute_dtype("cpu"))
    stock.tie_weights()
    _fill(stock, weights, parts)
    # As `from_pretrained` says where a model comes from: what lies beside the weights is looked for there.
    stock.name_or_path = stock.config._name_or_path = str(checkpoint.folder)
    if (checkpoint.folder / GENERATION).is_file():
        stock.generation_config = GenerationConfig.from_pretrained(checkpoint.folder)
    return edit(stock.eval(), program)


def _advice(where: str, reason: str) -> str:
    return (
        f"{where} cannot be taken apart ({reason}); use the recipe and the original that it was made of"
    )


def _config_of(stored: StoredModel, program: Program) -> Any:
    """Return the configuration that the fused one was made of, for a program over its layers."""
    checkpoint = stored.checkpoint
    if not isinstance(entries := checkpoint.config.get(ORIGINAL_KEY), dict):
        raise ValueError(_advice(checkpoint.where, f"its config.json has no {ORIGINAL_KEY}"))
    entries = entries | {key: checkpoint.config[key] for key in CARRIED if key in checkpoint.config}
    config = dense_config(config_beside(entries, CONFIG_MAPPING[stored.config.base_model_type]))
    family = family_of(config)
    if family.norms.kind == "layer":  # shifts of norms are in biases now
        for key in BIAS_SWITCHES:
            if hasattr(config, key):
                setattr(config, key, True)
    config.dtype = stored.config.dtype
    layout = FORMS["fused"].lay_out(program, family, config)
    shapes = {name: checkpoint.shape(name) for name in checkpoint.names()}
    said = stored.config.to_dict()
    for key, value in fused_config(family, config, layout, shapes).items():
        # The value may stand as transformers reads it, or as it is stored.
        if value not in (said.get(key), checkpoint.config.get(key)):
            reason = f"{family.name} would have {key}: {value} in the fused form, and config.json has {said.get(key)}"
            raise ValueError(_advice(checkpoint.where, reason))
    return config


def _parts_of(index: int, said: dict[str, Any], weights: ModelWeights) -> Parts:
    """Count the sublayers side by side in a layer, by its widths."""
    names = {
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "neurons": "intermediate_size",
    }
    counts: Parts = {}
    for kind in KINDS:
        units = weights.units(Sublayer(kind, (index,)))
        found = {count / said[names[unit]] for unit, count in units.items()}
        if len(found) > 1 or not min(found).is_integer():
            sizes = " and ".join(
                f"{count} {unit.replace('kv_', 'KV ')}" for unit, count in units.items()
            )
            raise ValueError(
                _advice(weights.store.where, f"layer {index} has {sizes}, which are slices of layers")
            )
        counts[kind] = int(found.pop())
    norms = weights.norms(Sublayer(ATTENTION, (index,)))
    if any(
        len(norms[name]) != counts[ATTENTION]
        for name in ("q_norm.weight", "k_norm.weight")
        if name in norms
    ):
        raise ValueError(_advice(weights.store.where, f"layer {index} has slices of attentions"))
    return counts


@torch.no_grad()
def _fill(model: PreTrainedModel, weights: ModelWeights, parts: list[Parts]) -> None:
    """Set every parameter; zeros where the checkpoint has none: no bias, or a sublayer that never runs."""
    places = dict(model.named_parameters())
    left = set(places)
    for name, value in _values(model, weights, parts):
        if name in places:
            if name not in left and not torch.equal(places[name], value.to(places[name])):
                raise ValueError(_advice(weights.store.where, f"{name} would be two norms that differ"))
            places[name].copy_(value)
            left.discard(name)
        elif value.any():
            family = family_of(model.config)
            reason = f"{family.name} has no {name}, which the shift of a norm before it became"
            raise ValueError(_advice(weights.store.where, reason))
    for name in left:
        places[name].zero_()


def _values(
    model: PreTrainedModel, weights: ModelWeights, parts: list[Parts]
) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of the checkpoint, by the stock model's names."""
    own = family_of(model.config)
    moved = {FUSED.embedding: own.embedding, FUSED.final_norm: own.final_norm}
    if own.positions.embedding is not None:
        moved[POSITIONS] = own.positions.embedding
    if own.head_bias or not model.config.tie_word_embeddings:
        moved[FUSED.head] = own.head
    for stored, path in moved.items():
        for what in ("weight", "bias"):
            if f"{stored}.{what}" in weights:
                yield f"{path}.{what}", weights.tensor(f"{stored}.{what}")
    first = 0
    for index, part in enumerate(parts):
        for kind in KINDS:
            fused = Sublayer(kind, (index,))
            count = part[kind]
            blocks = weights.units(fused)["kv_heads"] // count if kind == ATTENTION else 1
            whole = weights.by_role(fused)
            spec = own.spec(kind, index)
            for place in range(count):  # of the sublayers in a fused one
                tensors = {
                    name: _part(name, tensor, place, count, blocks) for name, tensor in whole.items()
                }
                for path, value in pack_tensors(tensors, spec, weights.unit_width(kind)).items():
                    yield f"{own.layers}.{first + place}.{path}", value
        first += max(part.values())


def _part(name: str, tensor: Tensor, index: int, count: int, blocks: int) -> Tensor:
    """Return one sublayer's part of a fused tensor, by role."""
    role, _, what = name.partition(".")
    if role == "norm":
        return tensor
    if role in ("q_norm", "k_norm"):
        return tensor[index]
    if role in WRITING and what == "bias":
        return tensor if index == 0 else torch.zeros_like(tensor)  # it is the sum of all of them
    dim = int(role in WRITING)
    own: Tensor = tensor.unflatten(dim, (blocks, count, -1)).select(dim + 1, index)
    return own.flatten(dim, dim + 1)
