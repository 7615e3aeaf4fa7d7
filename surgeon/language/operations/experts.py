"""Leave mixtures some of their experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from surgeon.language.operations.base import Heatmap, operation, require_present, show_range
from surgeon.language.program import Program
from surgeon.language.sublayer import FEED_FORWARD, LayerShapes, Sublayer


def _each_expert(shapes: LayerShapes, layer: int) -> tuple[float, ...]:
    """Return a layer's experts that can be left out: none where it is no mixture, or has one only."""
    mixture = shapes.layer_of(Sublayer(FEED_FORWARD, (layer,))).mixture
    if mixture is None or mixture.experts < 2:
        return ()
    return tuple(range(mixture.experts))


@operation(
    heatmaps={
        "experts": Heatmap(
            "Expert left out",
            {"seed": None},  # nothing of it is random
            varied="drop",
            values=_each_expert,
            across="expert",
            place=15,
            note="of mixtures: each layer alone, without each of its experts; experts.csv has what each gets and gives",
        )
    },
    anywhere=True,
)
def experts(
    program: Program,
    layers: range,
    shapes: LayerShapes,
    keep: int | list[int] | list[list[int]] | None = None,
    drop: int | list[int] | None = None,
    seed: int | None = None,
) -> Program:
    """Leave mixtures some of their experts.

    The router chooses among those that stay, as many of them for a token as before, or all (REAP prunes experts so).
    Layers that are no mixtures stay as they are. It also applies to steps that earlier operations made.

    Args:
        keep: the numbers of the experts that each mixture keeps, or a list of them for each of the layers; or how many,
            which `seed` then draws.
        drop: instead, the number of the expert, or the numbers of those, that are left out.
        seed: of a choice at random.

    Raises:
        ValueError: if not one of `keep` and `drop` is given, or none of the layers is a mixture; if an expert is not
            there, named twice, or left out already, or none would stay; or if a seed has nothing to draw, or which
            experts stay is left open.
    """
    require_present(program, layers)
    if (keep is None) == (drop is None):
        raise ValueError(
            "give either keep or drop: the numbers of the experts that stay, or of those left out"
        )
    if isinstance(keep, int) == (seed is None):
        raise ValueError(
            "a number of experts is drawn by a seed, and what is listed is not drawn; give the numbers of those that "
            "stay, as in [0, 3], or how many of them and a seed"
        )
    kept = {
        layer: _choose_experts(place, layer, layers, shapes, keep, drop, seed)
        for place, layer in enumerate(layers)
    }
    if not any(kept.values()):
        raise ValueError(f"none of the layers {show_range(layers)} is a mixture of experts")

    def fewer(sublayer: Sublayer) -> Sublayer:
        chosen = kept.get(sublayer.layers[0]) if sublayer.kind == FEED_FORWARD else None
        if not chosen:
            return sublayer
        if sublayer.experts is not None or len(sublayer.layers) > 1:
            raise ValueError(
                f"layers {show_range(layers)} overlap with what an earlier operation changed: {sublayer} has not all "
                "experts of its layer"
            )
        made = replace(sublayer, experts=chosen)
        if len(chosen) == shapes.experts(sublayer):
            return sublayer
        return made

    return program.map_sublayers(fewer)


def _choose_experts(
    place: int,
    layer: int,
    layers: range,
    shapes: LayerShapes,
    keep: int | Sequence[int] | Sequence[Sequence[int]] | None,
    drop: int | Sequence[int] | None,
    seed: int | None,
) -> tuple[int, ...]:
    """The experts that a layer keeps, ascending; none where it is no mixture."""
    mixture = shapes.layer_of(Sublayer(FEED_FORWARD, (layer,))).mixture
    if mixture is None:
        return ()
    if isinstance(keep, int):
        if not 1 <= keep <= mixture.experts:
            raise ValueError(
                f"of {mixture.experts} experts 1 to {mixture.experts} can be kept, not {keep}"
            )
        return tuple(sorted(Random(f"{seed} {layer}").sample(range(mixture.experts), keep)))
    named = [drop] if isinstance(drop, int) else drop
    listed = list(named or ()) if keep is None else _of_layer(keep, place, layers)
    wrong = next(
        (one for one in listed if not 0 <= one < mixture.experts or listed.count(one) > 1), None
    )
    if wrong is not None or not listed:
        raise ValueError(
            f"experts are different numbers from 0 to {mixture.experts - 1}, as in [0, 3], not {listed}"
        )
    if drop is not None:
        listed = [one for one in range(mixture.experts) if one not in listed]
        if not listed:
            raise ValueError(
                f"all {mixture.experts} experts of layer {layer} would be left out; keep at least one"
            )
    return tuple(sorted(listed))


def _of_layer(keep: Sequence[int] | Sequence[Sequence[int]], place: int, layers: range) -> list[int]:
    """Return the list for one layer, or for all of them."""
    each = [one for one in keep if isinstance(one, Sequence)]
    if not each:
        return [one for one in keep if isinstance(one, int)]
    if len(each) != len(layers):
        raise ValueError(
            f"there are {len(each)} lists of experts for the {len(layers)} layers {show_range(layers)}; give one list "
            "for all of them, or one for each"
        )
    return list(each[place])
