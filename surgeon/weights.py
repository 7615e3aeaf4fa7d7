"""Weights of sublayers that no layer has: averages of several layers, and slices of heads or neurons.

Both act on the tensors of one sublayer, named by their path from the layer, so that an edited model, an exported
checkpoint and a tensor-parallel rank get the same numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from accelerate.hooks import remove_hook_from_module
from accelerate.utils import align_module_device
from torch import Tensor, nn

from surgeon.families import Family, Projection, SublayerSpec
from surgeon.program import Sublayer

Tensors = dict[str, Tensor]


def average(parts: Iterable[Tensors]) -> Tensors:
    """The plain mean of several sublayers' tensors, summed in float32 and kept in their own dtype.

    Parts are taken one at a time, so that a generator never has to hold more than one of them.
    """
    sums: Tensors = {}
    dtypes: dict[str, torch.dtype] = {}
    count = 0
    for part in parts:
        count += 1
        for name, tensor in part.items():
            dtypes.setdefault(name, tensor.dtype)
            sums[name] = sums[name] + tensor.float() if name in sums else tensor.float()
    return {name: (total / count).to(dtypes[name]) for name, total in sums.items()}


def slice_bounds(size: int, piece: tuple[int, int], what: str) -> tuple[int, int]:
    """First and end of slice `index` of `count` of `size` units.

    Raises:
        ValueError: if the units do not divide evenly.
    """
    index, count = piece
    if size % count:
        raise ValueError(f"{size} {what} do not divide into {count} slices; use a divisor of {size}")
    return index * size // count, (index + 1) * size // count


def slice_projection(weight: Tensor, projection: Projection, piece: tuple[int, int], units: int) -> Tensor:
    """The rows (of a projection that reads the stream) or columns (of one that writes to it) of one slice.

    Args:
        weight: (out_features, in_features), or a bias of a projection that reads the stream, (out_features,).
    """
    dim = 0 if projection.reads_stream else 1
    first, end = slice_bounds(units, piece, projection.unit)
    width = weight.shape[dim] // units
    return weight.narrow(dim, first * width, (end - first) * width)


def slice_tensors(tensors: Tensors, spec: SublayerSpec, piece: tuple[int, int], units: dict[Any, int]) -> Tensors:
    """One slice of a sublayer's tensors; norms stay whole, and a bias added to the stream belongs to slice 0."""
    sliced = dict(tensors)
    for projection in spec.projections:
        weight, bias = f"{projection.path}.weight", f"{projection.path}.bias"
        sliced[weight] = slice_projection(tensors[weight], projection, piece, units[projection.unit])
        if bias in tensors:
            if projection.reads_stream:
                sliced[bias] = slice_projection(tensors[bias], projection, piece, units[projection.unit])
            elif piece[0]:
                sliced[bias] = torch.zeros_like(tensors[bias])
    return sliced


def derive_sublayer(sublayer: Sublayer, layers: list[nn.Module], family: Family, config: Any) -> nn.Module:
    """A module with the same inner paths as a layer that holds one averaged or sliced sublayer.

    Args:
        layers: the layers the sublayer is made of, whose modules are copied and never changed.

    Raises:
        ValueError: if heads or neurons do not divide into the slices asked for.
    """
    spec = family.spec(sublayer.kind)
    tensors = average(module_tensors(layer, spec) for layer in layers)
    if sublayer.piece is not None:
        tensors = slice_tensors(tensors, spec, sublayer.piece, family.units(config))
    shell = nn.Module()
    for path in (spec.norm, *spec.modules):
        setattr(shell, path, _copy_with(layers[0].get_submodule(path), path, tensors))
    if sublayer.piece is not None:
        attention: Any = shell.get_submodule(spec.modules[0])
        for name in spec.head_counts:
            setattr(attention, name, getattr(attention, name) // sublayer.piece[1])
    return shell


def module_tensors(layer: nn.Module, spec: SublayerSpec) -> Tensors:
    """A sublayer's tensors by path from the layer, fetched from where they are offloaded to if need be."""
    tensors = {}
    for root in (spec.norm, *spec.modules):
        for path, module in layer.get_submodule(root).named_modules(prefix=root):
            with align_module_device(module):
                for name, parameter in module.named_parameters(recurse=False):
                    tensors[f"{path}.{name}"] = parameter.detach().clone()
    return tensors


def _copy_with(module: nn.Module, path: str, tensors: Tensors) -> nn.Module:
    """A copy of the module with other tensors, freed from hooks that would move or reload the original's."""
    replaced = {id(p): nn.Parameter(tensors[f"{path}.{name}"].contiguous()) for name, p in module.named_parameters()}
    # The memo makes deepcopy take the new parameters where it would copy the old ones.
    copied: nn.Module = remove_hook_from_module(copy.deepcopy(module, memo=replaced), recurse=True)
    return copied
