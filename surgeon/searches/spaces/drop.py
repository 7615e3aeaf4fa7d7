"""Layers, attentions and MLPs that are left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Self

from surgeon.language.operations.applied import AppliedOperation
from surgeon.language.operations.base import KINDS_OF, Half
from surgeon.language.program import Program
from surgeon.searches.edit import Edit
from surgeon.searches.spaces.base import (
    Claim,
    Space,
    claims_of_late,
    claims_of_ranks,
    claims_of_shape,
    joined,
    register,
)

if TYPE_CHECKING:
    from surgeon.opened import Model


@register
class Drops(Space):
    """Whole layers, or their attentions or MLPs alone: an edit's option says which.

    What is left out can be neither late nor of low rank; the other half of a layer can.
    """

    name = "drop"
    summary = "layers, attentions or MLPs that are left out (drop:layers, drop:attention, drop:mlp: only those)"
    place = 20
    options: ClassVar[dict[str, Half]] = {"": "both", "attention": "attention", "mlp": "mlp"}
    arguments: ClassVar[dict[str, tuple[str, ...]]] = {
        "": tuple(options),
        "layers": ("",),
        "attention": ("attention",),
        "mlp": ("mlp",),
    }

    def __init__(self, what: str = "") -> None:
        self.chosen = self.arguments[what]

    @classmethod
    def of(cls, argument: str, ranks: int) -> Self:  # noqa: ARG003
        if argument not in cls.arguments:
            raise ValueError(f"there is no drop:{argument}; write drop, drop:layers, drop:attention or drop:mlp")
        return cls(argument)

    def edits(self, model: Model) -> Iterator[Edit]:
        for option in self.chosen:
            for layer in range(model.num_layers):
                yield Edit(layer, layer + 1, self.name, option)

    def claims(self, edit: Edit) -> frozenset[Claim]:
        kinds = KINDS_OF[self.options[edit.option]]
        gone = (of(edit, kind) for kind in kinds for of in (claims_of_late, claims_of_ranks))
        return claims_of_shape(edit).union(*gone)

    def operations(self, edits: Sequence[Edit], program: Program, model: Model) -> tuple[AppliedOperation, ...]:  # noqa: ARG002
        """One for layers, one for attentions, one for MLPs."""
        found = []
        for option, sublayers in self.options.items():
            stretches = joined(edit.layers for edit in edits if edit.option == option)
            if stretches:
                given = {"sublayers": sublayers} if option else {}
                found.append(AppliedOperation("prune", stretches, given))
        return tuple(found)
