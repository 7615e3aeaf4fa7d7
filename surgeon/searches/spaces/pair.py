"""Neighbouring layers that run together."""

from __future__ import annotations

from typing import Any, ClassVar

from surgeon.language.operations.applied import AppliedOperation, Edit
from surgeon.searches.spaces.base import TIMES, Claim, SizedSpace, claims_of_shape, register


@register
class Pairs(SizedSpace):
    """Groups of 2 to `largest` neighbouring layers, as Layer Parallelism runs them.

    Attributes:
        form: of the operation `pair`.
    """

    name = "pair"
    summary = "neighbouring layers run together as LP steps, two by two (pair:4: in groups of 2 to 4)"
    place = 30
    serves: ClassVar[tuple[str, ...]] = ("depth", "syncs", "wire_bytes", *TIMES)
    asked = "how many layers a group has at most, 2 or more"
    form: ClassVar[str] = "lp"

    def claims(self, edit: Edit) -> frozenset[Claim]:
        return claims_of_shape(edit, late=self.form == "par")

    def operation(self, layers: tuple[range, ...], option: str, size: int) -> AppliedOperation:  # noqa: ARG002
        form: dict[str, Any] = {} if self.form == "lp" else {"form": self.form}
        return AppliedOperation("pair", layers, form | ({"size": size} if size > 2 else {}))


@register
class ParallelGroups(Pairs):
    """Groups whose layers have streams of their own."""

    name = "par"
    summary = (
        "neighbouring layers run side by side, each with a stream of its own (par:4: groups of 2 to 4)"
    )
    place = 31
    serves = ()
    form = "par"
