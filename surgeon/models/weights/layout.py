"""Where roles lie in the modules that hold them, and where heads and neurons lie in a role.

A module may hold several projections, packed one after the other or head by head, and may be stored transposed. Code
that needs a matrix asks for its role; these are the indices that lead from one to the other, and back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from surgeon.language.sublayer import FEED_FORWARD, Sublayer, require_width
from surgeon.models.families import Family, Projection, SublayerSpec
from surgeon.models.families.specs import Unit

Bounds = tuple[int, int]
Units = dict[Unit, int]


@cache
def modules_of(spec: SublayerSpec) -> dict[str, list[Projection]]:
    """A sublayer's projections by the module they lie in."""
    found: dict[str, list[Projection]] = {}
    for projection in spec.projections:
        found.setdefault(projection.path, []).append(projection)
    return found


def own_path(projection: Projection, spec: SublayerSpec) -> str:
    """Where a projection has tensors of its own, from the layer, once its module is taken apart.

    A module is taken apart when one of its matrices is stored as two factors. Then each projection in it has
    `first.weight` and `second.weight` below this path, or `weight` if it is still whole, (out_features, in_features)
    all of them; its bias is `second.bias`, or `bias`. Of matrices that are stacked, so are the factors; a mixture's
    experts are taken apart together.
    """
    packed = modules_of(spec)[projection.path]
    if projection.stacked:
        return f"{projection.path.rpartition('.')[0]}.{projection.role}"
    if len(packed) == 1:
        return projection.path
    return f"{projection.path}.{projection.role}"


def taken_apart(spec: SublayerSpec, factored: Callable[[str], bool]) -> list[Projection]:
    """The projections that lie in modules taken apart, because something in them is stored as two factors.

    Args:
        factored: whether the matrix of a role is.
    """
    modules: dict[str, list[Projection]] = {}
    for one in spec.projections:
        modules.setdefault(one.path.rpartition(".")[0] if one.stacked else one.path, []).append(one)
    return [one for inside in modules.values() if any(factored(each.role) for each in inside) for one in inside]


def unit_features(projection: Projection, spec: SublayerSpec, units: Units, width: int) -> Tensor:
    """Where a projection's heads or neurons lie in its module: (units, features of each), indices.

    For the weight as it is stored they count along `projection.divided_dim`; other projections packed into the same
    module have the other indices.

    Args:
        units: how many of each the sublayer has.
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
    """How many KV groups an attention has, or neurons a feed-forward: what narrowed ones have fewer of."""
    if kind == FEED_FORWARD:
        return units["neurons"]
    return units.get("kv_heads", units.get("heads", 0))


def narrowed(sublayer: Sublayer, units: Units) -> Units:
    """What a sublayer has of the heads or neurons of its layer.

    Raises:
        ValueError: if it is to have more than there are.
    """
    if sublayer.width is None:
        return units
    whole = units_in(sublayer.kind, units)
    require_width(sublayer, whole)
    return {unit: count * sublayer.width // whole for unit, count in units.items()}


def unit_bounds(size: int, piece: Bounds | None) -> Bounds:
    """First and end of the units of one slice, (index, count).

    Where there are more slices than units (KV heads shared by many heads), several slices hold the same one.
    """
    index, count = piece or (0, 1)
    return index * size // count, -(-(index + 1) * size // count)


def holds_output_bias(sublayer: Sublayer) -> bool:
    """Whether the bias that is added to the stream belongs to this sublayer: of slices, to the first one only."""
    return sublayer.piece is None or sublayer.piece[0] == 0


def indivisible(sublayer: Sublayer, units: Units, replicate: bool = False) -> str | None:
    """Why a sublayer cannot be cut into the slices its `piece` says; None if it can.

    Args:
        replicate: whether more slices than KV heads are fine (slices then hold copies of a KV head).
    """
    if sublayer.piece is None:
        return None
    count = sublayer.piece[1]

    def divides(unit: Unit, size: int) -> bool:
        return size % count == 0 or (replicate and unit == "kv_heads" and count % size == 0)

    if all(divides(unit, size) for unit, size in units.items()):
        return None
    whole = replace(sublayer, piece=None, ranks=())
    sizes = " and ".join(f"{size} {unit.replace('kv_', 'KV ')}" for unit, size in units.items())
    return f"the {sizes} of {whole} do not divide into {count} slices"


def require_parts(sublayer: Sublayer, spec: SublayerSpec, family: Family) -> None:
    """Refuse fewer heads than an attention has that is kept as it is, and factors where it has no matrices.

    Raises:
        ValueError: saying which attentions those are, and why they are kept.
    """
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
        raise ValueError(f"attentions cannot be sliced: {family.name} {spec.why_whole}")
