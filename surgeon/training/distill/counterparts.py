"""Where an edited program's stream has a counterpart in the original: a stream that it can be trained towards.

The original's stream after k whole layers is one place in the original. An edited program passes the same place where
everything it has of the layers before k has been added to the stream, and nothing of the layers from k on. Between the
attention and the feed-forward of a layer, inside a pair, or while layers run out of order, there is no such place.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from surgeon.language.program import Program, steps_of


@dataclass(frozen=True)
class Counterpart:
    """The same place in an edited program and in its original.

    Attributes:
        node: after how many nodes of the program; all of them have landed in the stream, the last one too.
        layer: after how many layers of the original.
    """

    node: int
    layer: int


def counterparts(program: Program, num_layers: int) -> tuple[Counterpart, ...]:
    """All places at which the stream has a counterpart, in program order; the last one is always the program's end.

    Layers that a program leaves out make the place ambiguous: `A0 F0 A2 F2` after F0 could stand for the original's
    stream before its layer 1, or after it. It stands for the one after it, the stream that layer 2 reads in the
    original: what comes next was trained on that, so that what comes before the gap is to make up for it. The end of
    the program stands for the stream after all layers for the same reason: the final norm and the head read it.

    A late step, which reads an older stream, changes nothing of this: it counts where its output is added. A sublayer
    that averages layers counts as all of them, a slice as its layer.

    Args:
        program: of at least one node.
        num_layers: how many layers the original has.

    Raises:
        ValueError: if the program is empty, or names a layer that the original does not have.
    """
    program.require_steps()
    layers = [
        [layer for step in steps_of((node,)) for sublayer in step.sublayers for layer in sublayer.layers]
        for node in program.nodes
    ]
    highest = list(accumulate(map(max, layers), max))
    if highest[-1] >= num_layers:
        raise ValueError(f"the program has layer {highest[-1]}; the original's layers are 0 to {num_layers - 1}")
    lowest_behind = list(accumulate(map(min, reversed(layers)), min))[::-1]
    cuts = zip(highest, lowest_behind[1:], strict=False)
    inside = [Counterpart(node, behind) for node, (before, behind) in enumerate(cuts, start=1) if before < behind]
    return (*inside, Counterpart(len(layers), num_layers))
