"""Layers whose attention and MLP run side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from surgeon.language.operations.applied import AppliedOperation
from surgeon.language.program import Program
from surgeon.searches.edit import Edit
from surgeon.searches.spaces.base import ONE_STEP, Claim, Space, claims_of_shape, joined, register

if TYPE_CHECKING:
    from surgeon.opened import Model


@register
class FusedLayers(Space):
    """Layers whose attention and MLP read the same stream; none where all do as they are."""

    name = "fuse"
    summary = "layers whose attention and MLP run side by side (attention || MLP)"
    place = 40

    def edits(self, model: Model) -> Iterator[Edit]:
        if model.family.steps_per_layer > 1:
            for layer in range(model.num_layers):
                yield Edit(layer, layer + 1, self.name)

    def claims(self, edit: Edit) -> frozenset[Claim]:
        return claims_of_shape(edit)

    def operations(self, edits: Sequence[Edit], program: Program, model: Model) -> tuple[AppliedOperation, ...]:  # noqa: ARG002
        return (AppliedOperation("fuse_attention_mlp", joined(edit.layers for edit in edits)),)

    def obstacle(self, model: Model) -> str:  # noqa: ARG002
        return ONE_STEP
