"""Perplexity by where a stretch ends: which lines, which points, which range."""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.figure import Figure

from surgeon.analysis.scan import select
from surgeon.findings.drawing import ORDERED
from surgeon.findings.scan import Scan

BASE = 10.0


def table(num_layers: int, *operations: str) -> pd.DataFrame:
    """Cells that are the worse the longer and the later they are."""
    rows = [
        (name, s.start, s.stop - 1, BASE * (1 + 0.001 * len(s) + 0.0001 * s.stop))
        for name in operations
        for s in select((), num_layers).stretches()
    ]
    cells = pd.DataFrame(rows, columns=["operation", "first", "last", "perplexity"])
    return cells.assign(divergence=0.1, tokens=100)


def curves(cells: pd.DataFrame) -> dict[str, Figure]:
    found = Scan(cells, BASE, record={"model": "a model"})
    return {name: found.plot(name) for name in found.pictures() if name.startswith("curves-")}


def test_one_picture_for_each_operation_that_has_one() -> None:
    assert list(curves(table(8, "prune", "ladder", "lp"))) == ["curves-lp", "curves-ladder"]
    assert curves(table(8, "prune")) == {}


def test_a_line_for_each_even_length_over_the_last_layer() -> None:
    cells = table(8, "lp")
    (figure,) = curves(cells).values()
    (axes,) = figure.axes
    base, *lines = axes.lines
    assert [len(line.get_xdata()) for line in lines] == [7, 5, 3, 1]
    assert list(lines[1].get_xdata()) == [3, 4, 5, 6, 7]
    fours = cells[cells["last"] - cells["first"] == 3]
    assert list(lines[1].get_ydata()) == fours["perplexity"].tolist()
    assert set(base.get_ydata()) == {BASE}
    assert axes.get_legend_handles_labels()[1][0] == "2 layers (1 pair)"
    assert axes.get_title(loc="left") == "LP pairs: where the stretch ends"
    assert len({line.get_color() for line in lines}) == 4


def test_a_ladder_has_odd_lengths_too_and_a_deep_model_not_too_many_lines() -> None:
    (figure,) = curves(table(40, "ladder")).values()
    labels = figure.axes[0].get_legend_handles_labels()[1]
    assert len(labels) == len(ORDERED) == len(figure.axes[0].lines) - 1
    assert (labels[0], labels[-1]) == ("1 layer", "40 layers")


def test_a_few_hopeless_stretches_do_not_squeeze_the_others() -> None:
    cells = table(16, "lp")
    cells.loc[cells["first"] == 0, "perplexity"] = 400.0
    cells.loc[(cells["first"] == 0) & (cells["last"] == 3), "perplexity"] = math.inf
    (figure,) = curves(cells).values()
    axes = figure.axes[0]
    low, high = axes.get_ylim()
    assert low < BASE < high < 1.2 * BASE
    assert "8 points of 64 lie above (hollow, on the edge)" in axes.get_title(loc="left")


def test_stretches_of_odd_lengths_are_those_of_whole_pairs() -> None:
    cells = table(6, "2-parallel")
    odd = cells[(cells["last"] - cells["first"]) % 2 == 0]
    (figure,) = curves(odd).values()
    assert figure.axes[0].get_legend_handles_labels()[1] == ["2 layers (1 pair)", "4 layers (2 pairs)"]
