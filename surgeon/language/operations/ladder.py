"""Let steps read the stream late."""

from surgeon.language.operations.base import (
    KINDS_OF,
    Half,
    Heatmap,
    Variant,
    operation,
    require_present,
    show_range,
)
from surgeon.language.program import Fork, Node, Program, Step, steps_of


@operation(
    heatmaps={"ladder": Heatmap("Ladder", place=8, late=True, curves=True)},
    variants={"ladder": Variant(place=2), "ladder-over-lp": Variant(place=3, over="lp")},
)
def ladder(program: Program, layers: range, sublayers: Half = "both") -> Program:
    """Make steps of the layers read the stream one step late (Ladder Residual, equation 2).

    It also applies to steps that an earlier `pair` made (ladder over LP).

    Args:
        sublayers: which part of each layer is late; the other one reads what it did before.

    Raises:
        ValueError: if a fork, or a step shared with what is outside the range or stays as it is, is in the way.
    """
    require_present(program, layers)
    kinds = KINDS_OF[sublayers]
    inside = set(layers)
    nodes: list[Node] = []
    for node in program.nodes:
        here = [sublayer for step in steps_of((node,)) for sublayer in step.sublayers]
        late = [each for each in here if each.kind in kinds and not inside.isdisjoint(each.layers)]
        if not late:
            nodes.append(node)
        elif isinstance(node, Fork):
            raise ValueError(
                f"layers {show_range(layers)} contain a fork, {node}; a ladder is made of steps only"
            )
        elif not all(inside.issuperset(each.layers) for each in here):
            raise ValueError(
                f"layers {show_range(layers)} cut through {node}; take in all of its layers, or none"
            )
        elif len(late) < len(here):
            raise ValueError(
                f'sublayers {sublayers} cut through {node}, which reads once; use "both", or other layers'
            )
        else:
            nodes.append(Step(node.sublayers, late=True))
    return Program(tuple(nodes))
