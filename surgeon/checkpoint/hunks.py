"""Where two programs differ: runs of steps, named by the layers of the unedited model that they are about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise

from surgeon.program import Node, Program, steps_of

LEFT_OUT, UNEDITED = "left out", "as unedited"


@dataclass(frozen=True)
class Hunk:
    """One place where two programs differ.

    Attributes:
        first, last: the layers it is about.
        a, b: what stands there, as a program's text, or in words.
    """

    first: int
    last: int
    a: str
    b: str


@dataclass(frozen=True)
class _Place:
    """Nodes a_first..a_end-1 of one program where the other has b_first..b_end-1, and their layers."""

    a_first: int
    a_end: int
    b_first: int
    b_end: int
    first: int
    last: int

    def joined(self, other: _Place) -> _Place:
        """With a later place, and all between them."""
        layers = min(self.first, other.first), max(self.last, other.last)
        return _Place(self.a_first, other.a_end, self.b_first, other.b_end, *layers)


def hunks(a: Program, b: Program, steps_per_layer: int = 2) -> list[Hunk]:
    """Where two programs over the same layers differ; places that are about the same layers are one."""
    return [
        Hunk(
            place.first,
            place.last,
            _text(a.nodes[place.a_first : place.a_end], place, steps_per_layer),
            _text(b.nodes[place.b_first : place.b_end], place, steps_per_layer),
        )
        for place in _apart(_places(a.nodes, b.nodes))
    ]


def _places(a: Sequence[Node], b: Sequence[Node]) -> list[_Place]:
    found = []
    for tag, a_first, a_end, b_first, b_end in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag != "equal":
            layers = _layers((*a[a_first:a_end], *b[b_first:b_end]))
            found.append(_Place(a_first, a_end, b_first, b_end, min(layers), max(layers)))
    return found


def _apart(places: list[_Place]) -> list[_Place]:
    """Join places until no two are about the same layers; something moved over others takes these in."""
    while True:
        at = next((k for k, (p, q) in enumerate(pairwise(places)) if p.last >= q.first), None)
        if at is None:
            return places
        places = [*places[:at], places[at].joined(places[at + 1]), *places[at + 2 :]]


def _layers(nodes: Sequence[Node]) -> set[int]:
    return {layer for step in steps_of(tuple(nodes)) for one in step.sublayers for layer in one.layers}


def _text(nodes: Sequence[Node], place: _Place, steps_per_layer: int) -> str:
    if not nodes:
        return LEFT_OUT
    unedited = Program.dense(place.last + 1, steps_per_layer).nodes[place.first * steps_per_layer :]
    return UNEDITED if tuple(nodes) == unedited else " ".join(map(str, nodes))
