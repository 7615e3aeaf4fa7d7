"""Sublayers that read the stream late."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from surgeon.language.operations.applied import AppliedOperation, Edit
from surgeon.language.program import Program, Step
from surgeon.searches.spaces.base import (
    HALVES,
    TIMES,
    Claim,
    Space,
    claims_of_late,
    from_every_layer,
    layers_joined,
    register,
)

if TYPE_CHECKING:
    from surgeon.opened import Model


@register
class Ladder(Space):
    """Layers that are late, each by itself, or the attentions and MLPs of each, or unbroken ranges of layers.

    A step that several of them share is late if one of them is to be. The first step of a program misses nothing; it is
    called late where the rest of its layers is, so that there is one program for one computation, and recipes name
    whole layers.
    """

    name = "ladder"
    summary = "layers that read the stream late (ladder:sublayers: attentions and MLPs; ladder:ranges: whole ranges)"
    place = 50
    serves = TIMES
    arguments = ("", "sublayers", "ranges")

    def options(self, model: Model) -> Sequence[str]:
        # Where a layer is one step, its halves are late together.
        halves = self.argument == "sublayers" and model.family.steps_per_layer > 1
        if halves:
            return ("attention", "mlp")
        return ("",)

    def sizes(self, model: Model) -> range:
        return range(1, model.num_layers + 1 if self.argument == "ranges" else 2)

    def claims(self, edit: Edit) -> frozenset[Claim]:
        return frozenset().union(*(claims_of_late(edit, kind) for kind in HALVES[edit.option]))

    def operations(
        self,
        edits: Sequence[Edit],
        program: Program,
        model: Model,  # noqa: ARG002
    ) -> tuple[AppliedOperation, ...]:
        """Ladders of whole layers, of attentions, of MLPs; with all that share a step with a chosen one."""
        wanted = {(kind, layer) for e in edits for kind in HALVES[e.option] for layer in e.layers}
        steps = [_parts(node) for node in program.nodes if isinstance(node, Step)]
        late = {part for parts in steps for part in parts if not wanted.isdisjoint(parts)}
        kinds: dict[int, set[str]] = {}  # that each layer has in steps
        for kind, layer in (part for parts in steps for part in parts):
            kinds.setdefault(layer, set()).add(kind)
        if isinstance(program.nodes[0], Step):
            first = _parts(program.nodes[0])
            others = {(kind, layer) for _, layer in first for kind in kinds[layer]} - first
            late = late | first if others and others <= late else late - first
        whole = {layer for layer in kinds if all((kind, layer) in late for kind in kinds[layer])}
        found = [AppliedOperation("ladder", layers_joined(whole))] if whole else []
        for half in ("attention", "mlp"):
            layers = {layer for kind, layer in late if kind in HALVES[half]} - whole
            if layers:
                found.append(AppliedOperation("ladder", layers_joined(layers), {"sublayers": half}))
        return tuple(found)

    def stretches(self, model: Model) -> Iterator[list[Edit]]:
        """Layers one by one, from every layer on; attentions alone, MLPs alone, and both."""
        edits = [edit for edit in self.edits(model) if len(edit.layers) == 1]
        options = sorted({edit.option for edit in edits})
        for option in options if len(options) > 1 else ():
            yield from from_every_layer(edit for edit in edits if edit.option == option)
        yield from from_every_layer(edits)


def _parts(step: Step) -> set[tuple[str, int]]:
    """The kinds and layers of a step's sublayers."""
    return {part for sublayer in step.sublayers for part in sublayer.parts}
