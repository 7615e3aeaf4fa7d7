"""Run attention and feed-forward of a layer side by side."""

from surgeon.language.operations.base import Variant, find_stretch, operation
from surgeon.language.program import Program, layer_nodes


@operation(variants={"fused": Variant(place=4, note="attention and MLP side by side")})
def fuse_attention_mlp(program: Program, layers: range) -> Program:
    """Let attention and feed-forward of each layer read the same stream (GPT-J and PaLM; Ladder Residual's Parallel).

    Raises:
        ValueError: if they do so already.
    """
    stretch = find_stretch(program, layers)
    if len(stretch.layers[0]) == 1:
        raise ValueError("attention and feed-forward of these layers read the same stream already")
    return stretch.replaced_by(
        *(node for layer in layers for node in layer_nodes(layer, steps_per_layer=1))
    )
