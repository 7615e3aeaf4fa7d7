"""Layers whose attention and MLP run side by side."""

from __future__ import annotations

from surgeon.language.operations.applied import AppliedOperation
from surgeon.searches.spaces.base import Space, register


@register
class FusedLayers(Space):
    """Layers whose attention and MLP read the same stream; none where all do as they are."""

    name = "fuse"
    summary = "layers whose attention and MLP run side by side (attention || MLP)"
    place = 40
    of_two_steps = True

    def operation(self, layers: tuple[range, ...], option: str, size: int) -> AppliedOperation:  # noqa: ARG002
        return AppliedOperation("fuse_attention_mlp", layers)
