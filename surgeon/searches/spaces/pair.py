"""Neighbouring layers that run together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

from surgeon.language.operations.applied import AppliedOperation
from surgeon.language.program import Program
from surgeon.searches.edit import Edit
from surgeon.searches.spaces.base import Claim, SizedSpace, claims_of_shape, joined, register

if TYPE_CHECKING:
    from surgeon.opened import Model


class LayerGroups(SizedSpace):
    """Groups of 2 to `largest` neighbouring layers, in one form.

    Attributes:
        form: of the operation `pair`.
    """

    form: ClassVar[str]
    asked = "how many layers a group has at most, 2 or more"

    def edits(self, model: Model) -> Iterator[Edit]:
        for size in range(2, min(self.largest, model.num_layers) + 1):
            for first in range(model.num_layers - size + 1):
                yield Edit(first, first + size, self.name)

    def claims(self, edit: Edit) -> frozenset[Claim]:
        return claims_of_shape(edit, late=self.form == "par")

    def operations(self, edits: Sequence[Edit], program: Program, model: Model) -> tuple[AppliedOperation, ...]:  # noqa: ARG002
        """One of each size, neighbouring groups joined into one stretch."""
        found = []
        for size in sorted({len(edit.layers) for edit in edits}):
            stretches = joined([edit.layers for edit in edits if len(edit.layers) == size])
            given = {} if self.form == "lp" else {"form": self.form}
            found.append(AppliedOperation("pair", stretches, given | ({"size": size} if size > 2 else {})))
        return tuple(found)


@register
class Pairs(LayerGroups):
    """Groups as Layer Parallelism runs them."""

    name = "pair"
    summary = "neighbouring layers run together as LP steps, two by two (pair:4: in groups of 2 to 4)"
    place = 30
    form = "lp"


@register
class ParallelGroups(LayerGroups):
    """Groups whose layers have streams of their own."""

    name = "par"
    summary = "neighbouring layers run side by side, each with a stream of its own (par:4: groups of 2 to 4)"
    place = 31
    form = "par"
