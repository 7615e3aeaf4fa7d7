"""A program's sublayer, and the shapes of a model's layers, from which its parameters follow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

ATTENTION = "A"
FEED_FORWARD = "F"
KINDS = (ATTENTION, FEED_FORWARD)
# What each kind's matrices are called, in the order in which a program's text names them.
ROLES = {ATTENTION: ("q", "g", "k", "v", "o"), FEED_FORWARD: ("gate", "up", "down")}
# Matrices of shared experts, which every token goes through.
SHARED = ("shared_gate", "shared_up", "shared_down")
NO_AVERAGE = (
    "experts of different layers are not averaged, as each layer's router numbers them by itself; leave some of them "
    "out (F4!e0,e3), or average attentions alone"
)
NO_WIDTH = "the neurons of a mixture's experts stay; leave out whole experts (F4!e0,e3)"
UNITS = {ATTENTION: "KV groups", FEED_FORWARD: "neurons"}  # what a narrowed sublayer has fewer of
EXPERTS = "experts"  # what a mixture may have fewer of, too
# These write to the stream: a slice has some of their inputs, of the others some outputs.
WRITING = ("o", "down", "shared_down")


@dataclass(frozen=True, order=True)
class Sublayer:
    """A sublayer: kind, layer (or the layers whose weights are averaged), experts, width, slice and ranks.

    Attributes:
        kind: "A" for attention, "F" for feed-forward.
        layers: the layers whose weights it has; more than one means their plain average.
        piece: (index, count), the slice of the heads or neurons, or None for the whole.
        span: how many slices that lie side by side it is, from that one on; programs name single ones.
        ranks: (role, rank) of every matrix that is the product of two factors, of the whole sublayer's before it is
            sliced, in the order of ROLES; a role that is not named is a whole matrix.
        width: the number of its KV groups (each a KV head with all heads that share it), or of its neurons; None for
            all of its layer. A slice is of these, and factors are of what they leave of a matrix. Weights say which
            they are.
        experts: the numbers of its experts, ascending, among those that its layer is stored with; None for all. Its
            router has their rows only, and takes as many of them for a token as the layer's does, or all. Shared
            experts stay.
    """

    kind: str
    layers: tuple[int, ...]
    piece: tuple[int, int] | None = None
    ranks: tuple[tuple[str, int], ...] = ()
    width: int | None = None
    experts: tuple[int, ...] | None = None
    span: int = 1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(
                f"a sublayer is of kind A (attention) or F (feed-forward), not {self.kind!r}"
            )
        if not self.layers or min(self.layers) < 0 or len(set(self.layers)) < len(self.layers):
            raise ValueError(f"a sublayer needs one or more distinct layers from 0, not {self.layers}")
        if self.piece is not None and not 0 <= self.piece[0] < self.piece[1]:
            raise ValueError(
                f"slice index {self.piece[0]} must lie in 0..{self.piece[1] - 1} (slices count from 0)"
            )
        if self.width is not None and self.width < 1:
            raise ValueError(
                f"a narrowed sublayer keeps at least 1 of its {UNITS[self.kind]}, not {self.width}"
            )
        if self.width is not None and len(self.layers) > 1:
            raise ValueError(
                f"{self} cannot be: {UNITS[self.kind]} are chosen in each layer by itself, and an average would mix "
                "some that have nothing to do with each other; narrow single layers"
            )
        self._check_experts()
        roles = [role for role, _ in self.ranks]
        for role, rank in self.ranks:
            if role not in ROLES[self.kind]:
                choices = ", ".join(ROLES[self.kind])
                raise ValueError(
                    f"sublayers of kind {self.kind} have no matrix {role!r}; name some of {choices}"
                )
            if rank < 1:
                raise ValueError(f"the rank of {role} must be at least 1, not {rank}")
            if roles.count(role) > 1:
                raise ValueError(f"the rank of {role} is given twice")
        in_order = sorted(self.ranks, key=lambda entry: ROLES[self.kind].index(entry[0]))
        object.__setattr__(self, "ranks", tuple(in_order))  # one text, and one hash, for equal sublayers

    def _check_experts(self) -> None:
        if self.experts is None:
            return
        if self.kind != FEED_FORWARD:
            raise ValueError(f"attention has no experts: A{self.layers[0]} cannot keep some of them")
        if not self.experts or min(self.experts) < 0 or list(self.experts) != sorted(set(self.experts)):
            raise ValueError(
                f"a mixture keeps one or more of its experts, in ascending order, not {self.experts}"
            )
        if len(self.layers) > 1:
            raise ValueError(f"{self} cannot be: {NO_AVERAGE}")

    def __str__(self) -> str:
        text = "~".join(f"{self.kind}{layer}" for layer in self.layers)
        if self.experts is not None:
            text += "!" + ",".join(f"e{expert}" for expert in self.experts)
        if self.width is not None:
            text += f"#{self.width}"
        if self.piece is not None:
            text += f"/{self.piece[1]}:{self.piece[0]}"
        if self.span > 1:
            text += f"+{self.span}"
        if self.ranks:
            text += "@" + ",".join(f"{role}{rank}" for role, rank in self.ranks)
        return text

    def __repr__(self) -> str:
        return f"Sublayer({str(self)!r})"

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """Owners of its weights: (kind, layer) of each of its layers."""
        return tuple((self.kind, layer) for layer in self.layers)

    @property
    def sizes(self) -> tuple[tuple[str, int], ...]:
        """Sizes that are below its layer's: experts, KV groups or neurons, and ranks, by name."""
        experts = () if self.experts is None else ((EXPERTS, len(self.experts)),)
        width = () if self.width is None else ((UNITS[self.kind], self.width),)
        return (*experts, *width, *self.ranks)

    def stored_in(self, place: int) -> Sublayer:
        """Place the sublayer in a stored layer of this number, whose experts count from 0."""
        experts = None if self.experts is None else tuple(range(len(self.experts)))
        return replace(self, layers=(place,), experts=experts)

    def rank(self, role: str) -> int | None:
        """Return the rank of a matrix that is the product of two factors; None for a whole one."""
        return dict(self.ranks).get(role)

    def parameters(self, shapes: LayerShapes) -> int:
        """Count its parameters in a model whose layers have these shapes.

        Norms and routers stay whole in slices; a bias that is added to the stream belongs to slice 0.

        Raises:
            ValueError: if features do not divide into the slices, a rank is above that of its matrix, it has more
                KV groups or neurons than the layers, or experts that its layer does not have.
        """
        return self._parameters(shapes, shapes.experts(self))

    def active_parameters(self, shapes: LayerShapes) -> int:
        """Count the parameters that compute one token: of a mixture, those of `top_k` experts.

        Raises:
            ValueError: as `parameters`.
        """
        mixture = shapes.layer_of(self).mixture
        experts = shapes.experts(self)
        return self._parameters(shapes, experts if mixture is None else min(experts, mixture.top_k))

    def _parameters(self, shapes: LayerShapes, counted: int) -> int:
        """Count the parameters of this many experts, and of all else."""
        own = shapes.layer_of(self)
        one = sum(
            self._matrix_parameters(role, own) for role in ROLES[self.kind] if role in own.matrices
        )
        beside = own.norms.get(self.kind, 0)
        if own.mixture is not None and self.kind == FEED_FORWARD:
            beside += own.mixture.router * shapes.experts(self) + own.mixture.shared_router
            beside += sum(self._matrix_parameters(role, own) for role in SHARED if role in own.matrices)
        return beside + counted * one

    def weight_bytes(self, shapes: LayerShapes, number_bytes: int) -> int:
        """Count the bytes of its parameters; errors as `parameters`."""
        return self.parameters(shapes) * number_bytes

    def _matrix_parameters(self, role: str, shapes: LayerShapes) -> int:
        outputs, inputs = shapes.matrix(self, role)
        rank = self.rank(role)
        bias = shapes.biases.get(role, 0)
        if role not in WRITING:
            bias = bias * outputs // shapes.matrices[role][0]  # of what is left of its outputs
        if rank is not None and rank > min(outputs, inputs):
            raise ValueError(
                f"{self}: rank {rank} of {role} is above that of a matrix of {outputs} x {inputs}"
            )
        if self.piece is not None:
            index, count = self.piece
            divided = inputs if role in WRITING else outputs
            if divided % count:
                raise ValueError(
                    f"{self}: {divided} features of {role} do not divide into {count} slices"
                )
            if role in WRITING:
                inputs = inputs // count
                bias = 0 if index else bias
            else:
                outputs = outputs // count
                bias = bias // count
        return bias + (outputs * inputs if rank is None else rank * (outputs + inputs))


