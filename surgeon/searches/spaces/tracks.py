"""Stretches of layers as tracks, and layers without the synchronisation in their middle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Self

from surgeon.language.operations.applied import AppliedOperation
from surgeon.language.program import KINDS, Program, Sublayer
from surgeon.searches.edit import Edit
from surgeon.searches.spaces.base import (
    ONE_STEP,
    Claim,
    SizedSpace,
    Space,
    claims_of_shape,
    joined,
    register,
)

if TYPE_CHECKING:
    from surgeon.opened import Model


def why_no_slices(model: Model, ranks: int) -> str | None:
    """Why there is no slice of every layer for each rank; None if there is."""
    if model.own is not None:
        return "the model runs a program of its own, whose branches ranks share already"
    if ranks < 2:
        return "it has a slice of the layers for each rank, and one rank has nothing to share; use two or more"
    from surgeon.models.weights.layout import indivisible, require_sliceable  # which imports torch

    family = model.family
    for kind in KINDS:
        try:
            require_sliceable(family.spec(kind), family)
        except ValueError as error:
            return str(error)
        reason = indivisible(Sublayer(kind, (0,), (0, ranks)), model.shapes.units(Sublayer(kind, (0,))))
        if reason is not None:
            return reason
    return None


@register
class Tracks(SizedSpace):
    """Parallel Track's stretches: between two meetings, every rank runs its slice of some layers alone.

    Where a layer is one step, slices meet after each layer as it is, so that tracks begin at two.

    Attributes:
        largest: the most layers between two meetings; the others are the powers of two below it.
        ranks: each of which has a slice.
    """

    name = "tracks"
    summary = "slices of layers, one for each rank, that meet after 1, 2 or 4 layers (tracks:8: after up to 8)"
    place = 10
    usual, least, example = 4, 1, 8
    asked = "how many layers the tracks run at most before they meet"

    def __init__(self, largest: int | None = None, ranks: int = 2) -> None:
        super().__init__(largest)
        self.ranks = ranks

    @classmethod
    def of(cls, argument: str, ranks: int) -> Self:
        return cls(cls.read_size(argument), ranks)

    def edits(self, model: Model) -> Iterator[Edit]:
        if why_no_slices(model, self.ranks):
            return
        for depth in self._depths(model):
            for first in range(model.num_layers - depth + 1):
                yield Edit(first, first + depth, self.name)

    def claims(self, edit: Edit) -> frozenset[Claim]:
        return claims_of_shape(edit, late=True)

    def operations(self, edits: Sequence[Edit], program: Program, model: Model) -> tuple[AppliedOperation, ...]:  # noqa: ARG002
        """One of each depth, neighbouring tracks joined into one stretch."""
        found = []
        for depth in sorted({len(edit.layers) for edit in edits}):
            stretches = joined(edit.layers for edit in edits if len(edit.layers) == depth)
            found.append(AppliedOperation("tracks", stretches, {"count": self.ranks, "depth": depth}))
        return tuple(found)

    def obstacle(self, model: Model) -> str:
        return why_no_slices(model, self.ranks) or super().obstacle(model)

    def stretches(self, model: Model) -> Iterator[list[Edit]]:
        """Tracks of one depth from every layer on; the last ones are as deep as the layers that are left allow."""
        if why_no_slices(model, self.ranks):
            return
        depths = self._depths(model)
        for number, depth in enumerate(depths):
            for start in range(model.num_layers - depth + 1):
                stretch, layer = [], start
                for smaller in reversed(depths[: number + 1]):
                    while layer + smaller <= model.num_layers:
                        stretch.append(Edit(layer, layer + smaller, self.name))
                        layer += smaller
                yield stretch

    def _depths(self, model: Model) -> list[int]:
        powers = [1 << exponent for exponent in range(self.largest.bit_length())]
        least = 1 if model.family.steps_per_layer > 1 else 2
        return [
            depth for depth in sorted({*powers, self.largest}) if least <= depth <= min(self.largest, model.num_layers)
        ]


@register
class Desync(Space):
    """Layers whose slices meet after the feed-forward only: tracks of one layer, as sync-point drop has them."""

    name = "desync"
    summary = "layers whose slices, one for each rank, meet after the MLP only (sync-point drop)"
    place = 11

    def __init__(self, ranks: int = 2) -> None:
        self.ranks = ranks

    @classmethod
    def of(cls, argument: str, ranks: int) -> Self:
        super().of(argument, ranks)  # refuses any
        return cls(ranks)

    def edits(self, model: Model) -> Iterator[Edit]:
        if why_no_slices(model, self.ranks) is None and model.family.steps_per_layer > 1:
            for layer in range(model.num_layers):
                yield Edit(layer, layer + 1, self.name)

    def claims(self, edit: Edit) -> frozenset[Claim]:
        return claims_of_shape(edit, late=True)

    def operations(self, edits: Sequence[Edit], program: Program, model: Model) -> tuple[AppliedOperation, ...]:  # noqa: ARG002
        return (AppliedOperation("desync", joined(edit.layers for edit in edits), {"count": self.ranks}),)

    def obstacle(self, model: Model) -> str:
        return why_no_slices(model, self.ranks) or ONE_STEP
