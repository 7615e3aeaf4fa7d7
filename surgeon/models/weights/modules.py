"""Modules of a layer that is stored with two factors in place of a matrix, or with fewer heads or neurons."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import Any

from torch import nn

from surgeon.language.program import Program
from surgeon.language.sublayer import KINDS, Sublayer
from surgeon.models.families import Family, Projection, SublayerSpec
from surgeon.models.replacements import (
    ExpertMaps,
    FactoredLinear,
    FamilyEntry,
    ReplacementExperts,
    TakenApart,
    factorise,
    leave_experts,
    narrow,
)
from surgeon.models.weights.layers import modules_of, own_path, require_parts
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
    family = weights.family
    widths = {(one.kind, one.layers): one.width for one in program.sublayers() if one.width is not None}
    if not widths and family.mixture is None and not weights.has_factors():
        return
    entry = family_entry(family, model.config)
    for index, layer in enumerate(model.get_submodule(family.layers)):
        experts = weights.stored_experts(index)
        if entry.mixture is not None and experts is not None:
            leave_experts(layer, entry.mixture, experts)
            take_experts_apart(layer)
        for kind in KINDS:
            width = widths.get((kind, (index,)))
            if width is not None and width == weights.stored_width(kind, index):
                own = Sublayer(kind, (index,), width=width)
                require_parts(own, family.spec(kind, index), family)
                narrow(layer, entry, kind, width)
            factorise(layer, entry, dict(weights.stored_ranks(Sublayer(kind, (index,)))))


def _taken_apart(
    packed: list[Projection], spec: SublayerSpec, tensors: Tensors, head_dim: int
) -> nn.Module:
    parts = {one.role: _linear(own_path(one, spec), tensors) for one in packed}
    if len(parts) > 1:
        return TakenApart(parts, head_dim if packed[0].interleaved else None)
    return parts[packed[0].role]


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


def family_entry(family: Family, config: Any) -> FamilyEntry:
    """Describe an architecture as config.json does it for the modeling file."""
    specs = family.specs()
    units = family.units(config)
    projections = list(dict.fromkeys(p for spec in specs for p in spec.projections if not p.stacked))
    reads = list(dict.fromkeys(p.path for p in projections if p.reads_stream))
    packed = {}  # widths of projections that lie side by side in a module, in the smallest whole numbers
    for path in reads:
        widths = [units[p.unit] for spec in specs for p in spec.projections if p.path == path]
        if len(widths) > 1:
            packed[path] = [width // math.gcd(*widths) for width in widths]
    mixture = None
    if family.mixture is not None:
        rows = family.mixture.whole.items()
        mixture = {
            "experts": family.mixture.experts,
            "rows": [path for name, path in rows if not name.startswith("shared")],
            "counts": list(family.mixture.counts),
            "top_k": list(family.mixture.top_k),
            **family.mlp.stack_layout,
        }
    counts = [f"{spec.module}.{path}" for spec in specs for path in spec.counts if spec.mixture is None]
    return FamilyEntry(
        attentions=tuple(
            {
                "called": list(spec.stages),
                "module": spec.module,
                "slot": spec.cache_slot,
                "renamed": dict(spec.renamed),
                "counted_by": dict(spec.counted_by),
            }
            for spec in family.attentions
        ),
        feed_forward=family.mlp.stages,
        reads=tuple(reads),
        writes=tuple(p.path for p in projections if not p.reads_stream),
        roles=tuple([p.role, p.path] for p in projections),
        turns={p.path: family.head_dim(config) for p in projections if p.interleaved},
        packed=packed,
        groups=units["kv_heads"],
        feature_norms=tuple(family.attention.feature_norms),
        sinks=family.attention.sinks,
        mixture=mixture,
        # Slices replace those whole.
        counts=tuple(path for path in counts if path.rpartition(".")[0] not in reads),
        layer_lists=tuple(family.entries.lists),
        dropout=family.dropout.output,
        output_scale=family.scales.output(config),
        arguments=family.arguments,
        returns_tuple=family.returns_tuple,
        steps=family.steps_per_layer,
        inside=None,
    )
