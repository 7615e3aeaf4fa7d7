"""A fused checkpoint as the model that it was made of: a stock model whose layers run side by side again.

So it can be trained with the tools for stock models, edited and exported again. What was folded stays so: of a pair the
norm's gain is 1, and its shift is in the biases behind it, which the architecture must have a place for.

The inverse of `surgeon.checkpoint.forms.fused_tensors`: heads take turns, one KV group of each layer at a time, and
neurons lie one layer after the other; q, k, v, gate and up have them in rows, o and down in columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from surgeon.checkpoint.belongings import GENERATION
from surgeon.checkpoint.forms import FORMS, form_of
from surgeon.checkpoint.load import open_stored
from surgeon.checkpoint.stored import StoredModel
from surgeon.checkpoint.training import layers_by_recipe
from surgeon.errors import NotProven
from surgeon.exports.unfused_config import unfused_config
from surgeon.language.program import ATTENTION, FEED_FORWARD, KINDS, WRITING, Program, Step, Sublayer
from surgeon.models.edit import edit
from surgeon.models.families import FAMILIES, Family, family_of
from surgeon.models.families.fused import FUSED, POSITIONS
from surgeon.models.weights import ModelWeights, packed


@dataclass(frozen=True)
class Parts:
    """How many layers lie side by side in one layer of a fused checkpoint: attentions, and feed-forwards."""

    attentions: int
    feed_forwards: int

    def count(self, kind: str) -> int:
        """How many of a kind."""
        return self.attentions if kind == ATTENTION else self.feed_forwards

    @property
    def layers(self) -> int:
        """How many layers of the stock model have them."""
        return max(self.attentions, self.feed_forwards)


def unfused(model: str | Path | StoredModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The stock model of a fused checkpoint, edited so that its layers run side by side, in evaluation mode.

    Its layers are numbered as they lie in the checkpoint: a first pair is [A0 A1] [F0 F1], whichever layers of the
    original it has.

    Args:
        dtype: to compute in; by default that of the stored embedding, but float32 for 16-bit weights on a CPU.

    Raises:
        ValueError: if the checkpoint is not in the fused form, has slices of layers, or holds something that the
            original's architecture has no place for; the original's recipe has to be used then.
    """
    stored = open_stored(model)
    checkpoint, fused, weights = stored.checkpoint, stored.config, stored.weights
    if form_of(checkpoint) is not FORMS["fused"] or stored.own is not None:
        raise ValueError(f"{checkpoint.folder} is not in the fused form; surgeon.load opens it as it is")
    if fused.base_model_type not in FAMILIES:
        raise ValueError(_advice(checkpoint.where, f"its architecture {fused.base_model_type!r} is not known here"))
    said = fused.to_dict()  # its attributes are those of single layers where these differ
    parts = [_parts_of(index, said, weights) for index in range(stored.num_layers)]
    program = _program_of(parts, 1 if fused.parallel_residual else 2)
    if stored.report is not None:  # it may say that it is made of something else than whole layers
        try:
            layers_by_recipe(Program.parse(stored.report["program"]), program)
        except NotProven as difference:
            raise ValueError(_advice(checkpoint.where, str(difference))) from difference
    config = unfused_config(checkpoint, fused, [part.layers for part in parts], program)
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with no_init_weights():
        stock = model_class._from_config(config, dtype=dtype or stored.compute_dtype("cpu"))
    stock.tie_weights()
    _fill(stock, weights, parts)
    # As `from_pretrained` says where a model comes from: what lies beside the weights is looked for there.
    stock.name_or_path = stock.config._name_or_path = str(checkpoint.folder)
    if (checkpoint.folder / GENERATION).is_file():
        stock.generation_config = GenerationConfig.from_pretrained(checkpoint.folder)
    return edit(stock.eval(), program)


def _advice(where: str, reason: str) -> str:
    return f"{where} cannot be taken apart ({reason}); use the recipe and the original that it was made of"


