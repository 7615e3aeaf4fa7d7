"""Drop the synchronisation between attention and feed-forward."""

from surgeon.language.operations.base import Variant, find_stretch, operation
from surgeon.language.operations.tracks import fork_of_slices
from surgeon.language.program import Program


@operation(variants={"desync": Variant(place=6, ranks="count")})
def desync(program: Program, layers: range, count: int) -> Program:
    """Let slices of each layer meet after the feed-forward only, not after the attention too (sync-point drop).

    Each slice's feed-forward reads the stream with its own slice of the attention added, without the others' (SPD, Kim
    et al. 2025, as Layer Parallelism describes it in appendix B.1).

    Args:
        count: how many slices; as many as the ranks it is to run on, and a divisor of heads, KV heads and neurons.

    Raises:
        ValueError: if `count` is below 2, or the layers have no synchronisation to drop.
    """
    stretch = find_stretch(program, layers)
    if len(stretch.layers[0]) == 1:
        raise ValueError(
            "attention and feed-forward of these layers read the same stream and synchronise once: there is nothing "
            "to drop; use tracks with a depth of 2 or more"
        )
    return stretch.replaced_by(*(fork_of_slices(layer, count) for layer in stretch.layers))
