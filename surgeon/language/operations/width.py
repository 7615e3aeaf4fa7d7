"""Leave attentions some of their heads, and feed-forwards some of their neurons."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from math import floor
from typing import Any, Literal, get_args

from surgeon.language.operations.base import Heatmap, operation, require_present, show_range
from surgeon.language.operations.lowrank import Calibration
from surgeon.language.program import Program
from surgeon.language.sublayer import (
    ATTENTION,
    FEED_FORWARD,
    UNITS,
    LayerShapes,
    Sublayer,
    require_width,
)
from surgeon.words import layer_list

# Criteria that need a text; surgeon.analysis.importance describes them.
Criterion = Literal["activation", "wanda"]
By = Literal["magnitude", "random", Criterion]
CRITERIA: tuple[Criterion, ...] = get_args(Criterion)
USUAL: Criterion = "wanda"  # of what has a text
_BY_TEXT = {"by": USUAL, "seed": None}  # nothing of it is random

_SHARES = (0.9, 0.75, 0.5, 0.25)


@operation(
    heatmaps={
        "width-heads": Heatmap(
            "Width of attention",
            _BY_TEXT,
            place=13,
            varied="heads",
            values=_SHARES,
            note="each layer alone, its attention with these shares of its KV groups, those of most importance on the "
            "text (Wanda)",
        ),
        "width-neurons": Heatmap(
            "Width of MLP",
            _BY_TEXT,
            place=14,
            varied="neurons",
            values=_SHARES,
            note="the same for the neurons of its MLP",
        ),
    },
    anywhere=True,
)
def width(
    program: Program,
    layers: range,
    shapes: LayerShapes,
    heads: float | int | list[int] | None = None,
    neurons: float | int | None = None,
    by: By | None = None,  # this and what follows say which of them, and that is weights
    seed: int | None = None,
    calibration: Calibration | None = None,
) -> Program:
    """Leave attentions some of their heads, and feed-forwards some of their neurons.

    Heads go with their KV group, a KV head with all heads that share it. Attentions without any (linear ones among
    others) stay as they are, with a warning. It also applies to steps that earlier
    operations made; a slice is then of what is left, and factors are of what is left of their matrices.

    Args:
        heads: how many KV groups each attention keeps: a share of them (0.75; rounded, at least one), a whole number,
            or a list of their numbers. 1 is one group, 1.0 is all.
        neurons: how many neurons each feed-forward keeps: a share, or a whole number.
        by: which ones are kept: what a text needs most, by activations (Minitron), or by these and the weights behind
            them (Wanda); some at random; or those of the largest weights, which for neurons was worse than chance
            (docs/measured-searches.md). Without it wanda where there is a text, else KV groups of the largest weights
            and any neurons. Listed groups are kept whatever it says.
        seed: of the choice at random, and of no other; 0 without it.
        calibration: the text, where they are chosen by one.

    Raises:
        ValueError: if neither heads nor neurons are given, one is out of range, there is a seed or a text that what is
            chosen by has no use for, a sublayer is narrowed already, is an average, or has slices or ranks that do not
            fit what is left.
    """
    require_present(program, layers)
    if heads is None and neurons is None:
        raise ValueError(
            "give heads, neurons, or both: a share such as 0.75, or how many of them are kept"
        )
    if seed is not None and by != "random":
        raise ValueError(f"seed {seed} is of a choice at random; give by: random, or leave seed out")
    if calibration is not None and by not in (None, *CRITERIA):
        raise ValueError(
            f"by {by} goes by no text; leave calibration out, or give by: {', '.join(CRITERIA[:-1])} or {CRITERIA[-1]}"
        )
    kept = {ATTENTION: heads, FEED_FORWARD: neurons}
    for kind in kept:
        if kept[kind] is not None and kind not in shapes.units:
            raise ValueError(
                f"the {UNITS[kind]} of this model's layers cannot be told apart, so that all of them stay"
            )
    widths = {
        kind: count_of(kept[kind], kind, shapes.units[kind]) for kind in kept if kept[kind] is not None
    }
    for kind, count in widths.items():
        if count == shapes.units[kind] and isinstance(kept[kind], float) and kept[kind] != 1:
            warnings.warn(
                f"width: all {count} {UNITS[kind]} of layers {show_range(layers)} stay: {kept[kind]:g} of them, "
                "rounded, is all",
                stacklevel=3,
            )

    _warn_of_whole(layers, widths, shapes)

    def narrow(sublayer: Sublayer) -> Sublayer:
        count = None if set(layers).isdisjoint(sublayer.layers) else widths.get(sublayer.kind)
        if (
            count in (None, shapes.units.get(sublayer.kind))
            or sublayer.kind not in shapes.layer_of(sublayer).units
        ):
            return sublayer
        return _narrow(sublayer, count, layers, shapes)

    return program.map_sublayers(narrow)


def _warn_of_whole(layers: range, widths: Mapping[str, int], shapes: LayerShapes) -> None:
    """Say which layers have units that cannot be told apart, where others have some that can (linear attentions)."""
    for kind in widths:
        whole = [
            layer for layer in layers if kind not in shapes.layer_of(Sublayer(kind, (layer,))).units
        ]
        if whole:
            where = f"layer{'s' * (len(whole) > 1)} {layer_list(whole)}"
            said = f"width: the {UNITS[kind]} of {where} cannot be told apart, so that all of them stay"
            warnings.warn(said, stacklevel=4)


def chosen_by(parameters: Mapping[str, Any]) -> By | None:
    """Return the calibration by which a recipe's entry chooses units; None if it names none, and has no text."""
    return parameters.get("by") or (USUAL if parameters.get("calibration") else None)


def count_of(kept: float | int | list[int] | None, kind: str, units: int) -> int:
    """Count the KV groups or neurons that a share, a number or a list stands for.

    Raises:
        ValueError: if that is out of range, or a list has one twice.
    """
    what = UNITS[kind]
    if isinstance(kept, list):
        wrong = next((one for one in kept if not 0 <= one < units or kept.count(one) > 1), None)
        if wrong is not None or not kept:
            raise ValueError(
                f"{what} to keep are different numbers from 0 to {units - 1}, as in [0, 2], not {kept}"
            )
        return len(kept)
    if isinstance(kept, int):
        if not 1 <= kept <= units:
            raise ValueError(
                f"of {units} {what} 1 to {units} can be kept, not {kept}; a share of them is written 0.75"
            )
        return kept
    if kept is None or not 0 < kept <= 1:
        raise ValueError(
            f"a share of {what} is above 0 and at most 1, not {kept}; a number of them is written whole"
        )
    return max(1, floor(kept * units + 0.5))


def _narrow(sublayer: Sublayer, count: int | None, layers: range, shapes: LayerShapes) -> Sublayer:
    if sublayer.width is not None:
        raise ValueError(
            f"layers {show_range(layers)} overlap with what an earlier operation changed: {sublayer} is narrow already"
        )
    made = replace(sublayer, width=count)
    require_width(made, shapes.layer_of(made).units[made.kind])
    if made.piece is not None and (made.width or 0) % made.piece[1]:
        raise ValueError(
            f"the {made.width} {UNITS[made.kind]} of {made} do not divide into {made.piece[1]} slices"
        )
    made.parameters(shapes)  # refuses ranks above those of what is left of the matrices
    return made
