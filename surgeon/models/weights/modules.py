"""Modules of a layer that is stored with two factors in place of a matrix, or with fewer heads or neurons."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from surgeon.language.program import Program
from surgeon.language.sublayer import FEED_FORWARD, KINDS, Sublayer
from surgeon.models.families import Projection, SublayerSpec
from surgeon.models.replacements import ExpertMaps, FactoredLinear, ReplacementExperts, TakenApart
from surgeon.models.weights.layers import modules_of, own_path, units_in
from surgeon.models.weights.store import Tensors
from surgeon.models.weights.view import ModelWeights

_GROUPED_BYTES = 16  # torch's products of many matrices at once need rows of a multiple of this


def replaced_modules(
    owner: nn.Module, tensors: Tensors, spec: SublayerSpec, head_dim: int
) -> dict[str, nn.Module]:
    """Make modules, by path from the layer, where the layer's own cannot hold a sublayer's tensors.

    Args:
        owner: a layer.
        tensors: of the sublayer, by path from the layer.
        head_dim: the width of one head.
    """
    replaced: dict[str, nn.Module] = {}
    if spec.mixture is not None and not any(
        one.weight in tensors for one in spec.projections if one.stacked
    ):
        path = spec.mixture.experts
        replaced[path] = _experts(spec, tensors, owner.get_submodule(path)).train(owner.training)
    for path, packed in modules_of(spec).items():
        if packed[0].stacked:
            continue
        own = owner.get_submodule(path)
        if f"{path}.weight" not in tensors:
            replaced[path] = _taken_apart(packed, spec, tensors, head_dim)
        elif isinstance(own, FactoredLinear | TakenApart):
            replaced[path] = _linear(path, tensors, packed[0].transposed)
        if path in replaced:
            replaced[path].train(own.training)
    return replaced


def leave_out(model: Any, weights: ModelWeights, program: Program) -> None:
    """Take modules out of a causal language model's layers that its own program does not run, and files do not have."""
    layers = len(model.get_submodule(weights.family.layers))
    for index, kind in absent_sublayers(weights, program, layers):
        layer = model.get_submodule(f"{weights.family.layers}.{index}")
        spec = weights.family.spec(kind, index)
        for root in {path.partition(".")[0] for path in spec.stages}:
            delattr(layer, root)


def absent_sublayers(weights: ModelWeights, program: Program, num_layers: int) -> list[tuple[int, str]]:
    """Return layers, with a kind, whose attention or MLP a model's program does not run and its files do not have."""
    used = {(layer, sublayer.kind) for sublayer in program.sublayers() for layer in sublayer.layers}
    unused = {(layer, kind) for layer in range(num_layers) for kind in KINDS} - used
    found = []
    for layer, kind in sorted(unused):
        spec = weights.family.spec(kind, layer)
        inside = f"{weights.family.layers}.{layer}."
        paths = (*(one.weight for one in spec.projections), *spec.beside)
        if not any(f"{inside}{path}" in weights for path in paths):
            found.append((layer, kind))
    return found


def make_room(model: Any, weights: ModelWeights, program: Program) -> None:
    """Replace modules of a causal language model, so that it can hold the stored layers of a program.

    Those are two factors in place of some matrices, fewer experts, and the program's narrower layers. New parameters
    have no numbers yet, and the dtype and device of those that they replace.
    """
    layers = f"{weights.family.layers}."
    for index in range(weights.count_layers()) if weights.has_factors() else ():
        layer = model.get_submodule(f"{layers}{index}")
        for spec in (weights.family.spec(kind, index) for kind in KINDS):
            if spec.mixture is not None and weights.stored_ranks(Sublayer(FEED_FORWARD, (index,))):
                path = spec.mixture.experts
                whole = layer.get_submodule(path)
                like = next(whole.parameters())
                tensors = _empty(weights, index, path, like)
                layer.set_submodule(path, _experts(spec, tensors, whole))
            for path in (path for path, packed in modules_of(spec).items() if not packed[0].stacked):
                like = next(layer.get_submodule(path).parameters())
                tensors = _empty(weights, index, path, like)
                if f"{path}.weight" not in tensors and tensors:
                    packed = modules_of(spec)[path]
                    layer.set_submodule(path, _taken_apart(packed, spec, tensors, weights.head_dim))
    for index in (
        range(len(model.get_submodule(weights.family.layers)))
        if weights.family.mixture is not None
        else ()
    ):
        _leave_experts(model.get_submodule(f"{layers}{index}"), index, weights)
    for sublayer in {
        replace(one, piece=None, ranks=()) for one in program.sublayers() if one.width is not None
    }:
        (index,) = sublayer.layers
        if weights.stored_width(sublayer.kind, index) == sublayer.width:
            _narrow(model.get_submodule(f"{layers}{index}"), sublayer, weights, model.config)


def _leave_experts(layer: nn.Module, index: int, weights: ModelWeights) -> None:
    """Have a layer as many experts as are stored."""
    mixture = weights.family.spec(FEED_FORWARD, index).mixture
    experts = weights.stored_experts(index)
    if (
        mixture is None
        or experts is None
        or experts == len(layer.get_parameter(f"{mixture.router}.weight"))
    ):
        return
    whole = layer.get_submodule(mixture.experts)
    names = [f"{mixture.experts}.{name}" for name, _ in whole.named_parameters(recurse=False)]
    for path in (
        *names,
        *(path for name, path in mixture.whole.items() if not name.startswith("shared")),
    ):
        module, _, name = path.rpartition(".")
        owner = layer.get_submodule(module)
        old = getattr(owner, name, None)
        if isinstance(old, nn.Parameter):
            setattr(owner, name, nn.Parameter(old.new_empty(experts, *old.shape[1:])))
        elif old is not None:
            setattr(owner, name, old.new_empty(experts))
    recount_experts(layer, weights.family.spec(FEED_FORWARD, index))


