"""Perplexity by where a stretch ends: which lines, which points, which range."""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.figure import Figure

from surgeon.analysis.cells import select
from surgeon.findings.scan import MOST_LINES, Scan

BASE = 10.0


def table(num_layers: int, *operations: str) -> pd.DataFrame:
    """Cells that are the worse the longer and the later they are."""
    rows = [
        (name, s.start, s.stop - 1, BASE * (1 + 0.001 * len(s) + 0.0001 * s.stop))
        for name in operations
        for s in select((), num_layers).stretches()
    ]
    return pd.DataFrame(rows, columns=["operation", "first", "last", "perplexity"])


def curves(cells: pd.DataFrame) -> dict[str, Figure]:
    found = Scan(cells, BASE, record={"model": "a model"}).pictures()
    return {name: figure for name, figure in found.items() if name.startswith("curves-")}


def test_one_picture_for_each_operation_that_has_one() -> None:
    assert list(curves(table(8, "prune", "ladder", "lp"))) == ["curves-lp", "curves-ladder"]
    assert curves(table(8, "prune")) == {}


def test_a_line_for_each_even_length_over_the_last_layer() -> None:
    cells = table(8, "lp")
    (figure,) = curves(cells).values()
    axes, bar = figure.axes
    base, *lines = axes.lines
    assert [len(line.get_xdata()) for line in lines] == [7, 5, 3, 1]
    assert list(lines[1].get_xdata()) == [3, 4, 5, 6, 7]
    fours = cells[cells["last"] - cells["first"] == 3]
    assert list(lines[1].get_ydata()) == fours["perplexity"].tolist()
    assert set(base.get_ydata()) == {BASE}
    assert [label.get_text() for label in bar.get_yticklabels()] == ["2", "4", "6", "8"]
    assert axes.get_title() == "LP pairs: a model, base perplexity 10"
    assert len({line.get_color() for line in lines}) == 4


def test_a_ladder_has_odd_lengths_too_and_a_deep_model_not_too_many_lines() -> None:
    (figure,) = curves(table(40, "ladder")).values()
    labels = [int(label.get_text()) for label in figure.axes[1].get_yticklabels()]
    assert len(labels) == MOST_LINES == len(figure.axes[0].lines) - 1
    assert (labels[0], labels[-1]) == (1, 40)


def test_a_few_hopeless_stretches_do_not_squeeze_the_others() -> None:
    cells = table(16, "lp")
    cells.loc[cells["first"] == 0, "perplexity"] = 400.0
    cells.loc[(cells["first"] == 0) & (cells["last"] == 3), "perplexity"] = math.inf
    (figure,) = curves(cells).values()
    axes = figure.axes[0]
    low, high = axes.get_ylim()
    assert low < BASE < high < 1.2 * BASE
    assert axes.texts[0].get_text() == "8 of 64 stretches lie above (hollow)"


def test_stretches_of_odd_lengths_alone_make_no_picture_of_pairs() -> None:
    cells = table(6, "2-parallel")
    odd = cells[(cells["last"] - cells["first"]) % 2 == 0]
    assert curves(odd) == {}
