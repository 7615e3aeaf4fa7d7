"""Split layers into tracks that meet every few layers, each branch a slice of the same steps."""

from collections.abc import Iterable
from dataclasses import replace

from surgeon.language.operations.base import Variant, find_stretch, operation
from surgeon.language.program import Fork, Node, Program, Step, steps_of

MOST_SLICES = 1024  # a number beyond is a mistake, which would fill the memory


def fork_of_slices(nodes: Iterable[Node], count: int) -> Fork:
    """A fork in which branch i computes slice i of `count` of every step; the slices keep streams of their own.

    Raises:
        ValueError: if `count` is below 2 or above MOST_SLICES.
    """
    if not 2 <= count <= MOST_SLICES:
        raise ValueError(f"count must be at least 2 slices and at most {MOST_SLICES}, not {count}")
    steps = tuple(steps_of(tuple(nodes)))
    return Fork(tuple(tuple(_slice(step, index, count) for step in steps) for index in range(count)))


def _slice(step: Step, index: int, count: int) -> Step:
    return replace(
        step, sublayers=tuple(replace(whole, piece=(index, count)) for whole in step.sublayers)
    )


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
