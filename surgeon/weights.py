"""Weights of sublayers that no layer has: averages of several layers, and slices of heads or neurons.

Both act on the tensors of one sublayer, named by their path from the layer, so that an edited model, an exported
checkpoint and a tensor-parallel rank get the same numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from surgeon.families import Family, Projection, SublayerSpec
from surgeon.families.base import Unit
from surgeon.program import Sublayer

Tensors = dict[str, Tensor]


def average(parts: Iterable[Mapping[str, Tensor]]) -> Tensors:
    """The plain mean of several sublayers' tensors, summed in float32 and kept in their own dtype.

    Parts are taken one at a time, and their tensors one at a time, so that a generator of mappings that read them
    never has to hold more than one of them beside the sums.
    """
    sums: Tensors = {}
    dtypes: dict[str, torch.dtype] = {}
    count = 0
    for part in parts:
        count += 1
        if count == 1:
            sums, dtypes = dict(part), {name: tensor.dtype for name, tensor in part.items()}
        else:
            for name, tensor in part.items():
                sums[name] = sums[name].float() + tensor.float()
    return sums if count == 1 else {name: total.div_(count).to(dtypes[name]) for name, total in sums.items()}


def slice_bounds(size: int, piece: tuple[int, int], what: str) -> tuple[int, int]:
    """First and end of slice `index` of `count` of `size` units.

    Raises:
        ValueError: if the units do not divide evenly.
    """
    index, count = piece
    if size % count:
        raise ValueError(f"{size} {what} do not divide into {count} slices; use a divisor of {size}")
    return index * size // count, (index + 1) * size // count


def features(projection: Projection, family: Family, config: Any) -> Tensor:
    """Where a projection's heads or neurons lie in its module: (units, features of each), indices.

    For the weight as it is stored they count along `projection.divided_dim`; other projections packed into the same
    module have the other indices.
    """
    spec = next(spec for spec in (family.attention, family.mlp) if projection in spec.projections)
    return unit_features(projection, spec, family.units(config), family.unit_width(config, projection.unit))


def unit_features(projection: Projection, spec: SublayerSpec, units: dict[Unit, int], width: int) -> Tensor:
    """The same as `features`, for a layer of which it is known how many units it has, and how wide each is."""
    packed = [other for other in spec.projections if other.path == projection.path]
    place, count = packed.index(projection), units[projection.unit]
    if projection.interleaved:
        return torch.arange(count * len(packed) * width).view(count, len(packed), width)[:, place]
    start = sum(units[other.unit] * width for other in packed[:place])
    return torch.arange(start, start + count * width).view(count, width)


def sliced_features(projection: Projection, family: Family, config: Any, piece: tuple[int, int]) -> Tensor:
    """The indices that one slice keeps of the module a projection lies in, in their order there.

    Raises:
        ValueError: if the units do not divide evenly.
    """
    spec = next(spec for spec in (family.attention, family.mlp) if projection in spec.projections)
    kept = []
    for packed in (other for other in spec.projections if other.path == projection.path):
        units = features(packed, family, config)
        first, end = slice_bounds(len(units), piece, packed.unit)
        kept.append(units[first:end].flatten())
    return torch.cat(kept).sort().values


def slice_projection(
    tensor: Tensor, projection: Projection, family: Family, config: Any, piece: tuple[int, int]
) -> Tensor:
    """What one slice keeps of a stored weight, or of the bias of a projection that reads the stream."""
    dim = projection.divided_dim if tensor.dim() == 2 else 0
    return tensor.index_select(dim, sliced_features(projection, family, config, piece).to(tensor.device))


def projection_matrix(weight: Tensor, projection: Projection, family: Family, config: Any) -> Tensor:
    """A projection's own matrix, (out_features, in_features), taken from its module's stored weight."""
    own = features(projection, family, config).flatten().to(weight.device)
    matrix = weight.index_select(projection.divided_dim, own)
    return matrix.T if projection.transposed else matrix


def with_projection(weight: Tensor, matrix: Tensor, projection: Projection, family: Family, config: Any) -> Tensor:
    """A copy of a module's stored weight in which a projection has another matrix; undoes `projection_matrix`."""
    own = features(projection, family, config).flatten().to(weight.device)
    stored = (matrix.T if projection.transposed else matrix).to(weight.dtype)
    return weight.index_copy(projection.divided_dim, own, stored.contiguous())


