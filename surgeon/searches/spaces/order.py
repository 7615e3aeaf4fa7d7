"""Neighbouring layers in another order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

from surgeon.language.operations.applied import AppliedOperation, Edit
from surgeon.language.program import Program
from surgeon.searches.spaces.base import DEEPER, SizedSpace, register

if TYPE_CHECKING:
    from surgeon.opened import Model


@register
class Orders(SizedSpace):
    """Two neighbouring layers that change places; of up to `largest`, reversals and rotations, too."""

    name = "order"
    summary = "neighbouring layers that change places (order:4: up to 4 layers reversed or rotated)"
    place = 25
    asked = "how many layers are moved at most, 2 or more"
    orders: ClassVar[dict[str, Callable[[range], list[int]]]] = {
        "reversed": lambda layers: [*reversed(layers)],
        "first-to-last": lambda layers: [*layers[1:], layers[0]],
        "last-to-first": lambda layers: [layers[-1], *layers[:-1]],
    }

    def options(self, model: Model) -> Iterator[str]:  # noqa: ARG002
        return iter(self.orders)

    def edits(self, model: Model) -> Iterator[Edit]:
        # Of two layers all three orders are the same.
        return (
            edit for edit in super().edits(model) if len(edit.layers) > 2 or edit.option == "reversed"
        )

    def operations(
        self,
        edits: Sequence[Edit],
        program: Program,  # noqa: ARG002
        model: Model,  # noqa: ARG002
    ) -> tuple[AppliedOperation, ...]:
        orders = [(edit.layers, self.orders[edit.option](edit.layers)) for edit in edits]
        return tuple(
            AppliedOperation("reorder", (layers,), {"order": order}) for layers, order in orders
        )


@register
class Repeats(SizedSpace):
    """Single layers, and stretches of up to `largest`, that run twice in a row with the same weights.

    They take depth instead of saving it: for budgets of parameters beside edits that lower these, and for models that
    are to be deeper.
    """

    name = "repeat"
    summary = (
        "single layers, or stretches of 2, that run twice, with the same weights (repeat:4: of up to 4)"
    )
    place = 26
    serves = (DEEPER,)
    least = 1
    asked = "how many layers are repeated together at most, 1 or more"

    def operations(
        self,
        edits: Sequence[Edit],
        program: Program,  # noqa: ARG002
        model: Model,  # noqa: ARG002
    ) -> tuple[AppliedOperation, ...]:
        # Neighbours are no one stretch.
        return (AppliedOperation("repeat", tuple(edit.layers for edit in edits)),)
