"""The outline of programs, and the picture drawn from it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from surgeon.findings.drawing import save
from surgeon.findings.program import LayersInOrder, LeftOut, outline, outline_text, program_figure
from surgeon.language.operations import ladder, lowrank, pair, parallel, prune, shuffle, tracks
from surgeon.language.program import Program
from surgeon.language.sublayer import LayerShapes

DENSE = Program.dense(8)
SHAPES = LayerShapes({"q": (16, 16), "up": (32, 16)})


def items(program: Program, steps_per_layer: int = 2) -> list[str]:
    """The outline as text."""
    found = []
    for item in outline(program, 8, steps_per_layer):
        if isinstance(item, LayersInOrder):
            found.append(f"{item.first}-{item.last}" + "@" * bool(item.sizes))
        elif isinstance(item, LeftOut):
            found.append(f"no {item.text}")
        else:
            found.append(str(item))
    return found


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (DENSE, "0-7"),
        (pair(DENSE, range(3, 7)), "0-2, [A3 A4], [F3 F4], [A5 A6], [F5 F6], A7, F7"),
        (prune(DENSE, range(3, 5)), "0-2, no 3-4, 5-7"),
        (prune(DENSE, range(7, 8)), "0-6, no 7"),
        (prune(DENSE, range(3, 4), sublayers="attention"), "0-2, no A3, F3, 4-7"),
        # The stream in front of F3's plus is what A4 reads, so F3 is shown.
        (ladder(DENSE, range(4, 8)), "0-2, A3, F3, >A4, >F4, >A5, >F5, >A6, >F6, >A7, >F7"),
        (parallel(DENSE, range(0, 5)), "{A0 F0 | A1 F1 | A2 F2 | A3 F3 | A4 F4}, 5-7"),
        (Program.parse("A0 F0 A2 F2 A1 F1 A3 F3"), "A0, F0, A2, F2, A1, F1, A3, F3, no 4-7"),
        (Program.parse("A0~A1 F0~F1 A2 F2 A3 F3"), "A0~A1, F0~F1, A2, F2, A3, F3, no 4-7"),
        (Program.parse("A0 F0 A1 F1 A1 F1"), "A0, F0, A1, F1, A1, F1, no 2-7"),
        (
            lowrank(DENSE, range(2, 6), ranks={"q": 3}, shapes=SHAPES),
            "A0, F0, A1, F1, 2-5@, A6, F6, A7, F7",
        ),
        (lowrank(DENSE, range(8), ranks={"q": [3] * 4 + [2] * 4}, shapes=SHAPES), "0-3@, 4-7@"),
        (
            lowrank(DENSE, range(5, 7), ranks={"up": 3}, shapes=SHAPES),
            "0-4, A5, F5@up3, A6, F6@up3, A7, F7",
        ),
    ],
)
def test_outlines(program: Program, expected: str) -> None:
    assert items(program) == expected.split(", ")


def test_in_words_ranks_stand_aside() -> None:
    program = Program.parse(
        "A0@q3 F0 [A1@k2 A2] [F1 F2] A3@q2 F3@up4 A4@q2 F4@up4 A5@q2 F5@up4 A6 F6 A7 F7"
    )
    expected = "A0 F0 [A1 A2] [F1 F2] (layers 3-5 low-rank) A6 F6 A7 F7"
    assert outline_text(program, 8, 2) == expected
    narrow = Program.parse(" ".join(f"A{k}#2 F{k}@up3" for k in range(8)))
    assert outline_text(narrow, 8, 2) == "(layers 0-7 narrow, low-rank)"
    assert outline_text(Program.parse("A0#1 F0 A1#2 F1"), 2, 2) == "A0 F0 A1 F1"
    (stretch,) = (item for item in outline(program, 8, 2) if isinstance(item, LayersInOrder))
    assert stretch == LayersInOrder(3, 5, (("q", 2), ("up", 4)))


def test_layers_of_one_step() -> None:
    assert items(Program.parse("[A0@q1 F0] [A1@q1 F1] [A2@q1 F2]"), 1) == ["0-2@", "no 3-7"]
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
        # What has ranks needs more room, on both sides of the stream, in forks, and in a box for a stretch.
        Program.parse("{A0@q4096,k1024,v1024,o4096 | F0@down5} F1 >[F2@gate9,up8,down7 A1] >[A2@q3]"),
        Program.parse(" ".join(f"A{k}@q1,k2,v3,o4 F{k}@gate5,up6,down7" for k in range(8))),
    ],
)
def test_the_picture_holds_all_that_is_drawn(program: Program, tmp_path: Path) -> None:
    layers = 1 + max(layer for sublayer in program.sublayers() for layer in sublayer.layers)
    path = save(program_figure(program, layers, 2, "A title"), tmp_path / "program.png")
    picture = imread(path)[..., :3]
    drawn = np.argwhere((picture < 0.95).any(-1))
    margin = np.minimum(drawn.min(0), np.array(picture.shape[:2]) - 1 - drawn.max(0))
    assert (margin > 3).all()  # nothing is cut off at an edge
