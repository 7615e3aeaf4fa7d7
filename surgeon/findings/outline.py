"""A program in outline: which of its steps are where they were in the unedited model, and what is left out of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from surgeon.language.program import Fork, Node, Program, Step, layer_nodes, steps_of
from surgeon.language.sublayer import ATTENTION, UNITS, Sublayer

FEWEST_IN_A_STRETCH = 3  # layers


@dataclass(frozen=True)
class LayersInOrder:
    """Layers whose steps are as they were, drawn as one box.

    Attributes:
        sizes: by name, of what each of them has less of: KV groups or neurons, and ranks of matrices.
    """

    first: int
    last: int
    sizes: tuple[tuple[str, int], ...] = ()

    @property
    def text(self) -> str:
        """What is to be said of them, without their sizes."""
        return f"layers {self.first}-{self.last}"

    @property
    def how(self) -> str:
        """What became of them, in a few words."""
        names = {name for name, _ in self.sizes}
        changes = {"narrow": names & {*UNITS.values()}, "low-rank": names - {*UNITS.values()}}
        return ", ".join(change for change, these in changes.items() if these) or "as they were"


@dataclass(frozen=True)
class Same:
    """A step that is as it was, and where it was."""

    step: Step


@dataclass(frozen=True)
class LeftOut:
    """Sublayers of the unedited model that are in the program no more, where they would be."""

    sublayers: tuple[Sublayer, ...]

    @property
    def text(self) -> str:
        """Which they are: "4-6" for whole layers, "A4" for an attention only."""
        layers = sorted({sublayer.layers[0] for sublayer in self.sublayers})
        kinds = {sublayer.kind for sublayer in self.sublayers}
        what = ""
        if len(kinds) == 1:
            what = "".join(sorted(kinds))
        if len(layers) == 1:
            return f"{what}{layers[0]}"
        return f"{what}{layers[0]}-{layers[-1]}"


Item = Step | Fork | Same | LayersInOrder | LeftOut


def outline(program: Program, num_layers: int, steps_per_layer: int) -> Iterator[Item]:
    """The program's nodes, with stretches of layers in order as one item and what is left out where it would be."""
    missing = _left_out(program, num_layers, steps_per_layer)
    whole = program.whole().nodes
    same = _same_nodes(whole, steps_per_layer)
    at = 0
    while at < len(program.nodes):
        node = program.nodes[at]
        gone = tuple(sublayer for sublayer in missing if _place(sublayer) < min(map(_place, _sublayers(node))))
        if gone:
            yield LeftOut(gone)
            missing = missing[len(gone) :]
        layers = _layers_in_order(program.nodes, at, same, steps_per_layer)
        if layers >= FEWEST_IN_A_STRETCH:
            first = _sublayers(node)[0].layers[0]
            yield LayersInOrder(first, first + layers - 1, _sizes(program.nodes[at : at + steps_per_layer]))
            at += layers * steps_per_layer
        else:
            yield Same(node) if at in same and node == whole[at] and isinstance(node, Step) else node
            at += 1
    if missing:
        yield LeftOut(tuple(missing))


def outline_text(program: Program, num_layers: int, steps_per_layer: int) -> str:
    """The program's text, with stretches of layers in words, and without sizes."""
    words = []
    for item in outline(program, num_layers, steps_per_layer):
        if isinstance(item, LayersInOrder):
            words.append(f"({item.text} {item.how})")
        elif isinstance(item, LeftOut):
            words.append(f"(no {item.text})")
        else:
            words.append(str(Program((item.step if isinstance(item, Same) else item,)).whole()))
    return " ".join(words)


def _place(sublayer: Sublayer) -> tuple[int, bool]:
    """Sorts sublayers as the unedited model has them."""
    return min(sublayer.layers), sublayer.kind != ATTENTION


def _left_out(program: Program, num_layers: int, steps_per_layer: int) -> list[Sublayer]:
    used = {(one.kind, layer) for one in program.sublayers() for layer in one.layers}
    dense = Program.dense(num_layers, steps_per_layer).sublayers()
    return [sublayer for sublayer in dense if (sublayer.kind, sublayer.layers[0]) not in used]


def _same_nodes(nodes: Sequence[Node], steps_per_layer: int) -> set[int]:
    """Which nodes are steps of the unedited model, with all that was before them before them, and the rest behind."""
    places = [sorted(map(_place, _sublayers(node))) for node in nodes]
    before = list(accumulate((each[-1] for each in places), max, initial=(-1, False)))
    behind = list(accumulate((each[0] for each in reversed(places)), min, initial=(sys.maxsize, False)))[::-1]
    return {
        at
        for at, node in enumerate(nodes)
        if node in layer_nodes(places[at][0][0], steps_per_layer)
        and before[at] < places[at][0]
        and places[at][-1] < behind[at + 1]
    }


def _layers_in_order(nodes: Sequence[Node], at: int, same: set[int], steps_per_layer: int) -> int:
    """How many layers of the same sizes begin here, without one between them that is left out."""
    layers = 0
    sizes = _sizes(nodes[at : at + steps_per_layer])
    while True:
        start = at + layers * steps_per_layer
        end = start + steps_per_layer
        layer = _sublayers(nodes[at])[0].layers[0] + layers
        here = Program(tuple(nodes[start:end]))
        if not same.issuperset(range(start, end)) or here.whole().nodes != layer_nodes(layer, steps_per_layer):
            return layers
        if _sizes(here.nodes) != sizes:
            return layers
        if end < len(nodes) and _is_late(nodes[end]):
            return layers  # what reads in front of a plus needs it to be seen
        layers += 1


def _sizes(nodes: Sequence[Node]) -> tuple[tuple[str, int], ...]:
    return tuple(entry for node in nodes for sublayer in _sublayers(node) for entry in sublayer.sizes)


def _is_late(node: Node) -> bool:
    return isinstance(node, Step) and node.late


def _sublayers(node: Node) -> list[Sublayer]:
    return [sublayer for step in steps_of((node,)) for sublayer in step.sublayers]
