"""A model in memory as a stock one: whatever its program, its weights are those of whole layers.

Sublayers that no layer has, averages and slices, have weights of their own while a model lives. To be stored they
become layers behind the original ones, and the program names these: of a model with three layers, `A0 F0 A1~A2 F1~F2`
is stored as four layers and `A0 F0 A3 F3`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgeon.language.program import Program
from surgeon.language.sublayer import ATTENTION, FEED_FORWARD, KINDS, ROLES, SHARED, WRITING, Sublayer
from surgeon.models.edit import decoder_layers, decoder_parent, program_of
from surgeon.models.edited_layers import EditedLayers
from surgeon.models.families import family_of
from surgeon.models.weights import Group, ModelWeights, ModuleStore, NamedTensors, Store, Tensors, module_with, packed


@dataclass(frozen=True)
class StockLayers:
    """The layers of the stock model.

    Attributes:
        layers: the original ones, then those made of derived sublayers.
        sources: for each, the original layer that it has the configuration's entries of.
        program: over these layers.
    """

    layers: list[nn.Module]
    sources: list[int]
    program: Program


def stock_layers_of(model: PreTrainedModel, state: dict[str, Tensor] | None = None) -> StockLayers:
    """The layers of a model as they are now.

    Args:
        state: of derived sublayers, to take their tensors from; by default their own.

    Raises:
        ValueError: if a layer holds what its architecture does not have.
    """
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

    return StockLayers([*layers.original[0], *made], sources, layers.program.renamed(stored))


def _layer_of(group: Group, edited: EditedLayers, state: dict[str, Tensor] | None) -> nn.Module:
    """A layer with the weights of a group's sublayers; those that the program does not have are as they were."""
    made = nn.Module()
    weights = edited.weights()
    for kind in KINDS:
        spec = edited.family.spec(kind, group.layers[0])
        owner = edited.layer(group.layers[0])
        count = group.count if kind in group.used else None
        pieces = [None] if count is None else [(index, count) for index in range(count)]
        sublayers = [group.sublayer(kind, piece) for piece in pieces]
        parts = [_values_of(sublayer, edited, state) for sublayer in sublayers]
        live = [part for part, sublayer in zip(parts, sublayers, strict=True) if _lives(sublayer, edited)]
        tensors = packed(_joined(parts, live, f"{kind}{group.layers[0]}"), spec, weights.unit_width(kind))
        for name, module in module_with(tensors, owner, spec, weights.head_dim).named_children():
            made.add_module(name, module)
    return made


def _values_of(sublayer: Sublayer, edited: EditedLayers, state: dict[str, Tensor] | None) -> Tensors:
    """A sublayer's tensors by role, from the module that was derived for it, or as they would be derived."""
    if not _lives(sublayer, edited):
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


def _lives(sublayer: Sublayer, edited: EditedLayers) -> bool:
    """Whether there is a module of it, whose weights may be others than those it was derived from."""
    return str(sublayer) in edited._modules


def _joined(parts: list[Tensors], live: list[Tensors], name: str) -> Tensors:
    """The tensors of a whole sublayer, of those of its slices.

    Args:
        live: of the slices that the program has; where there are some, what is not divided is as they have it.
    """
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
    """The dimension along which slices have parts of a tensor of a sublayer; None for what all of them have."""
    if key == "sinks":  # a number for each head
        return 0
    role, _, what = key.partition(".")
    if role not in ROLES[ATTENTION] + ROLES[FEED_FORWARD] + SHARED:
        return None
    if role in WRITING:
        if what in ("weight", "first.weight"):
            return -1
        return None
    return None if what == "first.weight" else -1 if what == "bias" else -2  # matrices of experts are stacked


@contextmanager
def stock_model(model: PreTrainedModel, stock: StockLayers) -> Iterator[None]:
    """While inside, the model is a stock one with the layers that are to be stored, in its configuration too."""
    family = family_of(model.config)
    edited = isinstance(decoder_layers(model), EditedLayers)
    parent, name = decoder_parent(model)
    before = getattr(parent, name)
    original = before.undo(model.config) if edited else before
    entries = family.per_layer_entries(model.config, stock.sources) | {"num_hidden_layers": len(stock.layers)}
    config_before = {key: getattr(model.config, key) for key in entries}
    for key, value in entries.items():
        setattr(model.config, key, value)
    setattr(parent, name, nn.ModuleList(stock.layers))
    try:
        yield
    finally:
        for key, value in config_before.items():
            setattr(model.config, key, value)
        setattr(parent, name, original)
        if edited:
            setattr(parent, name, before)
            before.describe_in(model.config)


def stock_state(state: dict[str, Tensor], model: PreTrainedModel, stock: StockLayers) -> dict[str, Tensor]:
    """A state dict of the edited model under the names of the stored layers."""
    edited = decoder_layers(model)
    assert isinstance(edited, EditedLayers)
    prefix = f"{edited.family.layers}."
    derived = {str(sublayer) for sublayer in edited.program.sublayers() if edited.is_derived(sublayer)}
    renamed = {}
    for name, tensor in state.items():
        if name.startswith(prefix):
            inside = name.removeprefix(prefix).partition(".")
        else:
            inside = ("", "", "")
        if inside[0] not in derived:
            renamed[name] = tensor
    for index in range(len(edited.original[0]), len(stock.layers)):
        for name, tensor in stock.layers[index].state_dict().items():
            renamed[f"{prefix}{index}.{name}"] = tensor
    return renamed
