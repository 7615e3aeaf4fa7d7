"""Run layers side by side."""

from surgeon.language.operations.base import Heatmap, find_stretch, operation
from surgeon.language.program import Fork, Program


@operation(heatmaps={"parallel": Heatmap("Parallel", place=4, paper=True, style=5)})
def parallel(program: Program, layers: range) -> Program:
    """Run all the layers on the same input and add what each of them adds (Layer Parallelism, equation PAR)."""
    stretch = find_stretch(program, layers)
    return stretch.replaced_by(Fork(stretch.layers))
