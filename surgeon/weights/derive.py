"""Modules for sublayers that no layer has: copies of a layer's own, with averaged or sliced weights."""

from __future__ import annotations

import copy
from operator import attrgetter

import torch
from torch import Tensor, nn

from surgeon.families import SublayerSpec
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
    tensors = stored_tensors(sublayer, weights)
    shell = nn.Module().train(owner.training)
    for path in (spec.norm, *spec.modules):
        setattr(shell, path, _copy_with(owner.get_submodule(path), path, tensors))
    if sublayer.piece is not None:
        for path in spec.counts:
            parent, _, name = f"{spec.modules[0]}.{path}".rpartition(".")
            counting = attrgetter(parent)(shell)
            setattr(counting, name, getattr(counting, name) // sublayer.piece[1])
    return shell


def stored_tensors(sublayer: Sublayer, weights: ModelWeights) -> Tensors:
    """A sublayer's tensors as its architecture stores them, by path from the layer, in memory of their own.

    Projections are packed and transposed as in a layer. A bias that another slice holds is zero.
    """
    spec = weights.family.spec(sublayer.kind)
    paths = norm_paths(spec)
    tensors = {}
    for name, tensor in weights.norms(sublayer).items():
        what, _, part = name.rpartition(".")
        tensors[f"{paths[what]}.{part}"] = tensor.clone()
    for path in modules_of(spec):
        tensors[f"{path}.weight"] = _packed_weight(sublayer, spec, path, weights)
        if f"{weights.family.layers}.{sublayer.layers[0]}.{path}.bias" in weights:
            tensors[f"{path}.bias"] = _packed_bias(sublayer, spec, path, weights)
    return tensors


def _packed_weight(sublayer: Sublayer, spec: SublayerSpec, path: str, weights: ModelWeights) -> Tensor:
    packed = modules_of(spec)[path]
    parts = [weights.matrix(sublayer, projection.role).whole() for projection in packed]
    stored = [part.T if projection.transposed else part for part, projection in zip(parts, packed, strict=True)]
    return _in_place(stored, sublayer, spec, path, weights, packed[0].divided_dim)


def _packed_bias(sublayer: Sublayer, spec: SublayerSpec, path: str, weights: ModelWeights) -> Tensor:
    packed = modules_of(spec)[path]
    parts = [weights.bias(sublayer, projection.role) for projection in packed]
    held = [part for part in parts if part is not None]
    if len(held) < len(parts):  # another slice adds it
        return torch.zeros_like(weights.tensor(f"{weights.family.layers}.{sublayer.layers[0]}.{path}.bias"))
    return _in_place(held, sublayer, spec, path, weights, 0) if packed[0].reads_stream else held[0].clone()


def _in_place(
    parts: list[Tensor], sublayer: Sublayer, spec: SublayerSpec, path: str, weights: ModelWeights, dim: int
) -> Tensor:
    """The projections of a module where each lies in it."""
    if len(parts) == 1:
        return parts[0].clone(memory_format=torch.contiguous_format)
    units = {unit: size // (sublayer.piece or (0, 1))[1] for unit, size in weights.units(sublayer).items()}
    together = torch.cat(parts, dim)
    places = [unit_features(one, spec, units, weights.width(sublayer.kind)).flatten() for one in modules_of(spec)[path]]
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
