"""Put two factors of a lower rank in the place of matrices."""

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import floor
from typing import Literal

from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from surgeon.language.operations.base import Heatmap, operation, require_present, show_range
from surgeon.language.program import Program
from surgeon.language.sublayer import ROLES, LayerShapes, Sublayer
from surgeon.words import did_you_mean

Role = Literal["q", "g", "k", "v", "o", "gate", "up", "down"]
Method = Literal["plain", "activation", "whitened"]
Ranks = dict[str, int]  # by role


class Calibration(TypedDict, total=False):
    """The text that factors are made for.

    Attributes:
        data: as `surgeon spectrum` takes it.
        tokens: how many.
        after: how many before them are left out, of measured ones, say.
        window, separator: as the options of these names.
        hash: of the tokens ("sha256:..."): others are refused.
        sequential: whether it goes through the model as it has become so far, and not through the unedited one.
        update: whether second factors are fitted to the outputs of the unedited model (SVD-LLM's closed form).
    """

    data: str
    tokens: int
    after: int
    window: int | None
    separator: str | None
    hash: str | None
    sequential: bool
    update: bool


@operation(
    heatmaps={
        "lowrank": Heatmap(
            "Low rank",
            place=11,
            varied="keep",
            values=(0.9, 0.8, 0.6, 0.4, 0.2),
            note="each layer alone, its matrices as plain factors with these shares of their parameters",
        )
    },
    anywhere=True,
)
def lowrank(
    program: Program,
    layers: range,
    shapes: LayerShapes,
    weights: list[Role] | None = None,
    keep: float | None = None,
    ranks: dict[Role, int | list[int | None]] | None = None,
    method: Method = "plain",  # noqa: ARG001 - this and what follows are of the factors' values
    alpha: float = 0.5,
    allocation: Literal["uniform", "energy", "damage"] = "uniform",
    calibration: Calibration | None = None,  # noqa: ARG001
) -> Program:
    """Put two factors in the place of matrices (W = A B, DeInfer's equation 1).

    A matrix of which two factors would have as many parameters stays whole, with a warning. Layers that lack a matrix
    which most have (linear attentions) have no factors of it. Each expert of a mixture
    has factors of its own; shared experts, which every token goes through, stay whole. It also applies to steps
    that earlier operations made, and twice to the same layers where it is about other matrices. Of narrowed sublayers
    it is about what is left of the matrices.

    Args:
        weights: which matrices, for `keep`; all by default.
        keep: the share of each matrix's parameters that its two factors may have.
        ranks: by matrix instead: a rank for all layers, or one for each of them (null: whole).
        method: how factors are found: `surgeon.models.weights.decompose` describes the methods.
        alpha: of the method activation.
        allocation: how `keep` is shared out among matrices: evenly. The other ways have to measure the model first, and
            what they find are `ranks`.
        calibration: the text that methods other than plain go by.

    Raises:
        ValueError: if not one of `keep` and `ranks` is given, one is out of range, the layers lack a matrix, an average
            reaches beyond them, or the allocation has to be measured.
    """
    require_present(program, layers)
    if (keep is None) == (ranks is None):
        raise ValueError(
            "give either keep, a share of each matrix's parameters such as 0.6, or ranks, by matrix"
        )
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be from 0 to 1, not {alpha:g}")
    if allocation != "uniform":
        raise ValueError(
            f"allocation {allocation} has to be measured: surgeon spectrum, with this and keep {keep or 0.6:g}, "
            "writes a recipe with the ranks it finds; use that, or leave allocation out"
        )
    if ranks is not None and weights is not None:
        raise ValueError("weights are the keys of ranks; leave one of the two out")

    @cache
    def choose_ranks(kind: str, width: int | None, other: int | None = None) -> dict[int, Ranks]:
        own = shapes if other is None else shapes.others[other]
        left = own if width is None else own.narrow(kind, width)
        alike = [layer for layer in layers if shapes.others.get(layer, shapes) == own]
        lacked = shapes.matrices.keys() - own.matrices.keys()  # by layers that differ
        if ranks is not None:
            return _assign_ranks(layers, alike, left, ranks, lacked)
        if weights is None:
            named = None
        else:
            named = [role for role in weights if role not in lacked]
        return _choose_ranks(layers, left, named, keep or 0.0)

    for_whole = choose_ranks("", None)
    inside = frozenset(layers)

    def truncate(sublayer: Sublayer) -> Sublayer:
        if inside.isdisjoint(sublayer.layers):
            return sublayer
        kind = sublayer.kind
        width = sublayer.width
        other = next((layer for layer in sublayer.layers if layer in shapes.others), None)
        usual = width is None and other is None
        return _truncate(sublayer, layers, for_whole if usual else choose_ranks(kind, width, other))

    return program.map_sublayers(truncate)


