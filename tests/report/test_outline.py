"""The outline of programs, and the picture drawn from it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from surgeon.operations import ladder, pair, parallel, prune, shuffle, tracks
from surgeon.program import Program
from surgeon.report.outline import LeftOut, Same, Unchanged, outline
from surgeon.report.program import draw_program

DENSE = Program.dense(8)


def items(program: Program, steps_per_layer: int = 2) -> list[str]:
    """The outline as text: = before a step that is as it was."""
    found = []
    for item in outline(program, 8, steps_per_layer):
        if isinstance(item, Unchanged):
            found.append(f"{item.first}-{item.last}")
        elif isinstance(item, Same):
            found.append(f"={item.step}")
        elif isinstance(item, LeftOut):
            found.append(f"no {item.text}")
        else:
            found.append(str(item))
    return found


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (DENSE, "0-7"),
        (pair(DENSE, range(3, 7)), "0-2, [A3 A4], [F3 F4], [A5 A6], [F5 F6], =A7, =F7"),
        (prune(DENSE, range(3, 5)), "0-2, no 3-4, 5-7"),
        (prune(DENSE, range(7, 8)), "0-6, no 7"),
        (prune(DENSE, range(3, 4), sublayers="attention"), "0-2, no A3, =F3, 4-7"),
        # The stream in front of F3's plus is what A4 reads, so F3 is shown.
        (ladder(DENSE, range(4, 8)), "0-2, =A3, =F3, >A4, >F4, >A5, >F5, >A6, >F6, >A7, >F7"),
        (parallel(DENSE, range(0, 5)), "{A0 F0 | A1 F1 | A2 F2 | A3 F3 | A4 F4}, 5-7"),
        (Program.parse("A0 F0 A2 F2 A1 F1 A3 F3"), "=A0, =F0, A2, F2, A1, F1, =A3, =F3, no 4-7"),
        (Program.parse("A0~A1 F0~F1 A2 F2 A3 F3"), "A0~A1, F0~F1, =A2, =F2, =A3, =F3, no 4-7"),
        (Program.parse("A0 F0 A1 F1 A1 F1"), "=A0, =F0, A1, F1, A1, F1, no 2-7"),
    ],
)
def test_outlines(program: Program, expected: str) -> None:
    assert items(program) == expected.split(", ")


def test_layers_of_one_step() -> None:
    assert items(Program.dense(8, 1), 1) == ["0-7"]
    assert items(Program.parse("[A0 F0] [A1 F1] [A2 F2] A3 F3"), 1) == ["0-2", "A3", "F3", "no 4-7"]


@pytest.mark.parametrize(
    "program",
    [
        DENSE,
        ladder(pair(Program.dense(32), range(4, 28)), range(4, 28)),
        tracks(DENSE, range(2, 6), count=2, depth=2),
        shuffle(DENSE, range(2, 6), seed=1),
        Program.parse(">A0 {A1 F1 | {A2 | F2}} >F0"),
    ],
)
def test_the_picture_holds_all_that_is_drawn(program: Program, tmp_path: Path) -> None:
    layers = 1 + max(layer for sublayer in program.sublayers() for layer in sublayer.layers)
    path = draw_program(program, layers, 2, "A title", tmp_path / "program.png")
    picture = imread(path)[..., :3]
    drawn = np.argwhere((picture < 0.95).any(-1))
    margin = np.minimum(drawn.min(0), np.array(picture.shape[:2]) - 1 - drawn.max(0))
    assert (margin > 3).all()  # nothing is cut off at an edge
