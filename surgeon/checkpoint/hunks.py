"""Where two programs differ: runs of steps, named by the layers of the unedited model that they are about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise

from surgeon.language.program import Node, Program

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
class _Difference:
    """Nodes `a` of one program where the other has nodes `b`; each begins at a place of its own program."""

    a: range
    b: range
    layers: range

    @classmethod
    def of(cls, first: Program, second: Program, a: range, b: range) -> _Difference:
        """With the layers that these nodes are about, and with nodes beside them that one of the programs repeats."""
        nodes = (*first.nodes[a.start : a.stop], *second.nodes[b.start : b.stop])

        def is_repeated(i: int, j: int) -> bool:
            there = 0 <= i < len(first) and 0 <= j < len(second)
            return there and first.nodes[i] == second.nodes[j] and first.nodes[i] in nodes

        while is_repeated(a.start - 1, b.start - 1):
            a, b = range(a.start - 1, a.stop), range(b.start - 1, b.stop)
        while is_repeated(a.stop, b.stop):
            a, b = range(a.start, a.stop + 1), range(b.start, b.stop + 1)
        layers = Program(nodes).layers
        return cls(a, b, range(min(layers), max(layers) + 1))


def hunks(a: Program, b: Program, steps_per_layer: int = 2) -> list[Hunk]:
    """Where two programs over the same layers differ; places that are about the same layers are one."""
    codes = SequenceMatcher(None, a.nodes, b.nodes, autojunk=False).get_opcodes()
    places = [
        _Difference.of(a, b, range(a_first, a_end), range(b_first, b_end))
        for tag, a_first, a_end, b_first, b_end in codes
        if tag != "equal"
    ]
    # Join places, with all between them, until each is behind the one before it: what was moved takes in the rest.
    while overlaps := [k for k, (p, q) in enumerate(pairwise(places)) if p.layers.stop > q.layers.start]:
        at = overlaps[0]
        first, second = places[at : at + 2]
        joined = _Difference.of(a, b, range(first.a.start, second.a.stop), range(first.b.start, second.b.stop))
        places[at : at + 2] = [joined]
    return [
        Hunk(
            each.layers.start,
            each.layers.stop - 1,
            _text(a.nodes[each.a.start : each.a.stop], each.layers, steps_per_layer),
            _text(b.nodes[each.b.start : each.b.stop], each.layers, steps_per_layer),
        )
        for each in places
    ]


def _text(nodes: Sequence[Node], layers: range, steps_per_layer: int) -> str:
    if not nodes:
        return LEFT_OUT
    unedited = Program.dense(layers.stop, steps_per_layer).nodes[layers.start * steps_per_layer :]
    return UNEDITED if tuple(nodes) == unedited else " ".join(map(str, nodes))
