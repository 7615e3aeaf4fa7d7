"""A model in memory as the tensors of a stock one, by whose names racks are cut out of it and put together again."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from surgeon.checkpoint.training import layers_by_recipe
from surgeon.exports.stock import stock_layers_of, stock_model
from surgeon.language.program import Node, Program
from surgeon.language.sublayer import Sublayer
from surgeon.models.families import Family, family_of
from surgeon.training.racks.partition import layers_in


@dataclass(frozen=True)
class ModelTensors:
    """The numbers of a model, shared with it.

    Attributes:
        config: of a stock model with these layers.
        program: over them.
        layers: the tensors of each, by their names in the layer.
        others: those outside the layers, by their names in the model; of tied ones both.
    """

    config: Any
    program: Program
    layers: list[dict[str, Tensor]]
    others: dict[str, Tensor]

    @property
    def family(self) -> Family:
        """The model's architecture."""
        return family_of(self.config)

    def outside(self, *paths: str | None) -> dict[str, Tensor]:
        """The tensors of modules outside the layers."""
        return {
            name: tensor
            for name, tensor in self.others.items()
            if any(path is not None and name.startswith(f"{path}.") for path in paths)
        }

    def named(self) -> dict[str, Tensor]:
        """All of them by their names in the model."""
        return self.others | named_layers(self.family, self.layers)


def tensors_of(model: PreTrainedModel) -> ModelTensors:
    """The tensors of a model; averages and slices that its program has are layers behind its own.

    Raises:
        ValueError: if a layer holds what its architecture does not have.
    """
    stock = stock_layers_of(model)
    prefix = f"{family_of(model.config).layers}."
    with stock_model(model, stock):
        config = copy.deepcopy(model.config)
    named = model.named_parameters(remove_duplicate=False)
    others = {name: one.detach() for name, one in named if not name.startswith(prefix)}
    return ModelTensors(config, stock.program, list(map(_tensors_in, stock.layers)), others)


def tensors_by(model: PreTrainedModel, program: Program) -> ModelTensors:
    """The same under the numbers of the program that the model was edited with, where slices are of its own layers.

    Args:
        program: over whole layers and slices of them.
    """
    found = tensors_of(model)
    layers = found.layers[: 1 + max(layer for one in program.sublayers() for layer in one.layers)]
    for (kind, place), (layer,) in layers_by_recipe(program, found.program).items():
        if place != layer:
            spec = found.family.spec(kind, layer)
            paths = tuple(f"{path}." for path in spec.called)
            moved = {name: tensor for name, tensor in found.layers[place].items() if name.startswith(paths)}
            layers[layer] = layers[layer] | moved
    config = config_for(found.config, range(len(layers)), bool(found.config.tie_word_embeddings))
    return ModelTensors(config, program, layers, found.others)


def _tensors_in(layer: nn.Module) -> dict[str, Tensor]:
    return {name: one.detach() for name, one in layer.named_parameters(remove_duplicate=False)}


def named_layers(family: Family, layers: Iterable[Mapping[str, Tensor]], first: int = 0) -> dict[str, Tensor]:
    """The tensors of layers by their names in the model, the first of them being that of this number."""
    return {
        f"{family.layers}.{first + index}.{name}": tensor
        for index, layer in enumerate(layers)
        for name, tensor in layer.items()
    }


def renumbered(nodes: Sequence[Node], first: int = 0) -> Program:
    """Nodes over their own layers alone, which are numbered in order from `first` on."""
    numbers = {layer: first + index for index, layer in enumerate(layers_in(nodes))}

    def rename(sublayer: Sublayer) -> Sublayer:
        return replace(sublayer, layers=tuple(numbers[layer] for layer in sublayer.layers))

    return Program(tuple(nodes)).renamed(rename)


def config_for(config: Any, sources: Sequence[int], tied: bool) -> Any:
    """A stock configuration of some of a model's layers.

    Args:
        sources: which of the layers that `config` describes, in their order.
        tied: whether the head is the embedding.
    """
    made = copy.deepcopy(config)
    entries = family_of(config).per_layer_entries(config, sources)
    for name, value in {**entries, "num_hidden_layers": len(sources), "tie_word_embeddings": tied}.items():
        setattr(made, name, value)
    return made
