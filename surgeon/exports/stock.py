"""A model in memory as a stock one: whatever its program, its weights are those of whole layers.

Averages and slices have weights of their own while a model lives. To be stored they become layers behind the original
ones, and the program names these: of a model with three layers, `A0 F0 A1~A2 F1~F2` is stored as four layers and
`A0 F0 A3 F3`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import PreTrainedModel

from surgeon.language.program import Program
from surgeon.language.sublayer import ATTENTION, FEED_FORWARD, KINDS, ROLES, SHARED, WRITING, Sublayer
from surgeon.models.edit import decoder_layers, decoder_parent, program_of
from surgeon.models.edited_layers import EditedLayers
from surgeon.models.families import family_of
from surgeon.models.weights import (
    Group,
    ModelWeights,
    ModuleStore,
    NamedTensors,
    Store,
    Tensors,
    module_with,
    packed,
)


@dataclass(frozen=True)
class StockLayers:
    """The layers of the stock model.

    Attributes:
        layers: the original ones, then those made of derived sublayers.
        sources: for each, the original layer whose entries in the configuration it has.
        program: over these layers.
        prefix: of the names of layers.
        derived: the names of derived sublayers in the edited model.
    """

    layers: list[nn.Module]
    sources: list[int]
    program: Program
    prefix: str = ""
    derived: Collection[str] = ()

    def state(self, state: Tensors) -> Tensors:
        """Rename a state dict of the edited model to these layers."""
        renamed = {
            name: tensor
            for name, tensor in state.items()
            if name.removeprefix(self.prefix).partition(".")[0] not in self.derived
        }
        for index, layer in enumerate(self.layers):
            if type(layer) is nn.Module:  # made of derived sublayers
                renamed |= {
                    f"{self.prefix}{index}.{name}": one for name, one in layer.state_dict().items()
                }
        return renamed


def stock_layers_of(model: PreTrainedModel, state: Tensors | None = None) -> StockLayers:
    """Return the layers of a model as they are now."""
    layers = decoder_layers(model)
    if not isinstance(layers, EditedLayers):
        return StockLayers(list(layers), list(range(len(layers))), program_of(model))
    groups = layers.stored_groups
    made = [_layer_of(group, layers, state) for group in groups.groups]
    sources = [*range(len(layers.original[0])), *(group.layers[0] for group in groups.groups)]

    def stored(sublayer: Sublayer) -> Sublayer:
        place = layers.stored_place(sublayer, groups)
        if layers.is_derived(sublayer):
            return sublayer.stored_in(place)
        return replace(sublayer, layers=(place,))

    derived = {str(sublayer) for sublayer in layers.program.sublayers() if layers.is_derived(sublayer)}
    program = layers.program.renamed(stored)
    return StockLayers(
        [*layers.original[0], *made], sources, program, f"{layers.family.layers}.", derived
    )


def _layer_of(group: Group, edited: EditedLayers, state: Tensors | None) -> nn.Module:
    """Make a layer of a group's sublayers; those that the program does not have are as they were."""
    made = nn.Module()
    weights = edited.weights()
    for kind in KINDS:
        spec = edited.family.spec(kind, group.layers[0])
        owner = edited.layer(group.layers[0])
        count = group.count if kind in group.used else None
        pieces = [None] if count is None else [(index, count) for index in range(count)]
        sublayers = [group.sublayer(kind, piece) for piece in pieces]
        parts = [_values_of(sublayer, edited, state) for sublayer in sublayers]
        live = [
            part
            for part, sublayer in zip(parts, sublayers, strict=True)
            if str(sublayer) in edited._modules
        ]
        tensors = packed(_join(parts, live, f"{kind}{group.layers[0]}"), spec, weights.unit_width(kind))
        for name, module in module_with(tensors, owner, spec, weights.head_dim).named_children():
            made.add_module(name, module)
    return made


def _values_of(sublayer: Sublayer, edited: EditedLayers, state: Tensors | None) -> Tensors:
    """Return a sublayer's tensors by role, from its derived module, whose weights may have changed, or derived anew."""
    if str(sublayer) not in edited._modules:
        return edited.weights().by_role(sublayer)
    layer = sublayer.layers[0]
    inside = f"{edited.family.layers}.{layer}."
    own = f"{edited.family.layers}.{sublayer}."
    store: Store = ModuleStore(edited.get_submodule(str(sublayer)), inside)
    if state is not None:
        found = {name: tensor for name, tensor in state.items() if name.startswith(own)}
        store = NamedTensors({inside + name.removeprefix(own): tensor for name, tensor in found.items()})
    weights = ModelWeights(store, edited.family, edited.family.head_dim(edited.config))
    return weights.by_role(Sublayer(sublayer.kind, (layer,), ranks=sublayer.ranks))


def _join(parts: list[Tensors], live: list[Tensors], name: str) -> Tensors:
    """Join the tensors of slices to those of a whole sublayer."""
    whole = dict(parts[0])
    for key in whole if len(parts) > 1 else ():
        dim = _divided_dim(key)
        if dim is not None:
            whole[key] = torch.cat([part[key] for part in parts], dim)
            continue
        first, *others = [part[key] for part in live if key in part] or [whole[key]]
        whole[key] = first
        if not all(torch.equal(first, other) for other in others):
            if key.endswith(("first.weight", "second.weight")):
                what = "factors"
            else:
                what = "norms"
            raise ValueError(
                f"the slices of {name} have {what} of their own, and a checkpoint has one for all of them; "
                "replace no parameter of one slice alone"
            )
    return whole


def _divided_dim(key: str) -> int | None:
    """Return the dimension along which slices have parts of a tensor; None for undivided ones."""
    if key == "sinks":  # a number for each head
        return 0
    role, _, what = key.partition(".")
    if role not in ROLES[ATTENTION] + ROLES[FEED_FORWARD] + SHARED:
        return None
    if role in WRITING:
        if what in ("weight", "first.weight"):
            return -1
        return None
    # Matrices of experts are stacked.
    return None if what == "first.weight" else -1 if what == "bias" else -2


@contextmanager
def stock_model(model: PreTrainedModel, state: Tensors | None = None) -> Iterator[StockLayers]:
    """While inside, the model is a stock one with the layers to be stored, in its configuration too."""
    stock = stock_layers_of(model, state)
    family = family_of(model.config)
    edited = isinstance(decoder_layers(model), EditedLayers)
    parent, name = decoder_parent(model)
    before = getattr(parent, name)
    original = before.undo(model.config) if edited else before
    entries = family.per_layer_entries(model.config, stock.sources) | {
        "num_hidden_layers": len(stock.layers)
    }
    config_before = {key: getattr(model.config, key) for key in entries}
    for key, value in entries.items():
        setattr(model.config, key, value)
    setattr(parent, name, nn.ModuleList(stock.layers))
    try:
        yield stock
    finally:
        for key, value in config_before.items():
            setattr(model.config, key, value)
        setattr(parent, name, original)
        if edited:
            setattr(parent, name, before)
            before.describe_in(model.config)
