"""Stretches of layers as tracks, and layers without the synchronisation in their middle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from surgeon.language.operations.applied import AppliedOperation, Edit
from surgeon.language.sublayer import KINDS, Sublayer
from surgeon.searches.spaces.base import (
    Claim,
    SizedSpace,
    Space,
    claims_of_shape,
    claims_of_slices,
    register,
)

if TYPE_CHECKING:
    from surgeon.opened import Model


class SlicedSpace(Space):
    """A space whose edits have a slice of the layers for each rank."""

    def why_whole(self, model: Model) -> list[str]:
        """List the reasons why layers have no slice for each rank; empty where one has."""
        if model.own is not None:
            why = "the model runs a program of its own, whose branches ranks share already"
            return [why] * model.num_layers
        if self.ranks < 2:
            why = "it has a slice of the layers for each rank, and one rank has nothing to share; use two or more"
            return [why] * model.num_layers
        from surgeon.models.weights.layers import indivisible, require_sliceable  # which imports torch

        reasons = []
        for layer in range(model.num_layers):
            reason = None
            for sublayer in (Sublayer(kind, (layer,)) for kind in KINDS):
                try:
                    require_sliceable(model.family.spec(sublayer.kind, layer), model.family)
                    piece = replace(sublayer, piece=(0, self.ranks))
                    reason = reason or indivisible(piece, model.shapes.units(sublayer))
                except ValueError as error:
                    reason = reason or str(error)
            reasons.append(reason or "")
        return reasons

    def edits(self, model: Model) -> Iterator[Edit]:
        whole = {layer for layer, reason in enumerate(self.why_whole(model)) if reason}
        return (edit for edit in super().edits(model) if whole.isdisjoint(edit.layers))

    def claims(self, edit: Edit) -> frozenset[Claim]:
        return claims_of_shape(edit, late=True).union(*(claims_of_slices(edit, kind) for kind in KINDS))

    def obstacle(self, model: Model) -> str:
        reasons = self.why_whole(model)
        if all(reasons):
            return reasons[0]
        return super().obstacle(model)


@register
@dataclass(eq=False)
class Tracks(SlicedSpace, SizedSpace):
    """Parallel Track's stretches: between two meetings, every rank runs its slice of some layers alone.

    Where a layer is one step, slices meet after each layer as it is, so that tracks begin at two. Depths are the powers
    of two up to the largest, and that.
    """

    name = "tracks"
    summary = (
        "slices of layers, one for each rank, that meet after 1, 2 or 4 layers (tracks:8: after up to 8)"
    )
    place = 10
    serves = ("draft_pass",)
    least = 1
    example = 8
    asked = "how many layers the tracks run at most before they meet"
    largest: int = 4

    def sizes(self, model: Model) -> list[int]:
        powers = [1 << exponent for exponent in range(self.largest.bit_length())]
        least = 1 if model.family.steps_per_layer > 1 else 2
        most = min(self.largest, model.num_layers)
        return [depth for depth in sorted({*powers, self.largest}) if least <= depth <= most]

    def operation(self, layers: tuple[range, ...], option: str, size: int) -> AppliedOperation:  # noqa: ARG002
        return AppliedOperation("tracks", layers, {"count": self.ranks, "depth": size})

    def stretches(self, model: Model) -> Iterator[list[Edit]]:
        """Tracks of one depth from every layer on; the last ones are as deep as the layers that are left allow."""
        depths = self.sizes(model)
        there = set(self.edits(model))
        for number, depth in enumerate(depths):
            for start in range(model.num_layers - depth + 1):
                stretch = []
                layer = start
                for smaller in reversed(depths[: number + 1]):
                    while layer + smaller <= model.num_layers:
                        stretch.append(Edit(layer, layer + smaller, self.name))
                        layer += smaller
                if there.issuperset(stretch):
                    yield stretch


@register
class Desync(SlicedSpace):
    """Layers whose slices meet after the feed-forward only: tracks of one layer, as in sync-point drop."""

    name = "desync"
    summary = "layers whose slices, one for each rank, meet after the MLP only (sync-point drop)"
    place = 11
    of_two_steps = True

    def operation(self, layers: tuple[range, ...], option: str, size: int) -> AppliedOperation:  # noqa: ARG002
        return AppliedOperation("desync", layers, {"count": self.ranks})
