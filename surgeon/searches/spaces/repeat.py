"""Stretches of layers that run twice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from surgeon.findings.edit import Edit
from surgeon.language.operations.applied import AppliedOperation
from surgeon.language.program import Program
from surgeon.searches.spaces.base import DEEPER, SizedSpace, register

if TYPE_CHECKING:
    from surgeon.opened import Model


@register
class Repeats(SizedSpace):
    """Single layers, and stretches of up to `largest`, that run twice in a row with the same weights.

    They take no parameters, and depth instead of saving it: for budgets of parameters beside what lowers these, and for
    models that are to be deeper.
    """

    name = "repeat"
    summary = "single layers, or stretches of 2, that run twice, with the same weights (repeat:4: of up to 4)"
    place = 26
    serves = (DEEPER,)
    least = 1
    asked = "how many layers are repeated together at most, 1 or more"

    def sizes(self, model: Model) -> Iterable[int]:
        return range(1, min(self.largest, model.num_layers) + 1)

    def operations(self, edits: Sequence[Edit], program: Program, model: Model) -> tuple[AppliedOperation, ...]:  # noqa: ARG002
        return (AppliedOperation("repeat", tuple(edit.layers for edit in edits)),)  # neighbours are no one stretch
