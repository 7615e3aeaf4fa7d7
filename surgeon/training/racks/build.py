"""Racks cut out of a whole model in memory, and put together to a whole model again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

from surgeon.checkpoint.describe import layers_by_recipe
from surgeon.language.program import Program
from surgeon.models.edit import edit, restore
from surgeon.training.racks.model import (
    ModelTensors,
    RackModel,
    build_stretch,
    config_for,
    named_layers,
    renumber_layers,
    tensors_of,
)
from surgeon.training.racks.partition import Racks, layers_in


def rack_of(whole: PreTrainedModel, racks: Racks, index: int, seed: int | None = None) -> RackModel:
    """Copy one rack out of a model.

    A rack has its own layers, a coda's, a final norm and a head; the first one the embeddings, too. Where the model's
    head is its embedding, every rack's head begins as a copy of that.

    Args:
        whole: edited or not; it is left as it is.
        racks: of its program, in the numbers of the layers that it was edited from.
        seed: of the coda's first random numbers, as of a new model, but for a head that was the embedding; None copies
            the model's last layers, norm and head.

    Raises:
        ValueError: if the model runs another program, or has tensors that no rack is to have.
    """
    found = tensors_of(whole)
    layers_by_recipe(racks.program, found.program)
    require_known(found)
    family = found.family
    nodes = found.program.nodes
    own, private = (
        [nodes[place] for place in part] for part in (racks.ranges[index].nodes, racks.private(index))
    )
    tied = bool(found.config.tie_word_embeddings)
    first = layers_in(own)
    behind = layers_in(private)
    coda = named_layers(family, [found.layers[source] for source in behind], len(first))
    tensors = named_layers(family, [found.layers[source] for source in first])
    tensors |= found.outside(family.final_norm, family.head)
    if seed is not None and index != racks.last:
        config_of_coda = config_for(found.config, behind or [0], tied=False)
        dtype = next(iter(found.others.values())).dtype
        with torch.random.fork_rng([]):
            torch.manual_seed((seed << 20) + index + 1)
            model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config_of_coda)]
            model = model_class._from_config(config_of_coda, dtype=dtype)
        fresh = tensors_of(model)
        ends = [family.final_norm]
        if not tied:
            ends.append(family.head)
        coda = named_layers(family, fresh.layers if behind else [], len(first)) | fresh.outside(*ends)
    tensors |= coda
    if index == 0:
        tensors |= found.outside(*family.embeddings)
    config = config_for(found.config, [*first, *behind], tied and len(racks) == 1)
    numbers = {name: one.clone(memory_format=torch.contiguous_format) for name, one in tensors.items()}
    program = renumber_layers(own) + renumber_layers(private, len(first))
    return RackModel(racks, index, build_stretch(config, program, numbers, index == 0, len(own)))


def require_known(found: ModelTensors) -> None:
    """Refuse a model with tensors that no rack would have."""
    family = found.family
    known = found.outside(*family.embeddings, family.final_norm, family.head)
    if (name := next((one for one in found.others if one not in known), None)) is not None:
        raise ValueError(
            f"{name} lies outside the layers, the embeddings, the final norm and the head; a model with such a tensor "
            "is not cut into racks"
        )


def assemble(whole: PreTrainedModel, racks: Racks, trained: Sequence[RackModel]) -> PreTrainedModel:
    """Build the whole model of its racks' layers, the first one's embeddings, and the last one's norm and head.

    Of several racks, an embedding that was also the head is stored apart from it.

    Args:
        whole: that the racks were cut out of; it is left as it is.
        trained: all racks in order; their numbers are shared with the result.

    Returns:
        A model in evaluation mode that runs the whole program.
    """
    found = tensors_of(whole)
    family = found.family
    nodes = found.program.nodes
    tied = bool(found.config.tie_word_embeddings) and len(racks) == 1
    layers = list(found.layers)
    for rack in trained:
        own = layers_in(nodes[place] for place in racks.ranges[rack.index].nodes)
        # Behind them are the coda's.
        for source, tensors in zip(own, rack.tensors().layers, strict=False):
            layers[source] = tensors
    first = trained[0].tensors()
    last = trained[-1].tensors()
    others = first.outside(*family.embeddings)
    others |= last.outside(family.final_norm, family.head)
    config = config_for(found.config, range(len(layers)), tied)
    model = restore(
        build_stretch(config, found.program, others | named_layers(family, layers), embeds=True)
    )
    model.name_or_path = model.config._name_or_path = str(whole.name_or_path)
    model.generation_config = whole.generation_config
    dense = Program.dense(len(layers), family.steps_per_layer)
    if found.program == dense:
        return model
    return edit(model, found.program)