def _parts_of(index: int, said: dict[str, Any], weights: ModelWeights) -> Parts:
    """What lies side by side in a layer; its widths say so.

    Raises:
        ValueError: if that is no whole number of layers.
    """
    names = {"heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "neurons": "intermediate_size"}
    counts = []
    for kind in KINDS:
        units = weights.units(Sublayer(kind, (index,)))
        found = {count / said[names[unit]] for unit, count in units.items()}
        if len(found) > 1 or not min(found).is_integer():
            sizes = " and ".join(f"{count} {unit.replace('kv_', 'KV ')}" for unit, count in units.items())
            raise ValueError(_advice(weights.store.where, f"layer {index} has {sizes}, which are slices of layers"))
        counts.append(int(found.pop()))
    norms = weights.norms(Sublayer(ATTENTION, (index,)))
    if any(len(norms[name]) != counts[0] for name in ("q_norm.weight", "k_norm.weight") if name in norms):
        raise ValueError(_advice(weights.store.where, f"layer {index} has slices of attentions"))
    return Parts(*counts)


def _program_of(parts: list[Parts], steps_per_layer: int) -> Program:
    """The stock model's program: the layers of each fused one read the same stream."""
    nodes, first = [], 0
    for part in parts:
        attentions = tuple(Sublayer(ATTENTION, (first + index,)) for index in range(part.attentions))
        feed_forwards = tuple(Sublayer(FEED_FORWARD, (first + index,)) for index in range(part.feed_forwards))
        steps = [attentions, feed_forwards] if steps_per_layer == 2 else [attentions + feed_forwards]
        nodes += [Step(step) for step in steps]
        first += part.layers
    return Program(tuple(nodes))


@torch.no_grad()
def _fill(model: PreTrainedModel, weights: ModelWeights, parts: list[Parts]) -> None:
    """Give every parameter its value; zeros where the checkpoint has none: no bias, or a sublayer that never runs.

    Raises:
        ValueError: if a value other than 0 has no place.
    """
    places = dict(model.named_parameters())
    left = set(places)
    for name, value in _values(model, weights, parts):
        if name in places:
            places[name].copy_(value)
            left.discard(name)
        elif value.any():
            family = family_of(model.config)
            reason = f"{family.name} has no {name}, which the shift of a norm before it became"
            raise ValueError(_advice(weights.store.where, reason))
    for name in left:
        places[name].zero_()


def _values(model: PreTrainedModel, weights: ModelWeights, parts: list[Parts]) -> Iterator[tuple[str, Tensor]]:
    """All that the checkpoint holds, by the stock model's names."""
    own = family_of(model.config)
    moved = {FUSED.embedding: own.embedding, FUSED.final_norm: own.final_norm}
    if own.position_embedding is not None:
        moved[POSITIONS] = own.position_embedding
    if not model.config.tie_word_embeddings:
        moved[FUSED.head] = own.head
    for stored, path in moved.items():
        for what in ("weight", "bias"):
            if f"{stored}.{what}" in weights:
                yield f"{path}.{what}", weights.tensor(f"{stored}.{what}")
    first = 0
    for index, part in enumerate(parts):
        for kind in KINDS:
            yield from _sublayers(own, first, weights, Sublayer(kind, (index,)), part.count(kind))
        first += part.layers


def _sublayers(
    own: Family, first: int, weights: ModelWeights, fused: Sublayer, count: int
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the sublayers that lie in a fused one, those of the first one in the layer of this number."""
    whole = weights.by_role(fused)
    blocks = weights.units(fused)["kv_heads"] // count if fused.kind == ATTENTION else 1
    for index in range(count):
        tensors = {name: _part(name, tensor, index, count, blocks) for name, tensor in whole.items()}
        for path, value in packed(tensors, own.spec(fused.kind), weights.width(fused.kind)).items():
            yield f"{own.layers}.{first + index}.{path}", value


def _part(name: str, tensor: Tensor, index: int, count: int, blocks: int) -> Tensor:
    """What one of several sublayers has of a tensor of them all, by role."""
    role, _, what = name.partition(".")
    if role in ("norm", "post_norm"):
        return tensor
    if role in ("q_norm", "k_norm"):
        return tensor[index]
    if role in WRITING and what == "bias":
        return tensor if index == 0 else torch.zeros_like(tensor)  # it is the sum of all of them
    dim = int(role in WRITING)
    own: Tensor = tensor.unflatten(dim, (blocks, count, -1)).select(dim + 1, index)
    return own.flatten(dim, dim + 1)
