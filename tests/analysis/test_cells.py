"""Which cells a scan has: operations, stretches, grids, permutations."""

from __future__ import annotations

import json
from typing import Any

import pytest

from surgeon.analysis.scan import (
    SCANNED,
    Selection,
    check_operations,
    permutation_seeds,
    select,
    selected_cells,
)
from surgeon.language.operations import shuffle
from surgeon.language.operations.base import HEATMAPS
from surgeon.language.program import Program
from surgeon.language.sublayer import LayerShapes
from tests.analysis.scanning import scan_cells

DENSE = "A0 F0 A1 F1 A2 F2 A3 F3"


def ends(selection: Selection) -> list[tuple[int, int]]:
    """First and last layer of every stretch, both included."""
    return [(stretch.start, stretch.stop - 1) for stretch in selection.stretches()]


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("prune", "A0 F0"),
        ("merge", "A0 F0 A1~A2~A3 F1~F2~F3"),
        ("parallel", "A0 F0 {A1 F1 | A2 F2 | A3 F3}"),
        ("2-parallel", "A0 F0 {A1 F1 | A2 F2} A3 F3"),
        ("3-parallel", "A0 F0 {A1 F1 | A2 F2 | A3 F3}"),
        ("lp", "A0 F0 [A1 A2] [F1 F2] A3 F3"),
        ("ladder", "A0 F0 >A1 >F1 >A2 >F2 >A3 >F3"),
        ("prune-attention", "A0 F0 F1 F2 F3"),
        ("prune-mlp", "A0 F0 A1 A2 A3"),
    ],
)
def test_what_each_heatmap_does_to_layers_1_to_3(operation: str, expected: str) -> None:
    (program,) = (c.program for c in scan_cells([operation], 4, seed=0) if (c.first, c.last) == (1, 3))
    assert str(program) == expected


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("prune-attention", "[A0 F0] F1 F2 [A3 F3]"),
        ("prune-mlp", "[A0 F0] A1 A2 [A3 F3]"),
        ("lp", "[A0 F0] [A1 F1 A2 F2] [A3 F3]"),
        ("ladder", "[A0 F0] >[A1 F1] >[A2 F2] [A3 F3]"),
    ],
)
def test_layers_of_one_step(operation: str, expected: str) -> None:
    (cell,) = (
        c for c in scan_cells([operation], 4, 0, steps_per_layer=1) if (c.first, c.last) == (1, 2)
    )
    assert str(cell.program) == expected


def test_triplets_leave_what_is_over_as_it_is() -> None:
    cells = {(c.first, c.last): str(c.program) for c in scan_cells(["3-parallel"], 4, seed=0)}
    assert cells[0, 3] == "{A0 F0 | A1 F1 | A2 F2} A3 F3"
    assert cells[0, 1] == DENSE


def test_the_papers_five_unless_others_are_asked_for() -> None:
    assert SCANNED == ("shuffle", "prune", "merge", "parallel", "2-parallel")
    assert check_operations(["all"]) == list(HEATMAPS)
    assert len(HEATMAPS) == 15
    assert check_operations(["ladder", "all", "lp"]) == list(HEATMAPS)
    assert check_operations(["ladder", "lp", "lp"]) == ["lp", "ladder"]
    # All that the operation has.
    assert check_operations(["pair", "lp"]) == ["2-parallel", "3-parallel", "lp"]
    assert check_operations(["width"]) == ["width-heads", "width-neurons"]
    with pytest.raises(ValueError, match="'prune-atention'.*did you mean 'prune-attention'"):
        check_operations(["prune-atention"])
    with pytest.raises(
        ValueError, match="operations is empty; name what to scan, such as lp, or leave it out"
    ):
        selected_cells([select((), 4)], 4, 0)
    with pytest.raises(ValueError, match="unknown operation 'x'.*prune-mlp, .*all"):
        check_operations(["x"])


