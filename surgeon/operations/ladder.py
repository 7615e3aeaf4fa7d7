"""Let steps read the stream late."""

from surgeon.operations.base import layers_of, operation, require_present, show_range
from surgeon.operations.declare import Heatmap, Variant
from surgeon.program import Fork, Node, Program, Step


@operation(
    heatmaps={"ladder": Heatmap("Ladder", place=8, late=True, curves=True)},
    variants={"ladder": Variant(place=2), "ladder-over-lp": Variant(place=3, over="lp")},
)
def ladder(program: Program, layers: range) -> Program:
    """Make every step of the layers read the stream one step late (Ladder Residual, equation 2).

    It also applies to steps that an earlier `pair` made (ladder over LP).

    Raises:
        ValueError: if a fork, or a step shared with layers outside the range, is in the way.
    """
    require_present(program, layers)
    nodes: list[Node] = []
    for node in program.nodes:
        inside = layers_of(node) & set(layers)
        if not inside:
            nodes.append(node)
        elif isinstance(node, Fork):
            raise ValueError(f"layers {show_range(layers)} contain a fork, {node}; a ladder is made of steps only")
        elif layers_of(node) - inside:
            raise ValueError(f"layers {show_range(layers)} cut through {node}; take in all of its layers, or none")
        else:
            nodes.append(Step(node.sublayers, late=True))
    return Program(tuple(nodes))
