"""Where in a program an operation finds a stretch of layers, and what is left of forks."""

from __future__ import annotations

from typing import Any

import pytest

from surgeon.language.operations import ladder, prune, repeat
from surgeon.language.operations.applied import (
    AppliedOperation,
    changed_within,
    require_whole_layers,
    runs_whole_layers,
)
from surgeon.language.program import Program
from surgeon.language.sublayer import LayerShapes

TRACKS = "{A0 F0 A1 F1 | A2 F2 A3 F3} A4 F4 {{A5 F5 | A6 F6} A7 F7 | A8 F8}"


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (range(1, 2), "{A0 F0 | A2 F2 A3 F3} A4 F4 {{A5 F5 | A6 F6} A7 F7 | A8 F8}"),
        (range(2, 4), "{A0 F0 A1 F1} A4 F4 {{A5 F5 | A6 F6} A7 F7 | A8 F8}"),
        (range(4, 5), "{A0 F0 A1 F1 | A2 F2 A3 F3} {{A5 F5 | A6 F6} A7 F7 | A8 F8}"),
        (range(6, 7), "{A0 F0 A1 F1 | A2 F2 A3 F3} A4 F4 {{A5 F5} A7 F7 | A8 F8}"),
        (range(1, 3), None),  # the end of one branch and the beginning of the next
        (range(7, 9), None),
    ],
)
def test_a_stretch_lies_in_one_list_of_nodes(layers: range, expected: str | None) -> None:
    found = changed_within(Program.parse(TRACKS), layers, 2, lambda program: prune(program, layers))
    assert found == (None if expected is None else Program.parse(expected))


def test_what_is_left_of_forks() -> None:
    def without(text: str, layers: range, steps: int) -> str:
        return str(
            changed_within(Program.parse(text), layers, steps, lambda program: prune(program, layers))
        )

    assert without("A0 F0 {A1 F1}", range(1, 2), 2) == "A0 F0"
    assert without("{{[A0 F0]} | [A1 F1]}", range(1), 1) == "{[A1 F1]}"


def test_the_operation_sees_the_whole_branch() -> None:
    found = changed_within(
        Program.parse(TRACKS), range(3, 4), 2, lambda program: ladder(program, range(3, 4))
    )
    assert str(found).startswith("{A0 F0 A1 F1 | A2 F2 >A3 >F3}")


OWN = Program.parse("{A0 F0 A1 F1 | A2 F2 A3 F3} {A4 F4 A5 F5 | A6 F6 A7 F7}")
SHAPES = LayerShapes({"q": (8, 8), "up": (16, 8)})


@pytest.mark.parametrize(
    ("name", "layers", "parameters", "expected"),
    [
        ("prune", ["1:3"], {}, "{A0 F0 | A3 F3} {A4 F4 A5 F5 | A6 F6 A7 F7}"),
        ("prune", ["0:2", "4:8"], {"sublayers": "both"}, "{A2 F2 A3 F3}"),
        ("pair", ["0:4"], {}, "{[A0 A1] [F0 F1] | [A2 A3] [F2 F3]} {A4 F4 A5 F5 | A6 F6 A7 F7}"),
        (
            "pair",
            ["5:8"],
            {"form": "par"},
            "{A0 F0 A1 F1 | A2 F2 A3 F3} {A4 F4 A5 F5 | {A6 F6 | A7 F7}}",
        ),
        (
            "reorder",
            ["2:4"],
            {"order": [3, 2]},
            "{A0 F0 A1 F1 | A3 F3 A2 F2} {A4 F4 A5 F5 | A6 F6 A7 F7}",
        ),
        ("ladder", ["1:3"], {}, "{A0 F0 >A1 >F1 | >A2 >F2 A3 F3} {A4 F4 A5 F5 | A6 F6 A7 F7}"),
        (
            "lowrank",
            ["1:3"],
            {"ranks": {"q": [2, 3]}},
            "{A0 F0 A1@q2 F1 | A2@q3 F2 A3 F3} {A4 F4 A5 F5 | A6 F6 A7 F7}",
        ),
    ],
)
def test_operations_change_the_branches_of_a_program_of_its_own(
    name: str, layers: list[str], parameters: dict[str, Any], expected: str
) -> None:
    stretches = tuple(range(*map(int, text.split(":"))) for text in layers)
    assert str(AppliedOperation(name, stretches, parameters).apply(OWN, SHAPES, OWN)) == expected