def test_a_map_over_a_parameter_has_every_layer_with_every_value() -> None:
    keeps = HEATMAPS["lowrank"].values
    shapes = LayerShapes({"q": (20, 20), "up": (40, 20)})
    cells = scan_cells(["lowrank"], 3, 0, shapes=shapes)
    assert [(c.first, c.last, c.value) for c in cells] == [
        (k, k, keep) for k in range(3) for keep in keeps
    ]
    for cell in cells:
        assert cell.value is not None
        # Two factors of rank r of a matrix of m x n have r (m + n) parameters.
        text = f"A{cell.first}@q{int(cell.value * 10)} F{cell.first}@up{int(cell.value * 800 / 60)}"
        assert str(cell.program) == DENSE[:18].strip().replace(f"A{cell.first} F{cell.first}", text)
    part = [
        select(["lowrank"], 8, layers=range(1, 7), every=4),
        select(["lowrank", "prune"], 8, layers=range(5, 6)),
    ]
    found = selected_cells(part, 8, 0, shapes=shapes)
    assert [(c.operation, c.first, c.value) for c in found] == [
        ("prune", 5, None),
        *(("lowrank", layer, keep) for layer in (1, 5) for keep in keeps),
    ]
    with pytest.raises(ValueError, match="depends on the shapes"):
        scan_cells(["lowrank"], 3, 0)


def test_a_range_keeps_the_stretches_inside_it() -> None:
    selection = select(["prune"], 6, layers=range(2, 5))
    assert ends(selection) == [(2, 2), (2, 3), (2, 4), (3, 3), (3, 4), (4, 4)]
    assert ends(select(["prune"], 3)) == [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)]


def test_a_longest_stretch() -> None:
    assert ends(select(["prune"], 4, max_length=2)) == [
        (0, 0),
        (0, 1),
        (1, 1),
        (1, 2),
        (2, 2),
        (2, 3),
        (3, 3),
    ]
    assert select(["prune"], 4, max_length=9) == select(["prune"], 4)


def test_a_grid() -> None:
    assert ends(select(["prune"], 8, every=3)) == [(0, 2), (0, 5), (3, 5)]
    shifted = select(["prune"], 8, layers=range(1, 7), every=2, max_length=4)
    assert ends(shifted) == [(1, 2), (1, 4), (3, 4), (3, 6), (5, 6)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": range(4, 9)}, "layers 4:9 are out of range: the model's layers are 0:8"),
        ({"layers": range(8, 9)}, "layers 8:9 are out of range"),
        ({"layers": range(3, 3)}, "layers 3:3 are empty"),
        ({"every": 0}, "every must be at least 1, not 0"),
        ({"max_length": 0}, "max_length must be at least 1, not 0"),
        ({"permutations": -1}, "permutations must be at least 1, not -1"),
        ({"every": 5, "layers": range(2, 6)}, "every 5 is more than the 4 layers of 2:6"),
        ({"every": 4, "max_length": 3}, "max_length 3 is less than every 4"),
        ({"operations": ["prun"]}, "did you mean 'prune'"),
    ],
)
def test_bad_selections(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select(**({"operations": ["prune"], "num_layers": 8} | options))


def test_a_selection_survives_json() -> None:
    selection = select(["lp", "ladder"], 8, layers=range(2, 8), every=2, permutations=3)
    assert Selection.from_json(json.loads(json.dumps(selection.to_json()))) == selection


def test_cells_of_several_selections_are_there_once() -> None:
    first, second = select(["prune"], 6, layers=range(0, 3)), select(["prune", "lp"], 6, every=2)
    cells = [(c.operation, c.first, c.last) for c in selected_cells([first, second], 6, 0)]
    assert len(cells) == len(set(cells))
    assert set(cells) == {
        *(("prune", *pair) for pair in ends(first)),
        *((name, *pair) for name in ("prune", "lp") for pair in ends(second)),
    }
    assert cells == sorted(cells, key=lambda cell: (list(HEATMAPS).index(cell[0]), cell[1], cell[2]))
    assert selected_cells([second, first], 6, 0) == selected_cells([first, second], 6, 0)


def test_permutations_have_seeds_of_their_own() -> None:
    few, many = permutation_seeds(7, 2), permutation_seeds(7, 5)
    assert many[:2] == few
    assert few[0] == 7
    assert len(set(many)) == 5
    assert set(permutation_seeds(8, 5)).isdisjoint(many)
    (cell,) = (
        c
        for c in selected_cells([select(["shuffle"], 6, permutations=5)], 6, 7)
        if (c.first, c.last) == (0, 5)
    )
    assert cell.seeds == many
    assert cell.programs == tuple(shuffle(Program.dense(6), range(0, 6), seed=seed) for seed in many)
    assert len(set(cell.programs)) > 1
