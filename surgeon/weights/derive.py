"""Modules for sublayers that no layer has: copies of a layer's own, with averaged or sliced weights."""

from __future__ import annotations

import copy
from operator import attrgetter

import torch
from torch import Tensor, nn

from surgeon.families import Projection, SublayerSpec
from surgeon.program import Sublayer
from surgeon.weights.layout import indivisible, modules_of, require_sliceable, unit_features
from surgeon.weights.store import Tensors
from surgeon.weights.view import ModelWeights, norm_paths


def derive_sublayer(sublayer: Sublayer, owner: nn.Module, weights: ModelWeights) -> nn.Module:
    """A module with the same inner paths as a layer that holds one averaged or sliced sublayer.

    Args:
        owner: a layer that the sublayer is made of, whose modules are copied and never changed.
        weights: of the model that it is a layer of.

    Raises:
        ValueError: if heads or neurons do not divide into the slices asked for, layers to be averaged differ in width,
            or a module has parameters that its architecture does not.
    """
    spec = weights.family.spec(sublayer.kind)
    if sublayer.piece is not None:
        require_sliceable(spec, weights.family)
        reason = indivisible(sublayer, weights.units(sublayer))
        if reason is not None:
            raise ValueError(f"{reason}; use a number of slices that divides them")
    shell = module_with(stored_tensors(sublayer, weights), owner, spec)
    if sublayer.piece is not None:
        for path in spec.counts:
            parent, _, name = f"{spec.modules[0]}.{path}".rpartition(".")
            counting = attrgetter(parent)(shell)
            setattr(counting, name, getattr(counting, name) // sublayer.piece[1])
    return shell


def module_with(tensors: Tensors, owner: nn.Module, spec: SublayerSpec) -> nn.Module:
    """A copy of one sublayer of a layer, under the same inner paths, with other tensors, by path from the layer.

    Raises:
        ValueError: if a module has a parameter that is not among them.
    """
    shell = nn.Module().train(owner.training)
    for path in (spec.norm, *spec.modules):
        setattr(shell, path, _copy_with(owner.get_submodule(path), path, tensors))
    return shell


def stored_tensors(sublayer: Sublayer, weights: ModelWeights) -> Tensors:
    """A sublayer's tensors as its architecture stores them, by path from the layer, in memory of their own.

    Projections are packed and transposed as in a layer. A bias that another slice holds is zero.
    """
    spec = weights.family.spec(sublayer.kind)
    tensors = packed(weights.by_role(sublayer), spec, weights.width(sublayer.kind))
    for path in modules_of(spec):
        bias = f"{weights.family.layers}.{sublayer.layers[0]}.{path}.bias"
        if bias in weights and f"{path}.bias" not in tensors:
            tensors[f"{path}.bias"] = torch.zeros_like(weights.tensor(bias))
    return tensors


def packed(tensors: Tensors, spec: SublayerSpec, width: int) -> Tensors:
    """The inverse of `ModelWeights.by_role`: tensors by path from the layer, each in memory of its own.

    Args:
        width: of one head; 1 for a feed-forward.
    """
    found = {}
    for name, path in norm_paths(spec).items():
        for part in ("weight", "bias"):
            if f"{name}.{part}" in tensors:
                found[f"{path}.{part}"] = tensors[f"{name}.{part}"].clone()
    for path, projections in modules_of(spec).items():
        own = [tensors[f"{projection.role}.weight"] for projection in projections]
        stored = [one.T if projections[0].transposed else one for one in own]
        found[f"{path}.weight"] = _in_place(stored, projections, spec, width, projections[0].divided_dim)
        biases = [tensors[f"{one.role}.bias"] for one in projections if f"{one.role}.bias" in tensors]
        if biases:
            found[f"{path}.bias"] = _in_place(biases, projections, spec, width, 0)
    return found


def _in_place(parts: list[Tensor], projections: list[Projection], spec: SublayerSpec, width: int, dim: int) -> Tensor:
    """The projections of a module where each lies in it, along one dimension."""
    if len(parts) == 1:
        return parts[0].clone(memory_format=torch.contiguous_format)
    units = {one.unit: part.shape[dim] // width for one, part in zip(projections, parts, strict=True)}
    places = [unit_features(projection, spec, units, width).flatten() for projection in projections]
    together = torch.cat(parts, dim)
    return together.index_select(dim, torch.cat(places).argsort().to(together.device))


def _copy_with(module: nn.Module, path: str, tensors: Tensors) -> nn.Module:
    """A copy of the module with other tensors, freed from hooks that would move or reload the original's."""
    from accelerate.hooks import remove_hook_from_module

    replaced = {}
    for name, parameter in module.named_parameters():
        if f"{path}.{name}" not in tensors:
            raise ValueError(
                f"{path}.{name} is no parameter of this architecture (an adapter's?), so that it can be neither "
                "averaged nor sliced; merge adapters into the model first"
            )
        replaced[id(parameter)] = nn.Parameter(tensors[f"{path}.{name}"])
    # The memo makes deepcopy take the new parameters where it would copy the old ones.
    copied: nn.Module = remove_hook_from_module(copy.deepcopy(module, memo=replaced), recurse=True)
    return copied
