"""What is read out of a scan's cells: depths, changed layers, the program of a stretch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from surgeon.findings.scan import Scan, changed_layers, depth_saved
from surgeon.language.operations.base import HEATMAPS
from surgeon.language.program import Program
from tests.findings.run_folders import BASE, scan_cells


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize(
    "operation", [name for name, heatmap in HEATMAPS.items() if heatmap.varied is None]
)
def test_depth_is_that_of_the_whole_program(operation: str, steps: int) -> None:
    dense = Program.dense(9, steps)
    for first, last in ((0, 8), (2, 2), (2, 3), (3, 7), (1, 6)):
        program = HEATMAPS[operation](dense, layers=range(first, last + 1))
        changed = changed_layers(operation, first, last)
        saved = 0.0 if changed == 0 else depth_saved(operation, changed, steps)
        assert saved is not None
        assert 9 - saved == program.effective_depth(steps)


def test_depth_that_depends_on_the_family() -> None:
    assert depth_saved("prune-attention", 4, None) is None
    assert depth_saved("prune-attention", 4, 2) == 2
    assert depth_saved("lp", 4, None) == 2


def scan_of(operations: tuple[str, ...], num_layers: int) -> Scan:
    table = pd.DataFrame(scan_cells(operations, num_layers))
    numbers = [name for name in table.columns if name != "operation"]
    table = table.astype(dict.fromkeys(numbers, float)).astype({"first": int, "last": int})
    return Scan(table, BASE, record={"sublayers_run": {"base": 2 * num_layers}})


def test_a_table_that_was_cut_is_refused(tmp_path: Path) -> None:
    scan = scan_of(("prune",), 4)
    replace(scan, record={**scan.record, "base_perplexity": BASE}).write(tmp_path)
    assert len(Scan.read(tmp_path).table()) == 10
    cells = tmp_path / "cells.csv"
    cells.write_text("".join(cells.read_text().splitlines(keepends=True)[:-2]))
    with pytest.raises(ValueError, match=r"cells.csv has 8 of the 10 rows that scan.json tells of"):
        Scan.read(tmp_path)


def test_a_model_with_a_program_of_its_own_has_no_depths() -> None:
    record = {"num_layers": 4, "program": "{A0 F0 A1 F1 | A2 F2 A3 F3}"}
    cells = pd.DataFrame(scan_cells(("prune",), 4)[:1]).astype({"perplexity": float})
    assert Scan(cells, BASE, record=record).depth("prune", 1) is None
    del record["program"]
    assert Scan(cells, BASE, record=record).depth("prune", 1) == 3


def test_cells_that_change_nothing_do_not_count() -> None:
    scan = scan_of(("merge", "lp"), 5)
    assert scan.num_layers == 5
    assert not (scan.changes["first"] == scan.changes["last"]).any()
    pairs = scan.of_operation("lp")
    assert set(zip(pairs["first"], pairs["last"], strict=True)) == {
        (0, 1), (0, 3), (1, 2), (1, 4), (2, 3), (3, 4)
    }  # fmt: skip


def test_the_best_stretch_of_every_depth() -> None:
    scan = scan_of(("prune", "ladder"), 6)
    best = scan.best_by_depth("prune")
    assert list(best["depth"]) == [5, 4, 3, 2, 1, 0]
    for _, cell in best.iterrows():
        same = scan.of_operation("prune")
        assert cell["ratio"] == same[same["changed"] == 6 - cell["depth"]]["ratio"].min()
    assert scan.best_by_depth("ladder").empty, "a ladder keeps the depth"
    assert list(scan_of(("repeat",), 3).best_by_depth("repeat")["depth"]) == [6, 5, 4]
