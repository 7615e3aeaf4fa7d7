"""Run layers in another order."""

import random

from surgeon.language.operations.base import Heatmap, find_stretch, operation
from surgeon.language.program import Program


def permutation(layers: range, seed: int) -> list[int]:
    """The order `shuffle` runs these layers in, never their own: the same for the same seed, on every machine."""
    order = list(layers)
    generator = random.Random(f"{seed}:{layers.start}:{layers.stop}")
    while order == [*layers] and len(order) > 1:
        generator.shuffle(order)
    return order


@operation(heatmaps={"shuffle": Heatmap("Shuffle", place=1, paper=True)})
def shuffle(program: Program, layers: range, seed: int = 0) -> Program:
    """Run the layers in a random order, fixed by the seed (Layer Parallelism, section 3, figure 3a)."""
    stretch = find_stretch(program, layers)
    nodes = dict(zip(layers, stretch.layers, strict=True))
    return stretch.replaced_by(*(node for layer in permutation(layers, seed) for node in nodes[layer]))