@dataclass(frozen=True)
class LayerShapes:
    """The shapes of a model's layers, from which a program's parameters follow.

    Attributes:
        matrices: (out_features, in_features) by role; of a mixture, those of one expert.
        biases: sizes by role; a role without a bias may be left out.
        norms: parameters of the norms of a sublayer, by kind.
        units: KV groups of an attention, and neurons of a feed-forward, by kind; needed where these are narrowed.
        mixture: of a feed-forward of experts.
        others: shapes of layers that differ (dense ones among mixtures), by their numbers.
    """

    matrices: Mapping[str, tuple[int, int]]
    biases: Mapping[str, int] = field(default_factory=dict)
    norms: Mapping[str, int] = field(default_factory=dict)
    units: Mapping[str, int] = field(default_factory=dict)
    mixture: MixtureShapes | None = None
    others: Mapping[int, LayerShapes] = field(default_factory=dict)

    def layer_of(self, sublayer: Sublayer) -> LayerShapes:
        """Return the shapes of a sublayer's (first) layer."""
        return self.others.get(sublayer.layers[0], self)

    def experts(self, sublayer: Sublayer) -> int:
        """Number of a sublayer's experts; 1 where it is no mixture.

        Raises:
            ValueError: if it is to have experts that its layer does not have, or is an average of mixtures.
        """
        if sublayer.kind != FEED_FORWARD:
            return 1
        each = (self.others.get(layer, self).mixture for layer in sublayer.layers)
        mixture = next((one for one in each if one is not None), None)
        require_experts(sublayer, None if mixture is None else mixture.experts)
        if mixture is None:
            return 1
        if sublayer.experts is None:
            return mixture.experts
        return len(sublayer.experts)

    def check_experts(self, sublayers: Iterable[Sublayer]) -> None:
        """Refuse sublayers with experts that their layers do not have, and averages of mixtures.

        Raises:
            ValueError: as `experts`.
        """
        for sublayer in dict.fromkeys(sublayers):
            self.experts(sublayer)

    def matrix(self, sublayer: Sublayer, role: str) -> tuple[int, int]:
        """(out_features, in_features) of a matrix of a sublayer before it is sliced.

        Raises:
            ValueError: if it has more KV groups or neurons than the layers, or is a mixture and narrowed.
        """
        outputs, inputs = self.matrices[role]
        if sublayer.width is None:
            return outputs, inputs
        width = sublayer.width
        units = self.units[sublayer.kind]
        require_width(sublayer, units)
        if sublayer.kind == FEED_FORWARD and self.mixture is not None:
            raise ValueError(f"{sublayer}: {NO_WIDTH}")
        if role in WRITING:
            return (outputs, inputs * width // units)
        return (outputs * width // units, inputs)

    def narrow(self, kind: str, width: int) -> LayerShapes:
        """Return the shapes of layers whose sublayers of a kind have this many KV groups or neurons; without biases."""
        like = Sublayer(kind, (0,), width=width)
        left = {role: self.matrix(like, role) for role in ROLES[kind] if role in self.matrices}
        return LayerShapes(
            {**self.matrices, **left}, norms=self.norms, units={**self.units, kind: width}
        )


@dataclass(frozen=True)
class MixtureShapes:
    """Shapes of a mixture besides the matrices of its experts.

    Attributes:
        experts: the router chooses among.
        top_k: experts of a token.
        router: numbers of the router for each expert.
        shared_router: numbers that weigh what shared experts give.
    """

    experts: int
    top_k: int
    router: int
    shared_router: int = 0


def require_experts(sublayer: Sublayer, experts: int | None) -> None:
    """Refuse experts that a layer does not have, and averages of mixtures.

    Args:
        experts: of its layer; None where it is no mixture.

    Raises:
        ValueError: with what the layer has.
    """
    if experts is not None and len(sublayer.layers) > 1:
        raise ValueError(f"{sublayer} cannot be: {NO_AVERAGE}")
    if sublayer.experts is None:
        return
    if experts is None:
        raise ValueError(
            f"{sublayer}: the feed-forward of layer {sublayer.layers[0]} is no mixture of experts"
        )
    if sublayer.experts[-1] >= experts:
        raise ValueError(
            f"{sublayer}: the experts of layer {sublayer.layers[0]} are 0 to {experts - 1}, so that it has no "
            f"{sublayer.experts[-1]}"
        )


def require_width(sublayer: Sublayer, units: int) -> None:
    """Refuse more KV groups or neurons than there are."""
    if sublayer.width is not None and sublayer.width > units:
        raise ValueError(
            f"{sublayer} has more {UNITS[sublayer.kind]} than the {units} of its layer; use at most {units}"
        )


# The layers of the unedited model that one comes from, and which copy it is.
Layer = tuple[tuple[int, ...], int]
WHOLE = "whole"
_COUNTED = (EXPERTS, *UNITS.values())
_OF_KIND = {kind: (*_COUNTED[: kind == FEED_FORWARD], UNITS[kind], *ROLES[kind]) for kind in ROLES}
_IN_ORDER = [name for names in _OF_KIND.values() for name in names]


def size_lines(sublayers: Iterable[Sublayer]) -> list[str]:
    """Describe the groups of layers of equal sizes, "layers 2 to 5: KV groups 3; up 55", but whole ones."""
    found: dict[tuple[int, ...], dict[str, dict[str, None]]] = {}
    for sublayer in sublayers:
        by_name = found.setdefault(sublayer.layers, {})
        sizes = dict(sublayer.sizes)
        for name in _OF_KIND[sublayer.kind]:
            by_name.setdefault(name, {})[str(sizes.get(name) or WHOLE)] = None
    groups: dict[str, list[Layer]] = {}
    for layers, by_name in sorted(found.items()):
        # Several sizes of one layer are joined.
        less = {name: " or ".join(sizes) for name, sizes in by_name.items() if [*sizes] != [WHOLE]}
        if less:
            groups.setdefault(sizes_text(less), []).append((layers, 0))
    return [f"{layers_text(layers)}: {text}" for text, layers in groups.items()]


def sizes_text(sizes: Mapping[str, str | int]) -> str:
    """Write widths and ranks by name, equal ranks together: "KV groups 3; q, o 38; k, v 25"."""
    groups: dict[tuple[str, str | bool], list[str]] = {}
    for name in sorted(sizes, key=_IN_ORDER.index):
        groups.setdefault((str(sizes[name]), name in _COUNTED and name), []).append(name)
    return "; ".join(f"{', '.join(names)} {size}" for (size, _), names in groups.items())


def layers_text(layers: Iterable[Layer]) -> str:
    """Write layers: "layers 2, 4 to 7", and "layers 2+3 to 8+9" where several are stored as one."""
    given = list(layers)
    runs: list[list[Layer]] = []
    for layer in given:
        last = runs[-1][-1] if runs else None
        if (
            last
            and layer[1] == last[1] == 0
            and len(layer[0]) == len(last[0])
            and layer[0][0] == last[0][-1] + 1
        ):
            runs[-1].append(layer)
        else:
            runs.append([layer])
    texts = [_one(run[0]) if len(run) == 1 else f"{_one(run[0])} to {_one(run[-1])}" for run in runs]
    return ("layer " if len(given) == 1 else "layers ") + ", ".join(texts)


def _one(layer: Layer) -> str:
    return "+".join(map(str, layer[0])) + " again" * layer[1]
