"""Places that an edited program shares with its original."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surgeon.language.operations import ladder, pair, prune, tracks
from surgeon.language.program import Fork, Program
from surgeon.models.families import FAMILIES
from surgeon.training.distiller import counterparts
from tests.drawn import programs

LAYERS = 6


@st.composite
def edits(draw: st.DrawFn) -> Program:
    """Programs that mostly keep the order of layers, so that they share many places with the original."""
    nodes = list(Program.dense(LAYERS).nodes)
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(nodes) - 1))
        change = draw(st.sampled_from(("drop", "twice", "swap", "fork")))
        if change == "drop" and len(nodes) > 1:
            del nodes[place]
        elif change == "twice":
            nodes.insert(place, nodes[place])
        elif change == "swap":
            nodes[place - 1], nodes[place] = nodes[place], nodes[place - 1]
        elif change == "fork" and place:
            nodes[place - 1 : place + 1] = [Fork(((nodes[place - 1],), (nodes[place],)))]
    return Program(tuple(nodes))


def slowly(program: Program, num_layers: int) -> list[tuple[int, int]]:
    """By the definition, for every cut and every layer on its own, from the program's text."""
    found = []
    texts = [str(node) for node in program.nodes]
    for node in range(1, len(texts)):
        before, behind = named(texts[:node]), named(texts[node:])
        fitting = [
            k
            for k in range(num_layers + 1)
            if before <= set(range(k)) and behind <= set(range(k, num_layers))
        ]
        if fitting:
            found.append((node, fitting[-1]))
    return [*found, (len(texts), num_layers)]


def named(texts: list[str]) -> set[int]:
    """The layers that parts of a program's text name: numbers right behind A or F."""
    words = (
        " ".join(texts).replace("~", " ").replace("[", " ").replace("{", " ").replace(">", " ").split()
    )
    wholes = [word.partition("@")[0].partition("/")[0].partition("#")[0].rstrip("]}") for word in words]
    return {int(word[1:]) for word in wholes if word[:1] in ("A", "F")}


@settings(max_examples=60)
@given(st.one_of(programs(LAYERS, FAMILIES["llama"]), edits()))
def test_against_the_definition(program: Program) -> None:
    found = [*counterparts(program, LAYERS).items()]
    assert found == slowly(program, LAYERS)


@pytest.mark.parametrize("steps_per_layer", [1, 2])
def test_the_original_has_one_after_every_layer(steps_per_layer: int) -> None:
    found = counterparts(Program.dense(LAYERS, steps_per_layer), LAYERS)
    assert found == {layer * steps_per_layer: layer for layer in range(1, LAYERS + 1)}


@pytest.mark.parametrize(
    ("edited", "layers"),
    [
        (pair(Program.dense(6), range(1, 5)), [1, 3, 5, 6]),
        (ladder(Program.dense(6), range(3, 6)), [1, 2, 3, 4, 5, 6]),
        (tracks(Program.dense(6), range(2, 6), depth=2, count=2), [1, 2, 4, 6]),
        (Program.parse("A0 F0 A2 F2 A1 F1 A4 F4 A3 F3 A5 F5"), [1, 3, 5, 6]),
        (prune(Program.dense(6), range(2, 4)), [1, 4, 5, 6]),  # after layer 1 what layer 4 reads
        (prune(Program.dense(6), range(4, 6)), [1, 2, 3, 6]),  # what the head reads
        (Program.parse("A0 F0 A1~A2 F1~F2 A3 F3"), [1, 3, 6]),
        (Program.parse("A0 F0 A1 F2 A3"), [1, 2, 3, 6]),
        (Program.parse("A5 F5 A4 F4"), [6]),
    ],
)
def test_edits(edited: Program, layers: list[int]) -> None:
    assert [*counterparts(edited, 6).values()] == layers


def test_what_it_refuses() -> None:
    with pytest.raises(ValueError, match="empty"):
        counterparts(Program(()), 4)
    with pytest.raises(ValueError, match="has layer 4; the original's layers are 0 to 3"):
        counterparts(Program.parse("A0 F4"), 4)
