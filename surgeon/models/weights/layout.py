"""Places of roles in the modules that hold them, and of heads and neurons in a role.

A module may hold several projections, packed one after the other or head by head, and may be stored transposed. These
are the indices that lead from a role to the module, and back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from surgeon.language.sublayer import FEED_FORWARD, Sublayer, require_width
from surgeon.models.families import Family, Projection, SublayerSpec
from surgeon.models.families.specs import Units


@cache
def modules_of(spec: SublayerSpec) -> dict[str, list[Projection]]:
    """Sort a sublayer's projections by their module."""
    found: dict[str, list[Projection]] = {}
    for projection in spec.projections:
        found.setdefault(projection.path, []).append(projection)
    return found


def own_path(projection: Projection, spec: SublayerSpec) -> str:
    """Return the path of a projection's own tensors, from the layer, once its module is taken apart.

    A module is taken apart when one of its matrices is stored as two factors. Then each projection in it has
    `first.weight` and `second.weight` below this path, or `weight` if it is still whole, (out_features, in_features)
    all of them; its bias is `second.bias`, or `bias`. Factors of stacked matrices are stacked; a mixture's experts are
    taken apart together.
    """
    packed = modules_of(spec)[projection.path]
    if projection.stacked:
        return f"{projection.path.rpartition('.')[0]}.{projection.role}"
    if len(packed) == 1:
        return projection.path
    return f"{projection.path}.{projection.role}"


def taken_apart(spec: SublayerSpec, factored: Callable[[str], bool]) -> list[Projection]:
    """Return the projections in modules that are taken apart.

    Args:
        factored: whether the matrix of a role is two factors.
    """
    modules: dict[str, list[Projection]] = {}
    for one in spec.projections:
        modules.setdefault(one.path.rpartition(".")[0] if one.stacked else one.path, []).append(one)
    return [
        one
        for inside in modules.values()
        if any(factored(each.role) for each in inside)
        for one in inside
    ]


def unit_features(projection: Projection, spec: SublayerSpec, units: Units, width: int) -> Tensor:
    """Index a projection's heads or neurons in its module: (units, features of each).

    Indices count along `projection.divided_dim` of the weight as it is stored; other projections packed into the same
    module have the other ones.

    Args:
        units: of the sublayer.
        width: of one head; 1 for neurons.
    """
    packed = [other for other in spec.projections if other.path == projection.path]
    place = packed.index(projection)
    count = units[projection.unit]
    if projection.interleaved:
        groups = min(units[other.unit] for other in packed)
        sizes = [units[other.unit] // groups * width for other in packed]
        start = sum(sizes[:place])
        by_group = torch.arange(groups * sum(sizes)).view(groups, -1)
        return by_group[:, start : start + sizes[place]].reshape(count, width)
    start = sum(units[other.unit] * width for other in packed[:place])
    return torch.arange(start, start + count * width).view(count, width)


def units_in(kind: str, units: Units) -> int:
    """Count the units that narrowed sublayers have fewer of: KV groups of an attention, neurons of a feed-forward."""
    if kind == FEED_FORWARD:
        return units["neurons"]
    return units.get("kv_heads", units.get("heads", 0))


def narrow_units(sublayer: Sublayer, units: Units) -> Units:
    """Count a sublayer's heads or neurons of those of its layer; refuse more than there are."""
    if sublayer.width is None:
        return units
    whole = units_in(sublayer.kind, units)
    require_width(sublayer, whole)
    return {unit: count * sublayer.width // whole for unit, count in units.items()}


def holds_output_bias(sublayer: Sublayer) -> bool:
    """Tell whether a sublayer has the bias that is added to the stream: of slices, the first one."""
    return sublayer.piece is None or sublayer.piece[0] == 0


def indivisible(sublayer: Sublayer, units: Units) -> str | None:
    """Say why a sublayer cannot be cut into equal slices as its `piece` is one of; None if it can."""
    if sublayer.piece is None:
        return None
    count = sublayer.piece[1]
    if all(size % count == 0 for size in units.values()):
        return None
    whole = replace(sublayer, piece=None, ranks=())
    sizes = " and ".join(f"{size} {unit.replace('kv_', 'KV ')}" for unit, size in units.items())
    return f"the {sizes} of {whole} do not divide into {count} slices"


def require_parts(sublayer: Sublayer, spec: SublayerSpec, family: Family) -> None:
    """Refuse fewer heads of an attention that is kept as it is, and factors where it has no matrices."""
    if spec.kept is None:
        return
    factors = sublayer.ranks and not spec.projections
    if sublayer.width is not None or factors:
        what = "factorised" if factors else "narrowed"
        raise ValueError(f"{sublayer}: {family.attentions_like(spec)} cannot be {what}: {spec.kept}")


def require_sliceable(spec: SublayerSpec, family: Family) -> None:
    """Refuse slices of a sublayer that would not add up to it.

    Raises:
        ValueError: if its output goes through a norm before it is added, queries and keys of all heads through one, or
            it is kept as it is.
    """
    if spec.norms_output:
        raise ValueError(
            f"sublayers of {family.name} cannot be sliced: their output goes through a norm before it is added"
        )
    if spec.kept is not None:
        raise ValueError(f"{family.attentions_like(spec)} cannot be sliced: {spec.kept}")
    if spec.joins_heads:
        raise ValueError(f"attentions of {family.name} cannot be sliced: {spec.why_whole}")
