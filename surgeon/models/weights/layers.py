"""Single layers as they are stored: the places of heads and neurons in their modules, and the names of their tensors.

A module may hold several projections, packed one after the other or head by head, and may be stored transposed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
from torch import Tensor

from surgeon.language.sublayer import FEED_FORWARD, KINDS, Sublayer, require_width
from surgeon.models.families import Family, Projection, SublayerSpec
from surgeon.models.families.specs import Units
from surgeon.models.weights.store import Store


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


@dataclass(frozen=True)
class Group:
    """One layer to be stored.

    Attributes:
        layers: those it has the weights of; more than one for their average.
        count: slices it is cut into, where slices of other numbers are stored apart.
        sublayers: its attention and its feed-forward, by kind, unsliced; one that the program does not use is whole.
        used: the kinds that the program uses.
    """

    layers: tuple[int, ...]
    count: int | None
    sublayers: dict[str, Sublayer]
    used: frozenset[str]

    def sublayer(self, kind: str, piece: tuple[int, int] | None = None) -> Sublayer:
        return replace(self.sublayers[kind], piece=piece)


class Groups:
    """The layers to be stored for some sublayers.

    Args:
        by_count: whether slices of other numbers are stored apart, because each number has weights of its own.
    """

    def __init__(self, sublayers: Iterable[Sublayer], by_count: bool) -> None:
        self.by_count = by_count
        variants: dict[tuple[tuple[int, ...], int | None], dict[str, list[Sublayer]]] = {}
        for sublayer in sublayers:
            of_kind = variants.setdefault(self._key(sublayer), {kind: [] for kind in KINDS})[
                sublayer.kind
            ]
            if (unsliced := replace(sublayer, piece=None)) not in of_kind:
                of_kind.append(unsliced)
        self.groups: list[Group] = []
        self._places: dict[tuple[Sublayer, int | None], int] = {}
        for (layers, count), by_kind in variants.items():
            for index in range(max(map(len, by_kind.values()))):
                used = frozenset(kind for kind in KINDS if index < len(by_kind[kind]))
                held = {
                    kind: by_kind[kind][index] if kind in used else Sublayer(kind, layers)
                    for kind in KINDS
                }
                for kind in used:
                    self._places[held[kind], count] = len(self.groups)
                self.groups.append(Group(layers, count, held, used))

    def place(self, sublayer: Sublayer) -> int:
        """Return the number of the layer that holds a sublayer."""
        return self._places[replace(sublayer, piece=None), self._key(sublayer)[1]]

    def _key(self, sublayer: Sublayer) -> tuple[tuple[int, ...], int | None]:
        return sublayer.layers, sublayer.piece[
            1
        ] if self.by_count and sublayer.piece is not None else None


class Names:
    """The names of stored tensors by their paths from the causal language model."""

    def __init__(self, store: Store, family: Family) -> None:
        self.store = store
        self.family = family

    @cached_property
    def _left_out(self) -> str:
        """The beginning of names in the model that is missing here."""
        path = self.family.layers
        first = path.partition(".")[0] + "."
        whole = any(name.startswith(f"{path}.") for name in self.store.names())
        bare = any(name.startswith(f"{path.removeprefix(first)}.") for name in self.store.names())
        if bare and not whole:
            return first
        return ""

    @property
    def prefix_of_layers(self) -> str | None:
        """The beginning of layers' names, or None if there are none."""
        prefix = self.own(f"{self.family.layers}.")
        if any(name.startswith(prefix) for name in self.store.names()):
            return prefix
        return None

    @cached_property
    def layers(self) -> str:
        """The beginning of layers' names, before the layer's number.

        Raises:
            ValueError: if there are none.
        """
        if (prefix := self.prefix_of_layers) is not None:
            return prefix
        prefix = self.own(f"{self.family.layers}.")
        raise ValueError(
            f"{self.store.where} has no tensors named {prefix}*, as {self.family.name} has; is its config.json right?"
        )

    def of(self, path: str) -> str:
        """Return the name of the tensor at a path, also where there is none.

        The head's stands for an embedding that is not stored, where they are tied.
        """
        name = self.own(path)
        if path == f"{self.family.embedding}.weight" and name not in self.store:
            head = self.own(f"{self.family.head}.weight")
            if head in self.store:
                return head
            return name
        return name

    def own(self, path: str) -> str:
        """Return the name of the tensor at a path where nothing else stands for it."""
        head = f"{self.family.head}."
        if path.startswith(head):
            renamed = f"{self.family.stored_head}.{path.removeprefix(head)}"
            if self.family.stored_head is None or renamed not in self.store:
                return path
            return renamed
        name = path.removeprefix(self._left_out)
        if self.family.stored_names and name not in self.store:
            # Files may have a layer's tensor under another name.
            number, _, inside = name.removeprefix(f"{self.family.layers}.").partition(".")
            for own, stored in self.family.stored_names:
                renamed = name.removesuffix(inside) + stored + inside.removeprefix(own)
                if number.isdecimal() and inside.startswith(own) and renamed in self.store:
                    return renamed
        return name

    def parts(self, path: str, experts: int) -> tuple[str, ...]:
        """Return the tensors that a parameter of the model is stored as: one, as a rule, or rows, one after the other.

        Args:
            experts: matrices stacked in it, if it is stacked.
        """
        name = self.own(path)
        if name in self.store or not path.startswith(f"{self.family.layers}."):
            return (name,)
        number, _, inside = path.removeprefix(f"{self.family.layers}.").partition(".")
        if number.isdecimal():
            projections = self.family.spec(FEED_FORWARD, int(number)).projections
        else:
            projections = ()
        alone = [one.stored for one in projections if one.stored is not None and one.weight == inside]
        layer = f"{self.family.layers}.{number}."
        each = tuple(
            self.own(f"{layer}{one.format(expert)}.weight") for expert in range(experts) for one in alone
        )
        return each or (name,)

    def below(self, layer: int, path: str) -> dict[str, str]:
        """Return the tensors of a module of a layer, or of one inside it, by their paths from the layer."""
        prefix = f"{self.layers}{layer}."
        found = dict[str, str]()
        for name in (name for name in self.store.names() if name.startswith(prefix)):
            inside = name.removeprefix(prefix)
            for own, stored in self.family.stored_names:
                if inside.startswith(stored):
                    inside = own + inside.removeprefix(stored)
            if inside.startswith(f"{path}."):
                found[inside] = name
        return found
