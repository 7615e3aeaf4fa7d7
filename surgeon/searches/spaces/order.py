"""Neighbouring layers in another order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

from surgeon.language.operations.applied import AppliedOperation
from surgeon.language.program import Program
from surgeon.searches.edit import Edit
from surgeon.searches.spaces.base import Claim, SizedSpace, claims_of_shape, register

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

    def edits(self, model: Model) -> Iterator[Edit]:
        for size in range(2, min(self.largest, model.num_layers) + 1):
            options = self.orders if size > 2 else ["reversed"]  # of two layers all three are the same
            for option in options:
                for first in range(model.num_layers - size + 1):
                    yield Edit(first, first + size, self.name, option)

    def claims(self, edit: Edit) -> frozenset[Claim]:
        return claims_of_shape(edit)

    def operations(self, edits: Sequence[Edit], program: Program, model: Model) -> tuple[AppliedOperation, ...]:  # noqa: ARG002
        return tuple(
            AppliedOperation("reorder", (edit.layers,), {"order": self.orders[edit.option](edit.layers)})
            for edit in edits
        )
