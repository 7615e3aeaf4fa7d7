"""Single layers as they are stored: their heads, neurons and experts, and the places of these in their modules.

Heads and neurons are counted from the shapes of the weights, never from the configuration: layers may differ in width
(a fused LP pair is one layer of twice the heads and neurons). A module may hold several projections, packed one after
the other or head by head, and may be stored transposed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
from torch import Tensor

from surgeon.language.sublayer import ATTENTION, FEED_FORWARD, KINDS, NO_WIDTH, Sublayer, require_width
from surgeon.models.families import Family, Projection, SublayerSpec
from surgeon.models.families.specs import Bounds, Units
from surgeon.models.weights.store import Dense, Factored, Store


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
    """Refuse narrower mixtures, fewer heads of an attention that is kept as it is, and factors without matrices."""
    if sublayer.width is not None and spec.mixture is not None:
        raise ValueError(f"{sublayer}: {NO_WIDTH}")
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


Kept = slice | Tensor  # of features, to be indexed with


class StoredWeights:
    """Stored layers, seen through their family's description."""

    def __init__(self, store: Store, family: Family, head_dim: int) -> None:
        self.store = store
        self.family = family
        self.names = Names(store, family)
        self.head_dim = head_dim
        # How layers are stored is found out once: what derives many sublayers asks for it again and again.
        self._known_units: dict[tuple[str, int], Units] = {}
        self._known_own: dict[tuple[int, str, int], Dense | Factored | None] = {}
        self._known_places: dict[tuple[int, str], Tensor] = {}

    def __contains__(self, path: str) -> bool:
        return self.names.stored_name(path) in self.store

    def shape(self, path: str) -> tuple[int, ...]:
        """Return the shape of a tensor, by its path from the causal language model."""
        return self.store.shape(self.names.stored_name(path))

    def tensor(self, path: str, bounds: Bounds | None = None, dim: int = 0) -> Tensor:
        """Return a tensor, or a part of it along one dimension."""
        name = self.names.stored_name(path)
        if bounds is None:
            return self.store.tensor(name)
        return self.store.part(name, dim, *bounds)

    def count_layers(self) -> int:
        """Count stored layers; the configuration of an edited model may count attentions of its program."""
        pattern = re.compile(rf"{re.escape(self.names.layers)}(\d+)\.")
        return 1 + max(int(match[1]) for name in self.store.names() if (match := pattern.match(name)))

    @property
    def position_rows(self) -> int:
        """Rows of a learned position embedding."""
        path = self.family.positions.embedding
        if path is None:
            return 0
        return self.shape(f"{path}.weight")[0]

    def has_factors(self) -> bool:
        """Tell whether some layer stores two factors in place of a matrix."""
        prefix = self.names.layers
        return any(
            name.startswith(prefix) and name.endswith(".first.weight") for name in self.store.names()
        )

    def stored_width(self, kind: str, layer: int) -> int:
        """Count the KV groups, or neurons, of a stored layer."""
        return units_in(kind, self.stored_units(kind, layer))

    def stored_experts(self, layer: int) -> int | None:
        """Count the experts of a stored layer; None where it is no mixture."""
        mixture = self.family.spec(FEED_FORWARD, layer).mixture
        if mixture is None:
            return None
        return self.shape(f"{self.prefix(layer)}{mixture.router}.weight")[0]

    def prefix(self, layer: int) -> str:
        return f"{self.family.layers}.{layer}."

    def unit_width(self, kind: str) -> int:
        """Count the features of a head of an attention, or of a neuron of a feed-forward."""
        if kind == ATTENTION:
            return self.head_dim
        return 1

    def stored_units(self, kind: str, layer: int) -> Units:
        """Count the heads and KV heads, or neurons, of a stored layer.

        Raises:
            ValueError: if the shape of a weight is not a multiple of the head's width, or does not fit the others.
        """
        if (kind, layer) in self._known_units:
            return self._known_units[kind, layer]
        units: Units = {}
        width = self.unit_width(kind)
        spec = self.family.spec(kind, layer)
        for projection in spec.projections:
            own = self.own_matrix(layer, kind, projection)
            if own is not None:
                size = own.shape[1 - int(projection.reads_stream)]
                if size % width:
                    path = f"{self.prefix(layer)}{projection.path}"
                    raise ValueError(f"{path} has {size} features, which does not fit heads of {width}")
                units[projection.unit] = size // width
        # Projections on their own first: what they say is needed to tell packed ones apart.
        for packed in sorted(modules_of(spec).values(), key=len):
            if self.own_matrix(layer, kind, packed[0]) is not None:
                continue
            name = f"{self.prefix(layer)}{packed[0].weight}"
            count = self.shape(name)[packed[0].divided_dim + int(packed[0].stacked)]
            units_alone = sum(units.get(projection.unit, 0) for projection in packed)
            missing = [projection.unit for projection in packed if projection.unit not in units]
            rest = count // width - units_alone
            if count % width or (missing and rest % len(missing)) or (not missing and rest):
                raise ValueError(
                    f"{name} has shape {self.shape(name)}, which does not fit heads of {width} or the other projections"
                )
            units |= dict.fromkeys(missing, rest // len(missing) if missing else 0)
        self._known_units[kind, layer] = units
        return units

    def own_matrix(
        self, layer: int, kind: str, projection: Projection, expert: int = 0
    ) -> Dense | Factored | None:
        """Return a projection's own matrix, of a module that is taken apart or of an expert; else None."""
        key = layer, projection.role, expert
        if key in self._known_own:
            return self._known_own[key]
        found: Dense | Factored | None = None
        spec = self.family.spec(kind, layer)
        path = f"{self.prefix(layer)}{own_path(projection, spec)}"
        index = expert if projection.stacked else None
        if f"{path}.first.weight" in self:
            first, second = (
                Dense(self.store, self.names.stored_name(f"{path}.{one}.weight"), index=index)
                for one in ("first", "second")
            )
            found = Factored(first, second)
        elif (
            len(modules_of(spec)[projection.path]) > 1 or projection.stacked
        ) and f"{path}.weight" in self:
            found = Dense(self.store, self.names.stored_name(f"{path}.weight"), index=index)
        elif projection.stored is not None:
            alone = f"{self.prefix(layer)}{projection.stored.format(expert)}.weight"
            if alone in self:
                found = Dense(self.store, self.names.stored_name(alone))
        self._known_own[key] = found
        return found

    def layer_matrix(
        self, layer: int, kind: str, projection: Projection, kept: Kept, expert: int
    ) -> Dense | Factored:
        """Return a matrix of a layer, or of an expert, with these of its own features."""
        own = self.own_matrix(layer, kind, projection, expert)
        places = self.places(layer, kind, projection)[kept]
        if own is None:
            name = self.names.stored_name(f"{self.prefix(layer)}{projection.weight}")
            dim = projection.divided_dim
            if len(places) == self.store.shape(name)[dim + int(projection.stacked)]:
                features = None
            else:
                features = places
            index = expert if projection.stacked else None
            return Dense(self.store, name, dim, features, projection.transposed, index)
        dim = 1 - int(projection.reads_stream)
        if len(places) == own.shape[dim]:
            features = None
        else:
            features = places
        if isinstance(own, Dense):
            return replace(own, dim=dim, features=features)
        if projection.reads_stream:
            return Factored(own.first, replace(own.second, features=features))
        return Factored(replace(own.first, dim=1, features=features), own.second)

    def bias_path(self, layer: int, kind: str, projection: Projection, expert: int) -> str:
        """Return the path of the bias behind a matrix, if there is one."""
        own = self.own_matrix(layer, kind, projection, expert)
        prefix = self.prefix(layer)
        if own is None:
            return f"{prefix}{projection.bias}"
        path = f"{prefix}{own_path(projection, self.family.spec(kind, layer))}"
        if projection.stored is not None and f"{path}.weight" not in self and isinstance(own, Dense):
            return f"{prefix}{projection.stored.format(expert)}.bias"
        if isinstance(own, Factored):
            return f"{path}.second.bias"
        return f"{path}.bias"

    def one_of(self, path: str, index: int | None) -> Tensor:
        """Return a tensor, or one of those that are stacked in it."""
        if index is None:
            return self.tensor(path)
        return self.tensor(path, (index, index + 1))[0]

    def places(self, layer: int, kind: str, projection: Projection) -> Tensor:
        """Index the features of a projection in the tensors that a layer stores it in."""
        key = layer, projection.role
        if key not in self._known_places:
            units = self.stored_units(kind, layer)
            width = self.unit_width(kind)
            if self.own_matrix(layer, kind, projection) is None:
                spec = self.family.spec(kind, layer)
                self._known_places[key] = unit_features(projection, spec, units, width).flatten()
            else:
                self._known_places[key] = torch.arange(units[projection.unit] * width)
        return self._known_places[key]


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

    def stored_name(self, path: str) -> str:
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
