"""Widths and ranks in words."""

from __future__ import annotations

import pytest

from surgeon.checkpoint.sizes import layers_text, size_lines
from surgeon.language.program import Program


@pytest.mark.parametrize(
    ("program", "lines"),
    [
        ("A0 F0 [A1 A2] >F1", []),
        ("A0@q5,o6 F0@up5,gate7", ["layer 0: q, up 5; o 6; gate 7"]),
        ("A0@q5 F0 A1@q5 F1 A2 F2@up5 A3@q5", ["layers 0 to 1, 3: q 5", "layer 2: up 5"]),
        ("F1@up3 {A0@k2 A1 | A2/2:0@k2}", ["layers 0, 2: k 2", "layer 1: up 3"]),
        ("A0~A1@v4 F0~F1 A2~A3@v4 F2@up4", ["layers 0+1 to 2+3: v 4", "layer 2: up 4"]),
        ("A0@q5 A0 F0@up2 F0@up3", ["layer 0: q 5 or whole; up 2 or 3"]),
        ("A0#3@q3 F0#40 A1#3@q3 F1#40 A2 F2#3", ["layers 0 to 1: KV groups 3; q 3; neurons 40", "layer 2: neurons 3"]),
        ("A0#3 A0", ["layer 0: KV groups 3 or whole"]),
        (
            " ".join(f"A{k}@q{8 + k % 2}" for k in range(12)),
            ["layers 0, 2, 4, 6, 8, 10: q 8", "layers 1, 3, 5, 7, 9, 11: q 9"],
        ),
    ],
)
def test_equal_ranks_are_said_once(program: str, lines: list[str]) -> None:
    assert size_lines(Program.parse(program)) == lines


def test_layers_by_their_numbers() -> None:
    assert layers_text([((2,), 0)]) == "layer 2"
    assert layers_text([((2,), 0), ((4,), 0), ((5,), 0), ((5,), 1)]) == "layers 2, 4 to 5, 5 again"
