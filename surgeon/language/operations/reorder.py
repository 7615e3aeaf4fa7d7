"""Run layers in an order that is given."""

from surgeon.language.operations.base import find_stretch, operation, show_range
from surgeon.language.program import Program


@operation()
def reorder(program: Program, layers: range, order: list[int]) -> Program:
    """Run the layers in the order given (of which `shuffle` draws one at random).

    Args:
        order: every layer of the stretch once, the one that runs first in front.

    Raises:
        ValueError: if the order has other layers than the stretch, or one of them twice.
    """
    stretch = find_stretch(program, layers)
    if sorted(order) != list(layers):
        raise ValueError(
            f"order {order} must have every layer of {show_range(layers)} once, as in {list(reversed(layers))}"
        )
    nodes = dict(zip(layers, stretch.layers, strict=True))
    return stretch.replaced_by(*(node for layer in order for node in nodes[layer]))
