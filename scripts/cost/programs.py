"""The programs of the systems that the papers compare, for a model of so many layers."""

from __future__ import annotations

import warnings

from surgeon.language.operations.fuse_attention_mlp import fuse_attention_mlp
from surgeon.language.operations.ladder import ladder
from surgeon.language.operations.lowrank import lowrank
from surgeon.language.operations.pair import pair
from surgeon.language.operations.tracks import tracks
from surgeon.language.program import Program
from surgeon.language.sublayer import LayerShapes

# DeInfer's compression of 40%, read as the share of parameters that every matrix's factors keep.
KEEP = 0.6
LOW_RANK = {"base": "base", "deinfer": "gather"}


def program_of(system: str, layers: int, shapes: LayerShapes) -> Program:
    """The program of a system as `cases.Run` names it.

    Raises:
        ValueError: for a name that is none.
    """
    dense = Program.dense(layers)
    name, *numbers = system.split(":")
    if name in ("dense", "upper"):
        return dense
    if name == "lp":
        pairs, end = (int(number) for number in numbers)
        return pair(dense, range(end - 2 * pairs, end))
    if name == "ladder":
        return ladder(dense, range(layers))
    if name == "parallel":
        return fuse_attention_mlp(dense, range(layers))
    if name == "tracks":
        return tracks(dense, range(layers), 8, int(numbers[0]))
    if name in LOW_RANK:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return lowrank(dense, range(layers), shapes, keep=KEEP)
    raise ValueError(f"no known system: {system!r}")