def slice_tensors(tensors: Tensors, spec: SublayerSpec, piece: tuple[int, int], family: Family, config: Any) -> Tensors:
    """One slice of a sublayer's tensors; norms stay whole, and a bias added to the stream belongs to slice 0.

    Raises:
        ValueError: if heads or neurons do not divide evenly, or the sublayer cannot be taken apart.
    """
    require_sliceable(spec, family)
    sliced = dict(tensors)
    for projection in {projection.path: projection for projection in spec.projections}.values():
        weight, bias = f"{projection.path}.weight", f"{projection.path}.bias"
        sliced[weight] = slice_projection(tensors[weight], projection, family, config, piece)
        if bias in tensors:
            if projection.reads_stream:
                sliced[bias] = slice_projection(tensors[bias], projection, family, config, piece)
            elif piece[0]:
                sliced[bias] = torch.zeros_like(tensors[bias])
    return sliced


def require_sliceable(spec: SublayerSpec, family: Family) -> None:
    """Refuse slices of a sublayer that would not add up to it.

    Raises:
        ValueError: if its output goes through a norm before it is added.
    """
    if spec.post_norm is not None:
        raise ValueError(
            f"sublayers of {family.name} cannot be sliced: their output goes through a norm before it is added"
        )


def derive_sublayer(
    sublayer: Sublayer, owner: nn.Module, parts: Iterable[Mapping[str, Tensor]], family: Family, config: Any
) -> nn.Module:
    """A module with the same inner paths as a layer that holds one averaged or sliced sublayer.

    Args:
        owner: a layer that the sublayer is made of, whose modules are copied and never changed.
        parts: the tensors of each of these layers, taken one at a time.

    Raises:
        ValueError: if heads or neurons do not divide into the slices asked for.
    """
    spec = family.spec(sublayer.kind)
    tensors = average(parts)
    if sublayer.piece is not None:
        tensors = slice_tensors(tensors, spec, sublayer.piece, family, config)
    shell = nn.Module().train(owner.training)
    for path in (spec.norm, *spec.modules):
        setattr(shell, path, _copy_with(owner.get_submodule(path), path, tensors))
    if sublayer.piece is not None:
        for path in spec.counts:
            parent, _, name = f"{spec.modules[0]}.{path}".rpartition(".")
            owner = attrgetter(parent)(shell)
            setattr(owner, name, getattr(owner, name) // sublayer.piece[1])
    return shell


def module_tensors(layer: nn.Module, spec: SublayerSpec) -> Tensors:
    """A sublayer's tensors by path from the layer, fetched from where they are offloaded to if need be."""
    from accelerate.utils import align_module_device

    tensors = {}
    for root in (spec.norm, *spec.modules):
        for path, module in layer.get_submodule(root).named_modules(prefix=root):
            with align_module_device(module):
                for name, parameter in module.named_parameters(recurse=False):
                    tensors[f"{path}.{name}"] = parameter.detach().clone()
    return tensors


def _copy_with(module: nn.Module, path: str, tensors: Tensors) -> nn.Module:
    """A copy of the module with other tensors, freed from hooks that would move or reload the original's."""
    from accelerate.hooks import remove_hook_from_module

    replaced = {id(p): nn.Parameter(tensors[f"{path}.{name}"].contiguous()) for name, p in module.named_parameters()}
    # The memo makes deepcopy take the new parameters where it would copy the old ones.
    copied: nn.Module = remove_hook_from_module(copy.deepcopy(module, memo=replaced), recurse=True)
    return copied