def test_one_operation_after_another_in_a_branch() -> None:
    paired = AppliedOperation("pair", (range(2, 4),)).apply(OWN, SHAPES, OWN)
    late = AppliedOperation("ladder", (range(2, 4),)).apply(paired, SHAPES, OWN)
    assert str(late).startswith("{A0 F0 A1 F1 | >[A2 A3] >[F2 F3]} ")
    for layers, message in (
        (range(2, 3), "overlap with what an earlier operation changed"),
        (range(7, 9), "layer 8"),
    ):
        with pytest.raises(ValueError, match=message):
            AppliedOperation("prune", (layers,)).apply(paired, SHAPES, OWN)
    gone = AppliedOperation("prune", (range(2),)).apply(OWN, SHAPES, OWN)
    with pytest.raises(ValueError, match="layers 0:1 overlap with what an earlier operation removed"):
        AppliedOperation("pair", (range(1),)).apply(gone, SHAPES, OWN)
    with pytest.raises(ValueError, match=r"order \[3, 2, 4\] must have every layer of 2:4 once"):
        AppliedOperation("reorder", (range(2, 5),), {"order": [3, 2, 4]}).apply(OWN, SHAPES, OWN)


def test_layers_that_run_again() -> None:
    """Of a program that repeats some, all places are changed; in tracks a stretch is repeated within each branch."""
    own = Program.parse("A0 F0 A1 F1 A2 F2 A1 F1 A2 F2 A3 F3")
    pruned = changed_within(own, range(1, 2), 2, lambda program: prune(program, range(1, 2)))
    assert str(pruned) == "A0 F0 A2 F2 A2 F2 A3 F3"
    again = changed_within(own, range(2, 4), 2, lambda program: repeat(program, range(2, 4)))
    assert str(again) == "A0 F0 A1 F1 A2 F2 A1 F1 A2 F2 A3 F3 A2 F2 A3 F3"
    assert not runs_whole_layers(own, 4)
    in_tracks = AppliedOperation("repeat", (range(1, 3),)).apply(OWN, SHAPES, OWN)
    assert str(in_tracks).startswith("{A0 F0 A1 F1 A1 F1 | A2 F2 A2 F2 A3 F3} {A4 ")


def test_layers_that_are_one_step() -> None:
    own = Program.parse("{[A0 F0] [A1 F1] | [A2 F2] [A3 F3]}")
    pruned = AppliedOperation("prune", (range(1, 3),)).apply(own, SHAPES, own)
    assert str(pruned) == "{[A0 F0] | [A3 F3]}"


@pytest.mark.parametrize(
    ("text", "layers", "message"),
    [
        ("A0 F0 >A1 F1", 2, "does not run layer 1 whole and once"),
        ("{A0 F0 | A1 F1} A0 F0", 2, "does not run layer 0 whole and once"),
        (
            "{A0 F0 | A1 F1} F0",
            2,
            "runs more than each of its 2 layers once: its program is '{A0 F0 . A1 F1} F0'",
        ),
        ("[A0 A1] [F0 F1]", 2, "does not run layer 0 whole"),
    ],
)
def test_programs_that_are_not_their_layers(text: str, layers: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        require_whole_layers(Program.parse(text), layers)
    assert not runs_whole_layers(Program.parse(text), layers)
    assert runs_whole_layers(OWN, 8)
