"""Leave layers out, or their attentions or feed-forwards alone."""

from surgeon.language.operations.base import KINDS_OF, Half, Heatmap, find_stretch, operation
from surgeon.language.program import Node, Program, Step, steps_of


@operation(
    heatmaps={
        "prune": Heatmap("Prune", place=2, paper=True, removes=True, style=1, verb="remove"),
        "prune-attention": Heatmap(
            "Prune attention", {"sublayers": "attention"}, place=9, removes=True, style=2
        ),
        "prune-mlp": Heatmap("Prune MLP", {"sublayers": "mlp"}, place=10, removes=True, style=3),
    }
)
def prune(program: Program, layers: range, sublayers: Half = "both") -> Program:
    """Leave the layers out (Layer Parallelism, section 3, figure 3c), or only their attentions or feed-forwards.

    Args:
        sublayers: which part of each layer to leave out; the other one stays where it is.
    """
    stretch = find_stretch(program, layers)
    kept: list[Node] = []
    for step in (step for layer in stretch.layers for step in steps_of(layer)):
        rest = tuple(sublayer for sublayer in step.sublayers if sublayer.kind not in KINDS_OF[sublayers])
        kept += [Step(rest)] if rest else []
    return stretch.replaced_by(*kept)
