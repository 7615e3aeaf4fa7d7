"""Racks, against a definition that tries every cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surgeon.language.program import Fork, Node, Program, Step, steps_of
from surgeon.language.sublayer import Sublayer
from surgeon.training.racks.partition import Racks, allowed_cuts

LAYERS = 6
sublayers = st.builds(
    Sublayer,
    st.sampled_from("AF"),
    st.lists(st.integers(0, LAYERS - 1), min_size=1, max_size=2, unique=True).map(tuple),
)
steps = st.builds(Step, st.lists(sublayers, min_size=1, max_size=2).map(tuple), st.booleans())
forks = st.builds(lambda one, other: Fork(((one,), (other,))), steps, steps)


def swapped(nodes: list[Node], places: list[int]) -> tuple[Node, ...]:
    """The nodes with some of them changed for their neighbours, so that many programs can be cut somewhere."""
    for place in places:
        if place + 1 < len(nodes):
            nodes[place], nodes[place + 1] = nodes[place + 1], nodes[place]
    return tuple(nodes)


near_dense = st.builds(
    lambda late, places, left: Program(
        swapped(
            [
                Step(node.sublayers, place in late)
                for place, node in enumerate(Program.dense(LAYERS).nodes)
                if place not in left and isinstance(node, Step)
            ],
            places,
        )
    ),
    st.sets(st.integers(1, 2 * LAYERS - 1), max_size=4),
    st.lists(st.integers(0, 2 * LAYERS - 1), max_size=3),
    st.sets(st.integers(0, 2 * LAYERS - 1), max_size=4),
)
any_nodes = st.lists(st.one_of(steps, forks), min_size=1, max_size=8).map(
    lambda nodes: Program(tuple(nodes))
)
programs = st.one_of(near_dense, any_nodes).filter(lambda program: bool(program.nodes))


def layers_of(*nodes: Node) -> set[int]:
    return {layer for step in steps_of(nodes) for one in step.sublayers for layer in one.layers}


def cuts(program: Program) -> dict[int, set[int]]:
    """By the first layer after the cut: the numbers of nodes before it, as the rule says, by trying all."""
    found: dict[int, set[int]] = {}
    for layer in range(LAYERS + 1):
        for place in range(len(program) + 1):
            before, after = program.nodes[:place], program.nodes[place:]
            late = place > 0 and bool(after) and isinstance(after[0], Step) and after[0].late
            if (
                max(layers_of(*before), default=-1) < layer <= min(layers_of(*after), default=LAYERS)
                and not late
            ):
                found.setdefault(layer, set()).add(place)
    return found


@settings(max_examples=80)
@given(
    programs,
    st.lists(st.integers(1, LAYERS - 1), max_size=3, unique=True).map(sorted),
    st.integers(0, 3),
)
def test_racks_are_those_of_the_definition(program: Program, ends: list[int], depth: int) -> None:
    legal, end = cuts(program), 1 + max(layers_of(*program.nodes))
    assert allowed_cuts(program) == [layer for layer in range(1, end) if layer in legal]
    bounds = [0, *ends, LAYERS]
    texts = [f"{first}:{last}" for first, last in pairwise(bounds)]
    places = [min(legal.get(layer, {-1})) for layer in bounds[:-1]]
    filled = -1 not in places and all(
        a < b for a, b in zip(places, [*places[1:], len(program)], strict=True)
    )
    reaches = depth == 0 or (end - depth >= bounds[-2] and end - depth in legal)
    if not (filled and reaches and bounds[-2] < end):
        with pytest.raises(ValueError, match=r"rack|coda"):
            Racks.parse(texts, program, depth)
        return
    racks = Racks.parse(",".join(texts), program, depth)
    assert racks.texts == texts
    assert Racks.parse(racks.texts, program, depth) == racks
    assert [rack.nodes.start for rack in racks.ranges] == places
    assert (
        sum((program.nodes[rack.nodes.start : rack.nodes.stop] for rack in racks.ranges), ())
        == program.nodes
    )
    for rack in racks.ranges:
        assert layers_of(*program.nodes[rack.nodes.start : rack.nodes.stop]) <= set(rack.layers)
    coda = program.nodes[racks.coda.start : racks.coda.stop]
    assert layers_of(*coda) <= set(range(end - depth, end))
    whole = layers_of(*program.nodes[: racks.coda.start])
    assert not whole & set(range(end - depth, end))


DENSE = Program.dense(4)


@pytest.mark.parametrize(
    ("texts", "program", "depth", "said"),
    [
        ("0:2,3:4", DENSE, 1, r"leave a gap: 3:4 begins at layer 3, and should at 2"),
        ("0:2,1:4", DENSE, 1, r"overlap: 1:4 begins at layer 1, and should at 2"),
        ("1:4", DENSE, 1, r"leave a gap: 1:4 begins at layer 1, and should at 0"),
        (
            "0:2,2:3",
            DENSE,
            1,
            r"end before layer 3, and the program has layers up to 3; let the last one end at 4",
        ),
        ("0:4,4:8", DENSE, 1, r"rack 4:8 is empty: the program's layers are 0 to 3"),
        ("0:2,2:2", DENSE, 1, r"'2:2' are no range"),
        ("0:2 2:4", DENSE, 1, r"are no range"),
        ("", DENSE, 1, r"are no range"),
        (
            "0:1,1:2,2:4",
            Program.parse("A0 F0 A2 F2 A3 F3"),
            1,
            r"rack 1:2 is empty: the program runs none of its",
        ),
        (
            "0:2,2:4",
            Program.parse("A0 F0 [A1 A2] [F1 F2] A3 F3"),
            1,
            r"rack 2:4 would cut through \[A1 A2\]; .* 1, 3$",
        ),
        ("0:2,2:4", Program.parse("A0 F0 {A1 F1 | A2 F2} A3 F3"), 1, r"cut through \{A1 F1 \| A2 F2\}"),
        ("0:2,2:4", Program.parse("A0 F0 A1~A2 F1~F2 A3 F3"), 1, r"cut through A1~A2"),
        (
            "0:2,2:4",
            Program.parse("A0 F0 A2 F2 A1 F1 A3 F3"),
            1,
            r"begin before A1 has run, which comes after A2; in",
        ),
        (
            "0:2,2:4",
            Program.parse("A0 F0 A1 F1 >A2 >F2 A3 F3"),
            1,
            r"begin with the late step >A2, which reads",
        ),
        (
            "0:1,1:4",
            Program.parse("[A0 A3] [F0 F3] A1 F1 A2 F2"),
            1,
            r"no rack may begin anywhere but at layer 0",
        ),
        ("0:2,2:4", DENSE, 3, r"a coda of 3 layers is deeper than the last rack, 2:4, .* use at most 2"),
        ("0:2,2:4", DENSE, 5, r"a coda of 5 layers is deeper than the model, which has 4"),
        ("0:2,2:4", DENSE, -1, r"at least 0 layers, not -1"),
        (
            "0:2,2:4",
            Program.parse("A0 F0 A1 F1 [A2 A3] [F2 F3]"),
            1,
            r"a coda of 1 layer would cut through \[A2 A3\]",
        ),
    ],
)
def test_what_is_refused(texts: str, program: Program, depth: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Racks.parse(texts, program, depth)


def test_layers_that_the_program_leaves_out_belong_to_a_rack() -> None:
    racks = Racks.parse("0:2,2:4", Program.parse("A0 F0 A2 F2"), 1)
    assert [rack.nodes for rack in racks.ranges] == [range(2), range(2, 4)]
    assert racks.coda == range(2, 4)
