"""Run one layer with averaged weights in place of several."""

from surgeon.language.operations.base import Heatmap, average_sublayers, find_stretch, operation
from surgeon.language.program import Program, Step, steps_of


@operation(heatmaps={"merge": Heatmap("Merge", place=3, paper=True, style=4)})
def merge(program: Program, layers: range) -> Program:
    """Replace the layers by one with the average of their weights (Layer Parallelism, section 3, figure 3b)."""
    stretch = find_stretch(program, layers)
    merged = []
    # The layers' first steps, then their second ones.
    for steps in zip(*map(steps_of, stretch.layers), strict=True):
        same_place = zip(*(step.sublayers for step in steps), strict=True)
        merged.append(Step(tuple(average_sublayers(list(sublayers)) for sublayers in same_place)))
    return stretch.replaced_by(*merged)
