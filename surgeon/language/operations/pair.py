"""Run neighbouring layers together, group by group."""

from typing import Literal

from surgeon.language.operations.base import Heatmap, Variant, find_stretch, operation
from surgeon.language.program import Fork, Node, Program, Step, steps_of

_AS_RUN = "pairs as tensor parallelism runs them"


@operation(
    heatmaps={
        "2-parallel": Heatmap(
            "2-Parallel", {"form": "par"}, place=5, paper=True, group=2, curves=True, style=6
        ),
        "3-parallel": Heatmap("3-Parallel", {"form": "par", "size": 3}, place=6, group=3, style=7),
        "lp": Heatmap("LP pairs", place=7, group=2, curves=True, verb="pair", note=_AS_RUN),
    },
    variants={"lp": Variant(place=1)},
)
def pair(program: Program, layers: range, form: Literal["lp", "par"] = "lp", size: int = 2) -> Program:
    """Run neighbouring layers two by two in parallel; of an odd stretch, the last layer stays as it is.

    Form "lp" is what tensor parallelism runs with half the all-reduces: the attentions read the same stream, then the
    feed-forwards do (Layer Parallelism, equation LP). Form "par" gives each layer a stream of its own (equation PAR).

    Args:
        size: how many layers a group has; 3 gives the paper's triplets.

    Raises:
        ValueError: if `size` is below 2.
    """
    if size < 2:
        raise ValueError(f"size must be at least 2 layers a group, not {size}")
    stretch = find_stretch(program, layers)
    nodes: list[Node] = []
    for start in range(0, len(stretch.layers), size):
        group = stretch.layers[start : start + size]
        if len(group) < size:
            nodes += [node for layer in group for node in layer]
        else:
            nodes += _side_by_side(group) if form == "lp" else [Fork(group)]
    return stretch.replaced_by(*nodes)


def _side_by_side(group: tuple[tuple[Node, ...], ...]) -> list[Node]:
    """The layers' first steps as one step, then their second ones."""
    together = zip(*map(steps_of, group), strict=True)
    return [Step(tuple(sublayer for step in steps for sublayer in step.sublayers)) for steps in together]