def rank_for(keep: float, out_features: int, in_features: int) -> int | None:
    """The highest rank whose factors have at most this share of a matrix's parameters, at least 1.

    None where two factors of that rank would save nothing: the matrix stays whole.
    """
    # A share that is reached exactly must not be missed by the last digit of a product.
    rank = max(1, floor(keep * out_features * in_features / (out_features + in_features) * (1 + 1e-12)))
    if saves(rank, out_features, in_features):
        return rank
    return None


def saves(rank: int, out_features: int, in_features: int) -> bool:
    """True if two factors of a rank have fewer parameters than the matrix."""
    return rank * (out_features + in_features) < out_features * in_features


def _choose_ranks(
    layers: range, shapes: LayerShapes, weights: Sequence[str] | None, keep: float
) -> dict[int, Ranks]:
    if not 0 < keep <= 1:
        raise ValueError(f"keep must be more than 0 and at most 1, not {keep:g}")
    found: Ranks = {}
    own_roles = [role for roles in ROLES.values() for role in roles if role in shapes.matrices]
    for role in own_roles if weights is None else weights:
        rank = rank_for(keep, *_shape(role, shapes))
        if rank is None:
            _warn_whole(role, layers, f"with keep {keep:g}", shapes)
        else:
            found[role] = rank
    return dict.fromkeys(layers, found)


def _assign_ranks(
    layers: range,
    alike: Sequence[int],
    shapes: LayerShapes,
    ranks: Mapping[Role, int | list[int | None]],
    lacked: Collection[str],
) -> dict[int, Ranks]:
    """The ranks of the layers that have these shapes, of all layers that are given some.

    Args:
        lacked: matrices that others have, and these do not.
    """
    found: dict[int, Ranks] = {layer: {} for layer in layers}
    for role, given in ranks.items():
        by_layer = given if isinstance(given, list) else [given] * len(layers)
        if len(by_layer) != len(layers):
            raise ValueError(
                f"there are {len(by_layer)} ranks of {role} for the {len(layers)} layers {show_range(layers)}; give "
                "one rank for all of them, or one for each"
            )
        given_to = zip(layers, by_layer, strict=True)
        asked = {layer: rank for layer, rank in given_to if rank is not None and layer in alike}
        if role in lacked:
            if asked and given is by_layer:
                raise ValueError(f"layer {min(asked)} has no matrix {role!r}; give null in its place")
            continue
        size = _shape(role, shapes)
        for rank in sorted(set(asked.values())):
            if not 1 <= rank <= min(size):
                raise ValueError(
                    f"rank {rank} of {role} must be from 1 to {min(size)}, the matrix's full rank"
                )
            if not saves(rank, *size):
                _warn_whole(role, layers, f"of rank {rank}", shapes)
        for layer, rank in asked.items():
            if saves(rank, *size):
                found[layer][role] = rank
    return found


def _shape(role: str, shapes: LayerShapes) -> tuple[int, int]:
    if role not in shapes.matrices:
        raise ValueError(
            f"the model's layers have no matrix {role!r}; {did_you_mean(role, shapes.matrices)}"
        )
    return shapes.matrices[role]


def _warn_whole(role: str, layers: range, factors: str, shapes: LayerShapes) -> None:
    out_features, in_features = shapes.matrices[role]
    warnings.warn(
        f"lowrank: {role} of layers {show_range(layers)} stays whole: two factors {factors} save nothing of a matrix "
        f"of {out_features} x {in_features}",
        stacklevel=4,
    )


def _truncate(sublayer: Sublayer, layers: range, chosen: Mapping[int, Ranks]) -> Sublayer:
    inside = [layer for layer in sublayer.layers if layer in layers]
    if len(inside) < len(sublayer.layers):
        raise ValueError(
            f"layers {show_range(layers)} cut through {sublayer}; take in all of its layers, or none"
        )
    first, *others = [
        {role: rank for role, rank in chosen[layer].items() if role in ROLES[sublayer.kind]}
        for layer in inside
    ]
    if any(other != first for other in others):
        raise ValueError(
            f"the layers of {sublayer} are given different ranks; their average has one of each matrix"
        )
    for role in first:
        if sublayer.rank(role) is not None:
            raise ValueError(
                f"layers {show_range(layers)} overlap with what an earlier operation changed: {sublayer} has factors "
                f"in place of {role} already"
            )
    return replace(sublayer, ranks=(*sublayer.ranks, *first.items()))