def _empty(weights: ModelWeights, layer: int, path: str, like: Tensor) -> dict[str, Tensor]:
    """Make tensors without numbers for the stored ones of a module of a layer, by their paths from the layer."""
    stored = weights.names.below(layer, path)
    return {own: like.new_empty(weights.store.shape(name)) for own, name in stored.items()}


def _narrow(layer: nn.Module, sublayer: Sublayer, weights: ModelWeights, config: Any) -> None:
    """Give a layer's modules the shapes that one of its sublayers is stored in."""
    spec = weights.spec(sublayer)
    family = weights.family
    modules = {path: layer.get_submodule(path) for path in (*modules_of(spec), *spec.feature_norms)}
    paths = [
        f"{path}.{name}" for path, module in modules.items() for name, _ in module.named_parameters()
    ]
    for path in paths if spec.sinks is None else (*paths, spec.sinks):
        stored = f"{family.layers}.{sublayer.layers[0]}.{path}"
        parameter = layer.get_parameter(path)
        if stored in weights and weights.shape(stored) != parameter.shape:
            owner = layer.get_submodule(path.rpartition(".")[0])
            setattr(
                owner, path.rpartition(".")[2], nn.Parameter(parameter.new_empty(weights.shape(stored)))
            )
    for linear in (module for module in modules.values() if isinstance(module, nn.Linear)):
        linear.out_features, linear.in_features = linear.weight.shape
    assert sublayer.width is not None
    recount(
        layer, spec, sublayer.width, units_in(sublayer.kind, family.units(config, sublayer.layers[0]))
    )


def recount(layer: nn.Module, spec: SublayerSpec, units: int, whole: int) -> None:
    """Have a layer's modules count so many of all KV groups or neurons."""
    for path in spec.counts if units != whole else ():
        *parents, last, name = f"{spec.module}.{path}".split(".")
        if parents:
            owner = attrgetter(".".join(parents))(layer)
        else:
            owner = layer
        counting = getattr(owner, last)
        if hasattr(counting, name):  # a module that is taken apart counts nothing
            if not isinstance(counting, nn.Module):  # a configuration, which all layers have in common
                counting = copy.copy(counting)
                setattr(owner, last, counting)
            setattr(counting, name, getattr(counting, name) * units // whole)


def _taken_apart(
    packed: list[Projection], spec: SublayerSpec, tensors: Tensors, head_dim: int
) -> nn.Module:
    parts = {one.role: _linear(own_path(one, spec), tensors) for one in packed}
    if len(parts) > 1:
        return TakenApart(parts, head_dim if packed[0].interleaved else None)
    return parts[packed[0].role]


def recount_experts(layer: nn.Module, spec: SublayerSpec) -> None:
    """Have a mixture's modules count the experts that its router has rows for, and choose no more than there are."""
    if spec.mixture is None:
        return
    experts = len(layer.get_parameter(f"{spec.mixture.router}.weight"))
    for path in (*spec.mixture.counts, *spec.mixture.top_k):
        module, _, name = path.rpartition(".")
        owner = layer.get_submodule(module)
        if hasattr(owner, name):  # experts that are taken apart count nothing
            chosen = path in spec.mixture.top_k
            setattr(owner, name, min(getattr(owner, name), experts) if chosen else experts)
    take_experts_apart(layer)


def take_experts_apart(model: nn.Module) -> None:
    """Have the experts in a model computed one by one where products of all at once cannot be had for their rows."""
    modules: Iterable[Any] = model.modules()
    for module in modules:
        stacked = [one for one in module.parameters(recurse=False) if one.dim() == 3]
        if hasattr(module, "config") and any(
            one.shape[-1] * one.element_size() % _GROUPED_BYTES for one in stacked
        ):
            module.config = copy.copy(module.config)  # which all layers have in common
            module.config._experts_implementation = "eager"


def _experts(spec: SublayerSpec, tensors: Tensors, whole: nn.Module) -> ReplacementExperts:
    maps = {}
    for one in (one for one in spec.projections if one.stacked):
        path = f"{own_path(one, spec)}."
        maps[one.role] = ExpertMaps(
            {n.removeprefix(path): tensors[n] for n in tensors if n.startswith(path)}
        )
    if isinstance(whole, ReplacementExperts):
        (whole,) = whole.whole
    return ReplacementExperts(whole, spec.stack_layout, maps)


def _linear(path: str, tensors: Tensors, transposed: bool = False) -> nn.Module:
    """Make a linear map of the tensors below a path: one module, or two factors."""
    if f"{path}.first.weight" in tensors:
        return FactoredLinear(_linear(f"{path}.first", tensors), _linear(f"{path}.second", tensors))
    weight = tensors[f"{path}.weight"]
    bias = tensors.get(f"{path}.bias")
    if transposed:
        from transformers.pytorch_utils import Conv1D  # takes seconds, and few architectures have it

        made: nn.Module = Conv1D(weight.shape[1], weight.shape[0])
    else:
        made = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    made.weight = nn.Parameter(weight)
    if bias is not None:
        made.bias = nn.Parameter(bias)
    return made
