"""Layers, attentions and MLPs that are left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from surgeon.language.operations.applied import AppliedOperation, Edit
from surgeon.searches.spaces.base import (
    HALVES,
    TIMES,
    WEIGHTS,
    Claim,
    Space,
    claims_of_late,
    claims_of_ranks,
    claims_of_shape,
    register,
)

if TYPE_CHECKING:
    from surgeon.opened import Model


@register
class Drops(Space):
    """Whole layers, or their attentions or MLPs alone, by an edit's option.

    Left out, they can be neither late nor of low rank; the other half of a layer can.
    """

    name = "drop"
    summary = "layers, attentions or MLPs that are left out (drop:layers, drop:attention, drop:mlp: only those)"
    place = 20
    serves = ("depth", "syncs", "kv_bytes", "wire_bytes", *WEIGHTS, *TIMES)
    arguments: ClassVar[dict[str, tuple[str, ...]]] = {
        "": tuple(HALVES),
        "layers": ("",),
        "attention": ("attention",),
        "mlp": ("mlp",),
    }

    def options(self, model: Model) -> Sequence[str]:  # noqa: ARG002
        return self.arguments[self.argument]

    def claims(self, edit: Edit) -> frozenset[Claim]:
        kinds = HALVES[edit.option]
        gone = (of(edit, kind) for kind in kinds for of in (claims_of_late, claims_of_ranks))
        return claims_of_shape(edit).union(*gone)

    def operation(self, layers: tuple[range, ...], option: str, size: int) -> AppliedOperation:  # noqa: ARG002
        return AppliedOperation("prune", layers, {"sublayers": option} if option else {})
