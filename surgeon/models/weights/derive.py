"""Modules for sublayers that no layer has: copies of a layer's own, averaged, narrowed, sliced or factorised."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from surgeon.language.sublayer import Sublayer
from surgeon.models.families import Projection, SublayerSpec
from surgeon.models.replacements import recount, recount_experts
from surgeon.models.weights.layers import (
    holds_output_bias,
    indivisible,
    modules_of,
    own_path,
    require_sliceable,
    taken_apart,
    unit_features,
)
from surgeon.models.weights.modules import replaced_modules, take_experts_apart
from surgeon.models.weights.store import Tensors
from surgeon.models.weights.view import ModelWeights


def derive_sublayer(sublayer: Sublayer, owner: nn.Module, weights: ModelWeights) -> nn.Module:
    """Make a module, with a layer's inner paths, that holds one averaged, narrowed, sliced or factorised sublayer.

    Args:
        owner: a layer that the sublayer is made of, whose modules are copied and never changed.
        weights: of the model that it is a layer of.

    Raises:
        ValueError: if heads or neurons do not divide into the slices, layers to be averaged differ in width, there are
            fewer heads or neurons than are to be kept, a rank is above that of its matrix, or a module has parameters
            that its architecture does not.
    """
    spec = weights.spec(sublayer)
    if sublayer.piece is not None:
        require_sliceable(spec, weights.family)
        reason = indivisible(sublayer, weights.units(sublayer))
        if reason is not None:
            raise ValueError(f"{reason}; use a number of slices that divides them")
    tensors = stored_tensors(sublayer, weights)
    first = next(
        path for root in spec.stages for path, _ in owner.get_submodule(root).named_parameters(root)
    )
    # The first layer's; factors of files, and other layers, lie elsewhere.
    stored = tensors.get(first)
    if stored is None:
        stored = weights.tensor(f"{weights.prefix(sublayer.layers[0])}{first}")
    on_device = {path: tensor.to(stored.device) for path, tensor in tensors.items()}
    shell = module_with(on_device, owner, spec, weights.head_dim)
    if not holds_output_bias(sublayer):
        # The biases that are added to the stream become buffers: another slice has them as parameters.
        parameters = dict(shell.named_parameters())
        for one in spec.projections:
            own = own_path(one, spec)
            for path in () if one.reads_stream else (one.bias, f"{own}.bias", f"{own}.second.bias"):
                if path in parameters:
                    module, _, name = path.rpartition(".")
                    holder = shell.get_submodule(module)
                    delattr(holder, name)
                    holder.register_buffer(name, parameters[path].detach(), persistent=False)
    whole = weights.stored_width(sublayer.kind, sublayer.layers[0])
    _, slices = sublayer.piece or (0, 1)
    counts = [f"{spec.module}.{path}" for path in spec.counts]
    recount(shell, counts, (sublayer.width or whole) // slices, whole)
    if spec.mixture is not None:
        experts = len(shell.get_parameter(f"{spec.mixture.router}.weight"))
        recount_experts(shell, spec.mixture.counts, spec.mixture.top_k, experts)
        take_experts_apart(shell)
    hook = getattr(owner.get_submodule(first.rpartition(".")[0]), "_hf_hook", None)
    if hook is not None:
        _dispatch_by(hook, shell)
    return shell


def share_undivided(slices: Sequence[nn.Module], spec: SublayerSpec) -> None:
    """Make slices of one sublayer share the parameters that each of them has the whole of.

    So they are stored as one sublayer after training, too.

    Args:
        slices: as `derive_sublayer` makes them.
    """
    # Norms and routers are whole, and of two factors the one on the stream's side of its matrix.
    norms = tuple(f"{norm}." for norm in spec.norms.values() if norm not in spec.feature_norms)
    whole = {path for path in spec.others.values() if path != spec.sinks} | {
        f"{own_path(one, spec)}.{'first' if one.reads_stream else 'second'}.weight"
        for one in spec.projections
    }
    first, *others = slices
    for path, parameter in first.named_parameters():
        if path in whole or path.startswith(norms):
            module, _, name = path.rpartition(".")
            for other in others:
                setattr(other.get_submodule(module), name, parameter)


def _dispatch_by(hook: Any, shell: nn.Module) -> None:
    """Have `accelerate` bring inputs to a module, and its weights if need be, as by the hook of a layer's own one.

    Offloaded weights are in main memory then, also those of layers on disk.
    """
    from accelerate.hooks import (
        AlignDevicesHook,
        SequentialHook,
        attach_align_device_hook,
        attach_execution_device_hook,
    )

    if isinstance(hook, SequentialHook):
        hooks = hook.hooks
    else:
        hooks = (hook,)
    for one in hooks:
        if isinstance(one, AlignDevicesHook):
            if one.offload:
                attach_align_device_hook(
                    shell, one.execution_device, offload=True, skip_keys=one.skip_keys
                )
            attach_execution_device_hook(shell, one.execution_device, skip_keys=one.skip_keys)


def module_with(tensors: Tensors, owner: nn.Module, spec: SublayerSpec, head_dim: int) -> nn.Module:
    """Copy one sublayer of a layer, with other tensors, by path from the layer.

    Args:
        head_dim: the width of one head.

    Raises:
        ValueError: if a module has a parameter that is not among them.
    """
    from accelerate.hooks import ModelHook, remove_hook_from_module

    shell = nn.Module().train(owner.training)
    replaced = replaced_modules(owner, tensors, spec, head_dim)
    for root in spec.stages:
        module = owner.get_submodule(root)
        # The memo makes deepcopy take the new modules and parameters where it would copy the old ones.
        memo: dict[int, Any] = {
            id(owner.get_submodule(path)): made
            for path, made in replaced.items()
            if path == root or path.startswith(f"{root}.")
        }
        memo |= {
            id(buffer): tensors[name].to(buffer)
            for name, buffer in module.named_buffers(prefix=root)
            if name in tensors
        }
        for name, parameter in module.named_parameters(prefix=root):
            if name in tensors:
                memo[id(parameter)] = nn.Parameter(tensors[name])
            elif not name.startswith(tuple(f"{path}." for path in replaced)):
                raise ValueError(
                    f"{name} is no parameter of this architecture (an adapter's?), so that it can be neither "
                    "averaged, sliced nor factorised; merge adapters into the model first"
                )
        # Hooks would move or reload the original's: they hold all weights that are somewhere else, and put the layer's
        # own back where they are removed.
        memo |= {
            id(inner._hf_hook): ModelHook() for inner in module.modules() if hasattr(inner, "_hf_hook")
        }
        copied = remove_hook_from_module(copy.deepcopy(module, memo=memo), recurse=True)
        for linear in copied.modules():
            if isinstance(linear, nn.Linear):  # of a slice, whose sizes adapters read
                linear.out_features, linear.in_features = linear.weight.shape
        setattr(shell, root, copied)
    return shell


def stored_tensors(sublayer: Sublayer, weights: ModelWeights) -> Tensors:
    """Return a sublayer's tensors as its architecture stores them, by path from the layer, in memory of their own.

    Projections are packed and transposed as in a layer, but for those with a rank. A bias that another slice holds is
    zero.
    """
    spec = weights.spec(sublayer)
    by_role = weights.by_role(sublayer)
    if sublayer.piece is not None:
        elsewhere = weights.written_part(replace(sublayer, piece=(0, sublayer.piece[1])))
        biases = {name: tensor for name, tensor in elsewhere.items() if name.endswith(".bias")}
        by_role |= {
            name: torch.zeros_like(tensor) for name, tensor in biases.items() if name not in by_role
        }
    return pack_tensors(by_role, spec, weights.unit_width(sublayer.kind))


def pack_tensors(tensors: Tensors, spec: SublayerSpec, width: int) -> Tensors:
    """Invert `ModelWeights.by_role`, or a part of it: tensors by path from the layer, in their own memory.

    Args:
        width: of one head; 1 for a feed-forward.
    """
    places = {
        f"{name}.{part}": f"{path}.{part}"
        for name, path in spec.norms.items()
        for part in ("weight", "bias")
    } | spec.others
    apart = taken_apart(spec, lambda role: f"{role}.first.weight" in tensors)
    for one in apart:
        path = own_path(one, spec)
        for part in ("first.weight", "second.weight", "weight", "bias"):
            places[f"{one.role}.{part}"] = f"{path}.{part}"
        if f"{one.role}.first.weight" in tensors:
            places[f"{one.role}.bias"] = f"{path}.second.bias"
    found = {path: tensors[name].clone() for name, path in places.items() if name in tensors}
    for projections in modules_of(spec).values():
        if projections[0] in apart or f"{projections[0].role}.weight" not in tensors:
            continue
        own = [tensors[f"{projection.role}.weight"] for projection in projections]
        like = projections[0]
        stacks = int(projections[0].stacked)
        stored = [one.mT if like.transposed else one for one in own]
        found[like.weight] = _in_place(stored, projections, spec, width, like.divided_dim + stacks)
        biases = [tensors[f"{one.role}.bias"] for one in projections if f"{one.role}.bias" in tensors]
        if biases:
            found[like.bias] = _in_place(biases, projections, spec, width, stacks)
    return found


def _in_place(
    parts: list[Tensor], projections: list[Projection], spec: SublayerSpec, width: int, dim: int
) -> Tensor:
    """Put the projections of a module in their places along one dimension."""
    if len(parts) == 1:
        return parts[0].clone(memory_format=torch.contiguous_format)
    units = {one.unit: part.shape[dim] // width for one, part in zip(projections, parts, strict=True)}
    places = [unit_features(projection, spec, units, width).flatten() for projection in projections]
    together = torch.cat(parts, dim)
    return together.index_select(dim, torch.cat(places).argsort().to(together.device))
