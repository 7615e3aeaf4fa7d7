"""Where in a program an operation finds a stretch of layers, and what is left of forks."""

from __future__ import annotations

import pytest

from surgeon.analysis.within import changed_within
from surgeon.operations import ladder, prune
from surgeon.program import Program

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
        return str(changed_within(Program.parse(text), layers, steps, lambda program: prune(program, layers)))

    assert without("A0 F0 {A1 F1}", range(1, 2), 2) == "A0 F0"
    assert without("{{[A0 F0]} | [A1 F1]}", range(1), 1) == "{[A1 F1]}"


def test_the_operation_sees_the_whole_branch() -> None:
    found = changed_within(Program.parse(TRACKS), range(3, 4), 2, lambda program: ladder(program, range(3, 4)))
    assert str(found).startswith("{A0 F0 A1 F1 | A2 F2 >A3 >F3}")
