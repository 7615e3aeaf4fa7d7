"""Split layers into tracks that meet every few layers."""

from surgeon.language.operations.base import find_stretch, operation
from surgeon.language.operations.declare import Variant
from surgeon.language.operations.slices import fork_of_slices
from surgeon.language.program import Program


@operation(
    variants={
        "tracks:D": Variant(
            place=5,
            argument="depth",
            meaning="how many layers a track has",
            ranks="count",
            note="tracks that meet every D layers",
        )
    }
)
def tracks(program: Program, layers: range, count: int, depth: int) -> Program:
    """Run slices of the layers as tracks that meet every `depth` layers (Parallel Track, algorithm 1).

    Where `depth` does not divide the layers, the last tracks are shorter: they have to meet at the end in any case.

    Args:
        count: how many tracks; the model's heads, KV heads and neurons have to divide by it.
        depth: how many layers the tracks run between two meetings, D in the paper.

    Raises:
        ValueError: if `count` is below 2 or `depth` below 1, or the tracks would meet after every step.
    """
    if depth < 1:
        raise ValueError(f"depth must be at least 1 layer, not {depth}")
    stretch = find_stretch(program, layers)
    if depth == 1 and len(stretch.layers[0]) == 1:
        raise ValueError(
            "tracks of depth 1 meet after every layer, and each of these layers is one step: nothing would change; "
            "use a depth of 2 or more"
        )
    starts = range(0, len(stretch.layers), depth)
    parts = (
        [node for layer in stretch.layers[start : start + depth] for node in layer] for start in starts
    )
    return stretch.replaced_by(*(fork_of_slices(part, count) for part in parts))
