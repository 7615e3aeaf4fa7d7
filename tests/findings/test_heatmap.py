"""Heatmaps: what is drawn where."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import matplotlib.image
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from surgeon.analysis.scan import select
from surgeon.findings.drawing import CAP, Map, Picture, damage_legend
from surgeon.findings.scan import Scan
from surgeon.language.operations.base import HEATMAPS

BASE = 10.0
OVER_STRETCHES = tuple(name for name, one in HEATMAPS.items() if one.varied is None)


def table(
    num_layers: int, operations: tuple[str, ...] = ("prune",), worst: float = 100.0
) -> pd.DataFrame:
    """A longer stretch is worse; the whole model is the worst cell."""
    rows = []
    for name in operations:
        for stretch in select((), num_layers).stretches():
            perplexity = BASE + (worst - BASE) * (len(stretch) / num_layers) ** 2
            rows.append((name, stretch.start, stretch.stop - 1, perplexity))
    cells = pd.DataFrame(rows, columns=["operation", "first", "last", "perplexity"])
    return cells.assign(divergence=0.1, tokens=100)


def pictures(cells: pd.DataFrame) -> list[Figure]:
    """The heatmaps, each operation's own first, then all side by side."""
    found = Scan(cells, BASE, record={"model": "a model"})
    own = (name for name in found.pictures() if name.startswith("heatmap"))
    return [found.plot(name) for name in sorted(own, key=lambda name: name == "heatmaps")]


def grid(cells: pd.DataFrame) -> pd.DataFrame:
    legend = damage_legend("", cells["perplexity"], BASE)
    return Map("", cells, "first", "last", {"perplexity": "perplexity"}, legend).values


def test_rows_are_first_layers_and_columns_last_ones() -> None:
    cells = table(3)
    values = grid(cells)
    assert values.loc[0, 2] == 100
    assert values.loc[0, 1] == pytest.approx(BASE + 90 * 4 / 9)
    assert np.isnan(values.loc[2, 0])
    assert values.isna().sum().sum() == 3


def test_a_grid_of_stretches_is_drawn_without_gaps() -> None:
    cells = table(16)
    cells = cells[(cells["first"] % 4 == 0) & ((cells["last"] + 1) % 4 == 0)]
    values = grid(cells)
    assert (list(values.index), list(values.columns)) == ([0, 4, 8, 12], [3, 7, 11, 15])
    figures = pictures(cells)
    axes = figures[0].axes[0]
    assert axes.images[0].get_array().shape == (4, 4)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "4", "8", "12"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["3", "7", "11", "15"]


def test_layers_between_two_ranges_stay_free() -> None:
    cells = table(8)
    apart = cells[(cells["last"] < 2) | (cells["first"] > 5)]
    assert list(grid(apart).index) == list(range(8))
    assert grid(apart).loc[3].isna().all()


def test_a_parameter_has_its_values_across() -> None:
    keeps = [0.9, 0.6, 0.2]
    rows = [
        ("lowrank", k, k, keep, BASE * (1 + 0.01 * k + (1 - keep) / 10))
        for k in (2, 3, 4)
        for keep in keeps
    ]
    cells = pd.DataFrame(rows, columns=["operation", "first", "last", "keep", "perplexity"])
    cells = cells.assign(divergence=0.1, tokens=100)
    everything = pd.concat([table(5, ("prune", "lp")), cells])
    figures = pictures(everything)
    assert len(figures) == 4  # each alone, and side by side those of stretches
    assert [axes.images[0].get_array().shape for axes in figures[-1].axes if axes.images] == [(5, 5)] * 2
    axes = figures[2].axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("keep", "")
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0.9", "0.6", "0.2"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["layer 2", "layer 3", "layer 4"]
    np.testing.assert_allclose(axes.images[0].get_array(), cells["perplexity"].to_numpy().reshape(3, 3))


@pytest.mark.thorough
def test_ten_operations_make_rows() -> None:
    figures = pictures(table(4, OVER_STRETCHES[:10]))
    figures[-1].draw_without_rendering()
    panels = [axes for axes in figures[-1].axes if axes.images]
    assert [axes.get_title(loc="left") for axes in panels] == [
        HEATMAPS[name].title for name in OVER_STRETCHES[:10]
    ]
    places = {(round(axes.get_position().x0, 3), round(axes.get_position().y0, 3)) for axes in panels}
    assert [len({place[axis] for place in places}) for axis in (0, 1)] == [4, 3]


def test_an_odd_number_of_operations_leaves_a_place_empty() -> None:
    figures = pictures(table(4, OVER_STRETCHES[:7]))
    shown = [axes for axes in figures[-1].axes if axes.get_visible()]
    assert sum(bool(axes.images) for axes in shown) == 7
    assert len(shown) == 8, "and the colour bar"


def test_one_file_for_each_operation_and_one_for_all(tmp_path: Path) -> None:
    written = Scan(table(4, ("prune", "2-parallel")), BASE).draw(tmp_path)
    maps = ["heatmaps.png", "heatmap-prune.png", "heatmap-2-parallel.png"]
    assert [path.name for path in written] == [*maps, "curves-2-parallel.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in written)
    for path in written:
        assert matplotlib.image.imread(path).std() > 0.05, "something is drawn"
    assert list(Scan(table(4), BASE).pictures()) == ["heatmap-prune"]


def test_what_the_picture_says() -> None:
    figures = pictures(table(16))
    axes, bar = figures[0].axes
    assert axes.get_title(loc="left") == "Prune"
    assert figures[0].get_suptitle() == "a model, base perplexity 10"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("last layer", "first layer")
    assert axes.get_ylim()[0] > axes.get_ylim()[1], "the first row is on top"
    scale = axes.images[0].norm
    assert (scale.vmin, scale.vmax) == (BASE, BASE * CAP)
    assert "beyond 3 times the base" in said(bar)


def said(bar: Axes) -> str:
    return bar.get_ylabel().replace("\n", " ")


@pytest.mark.parametrize(
    ("worst", "end"), [(100.0, 30.0), (20.0, 20.0), (12.007, 12.007), (10.01, 11.0)]
)
def test_colours_end_where_they_still_tell_cells_apart(worst: float, end: float) -> None:
    cells = table(6, worst=worst)
    cells["perplexity"] = cells["perplexity"].clip(upper=worst)
    figures = pictures(cells)
    axes, bar = figures[0].axes
    assert axes.images[0].norm.vmax == pytest.approx(end)
    assert ("beyond" in said(bar)) == (worst > end)


def test_one_bad_layer_does_not_hide_what_the_others_tolerate() -> None:
    cells = table(16, worst=10.8)
    cells.loc[cells["first"] == 0, "perplexity"] = 500.0
    figures = pictures(cells)
    axes, bar = figures[0].axes
    assert axes.images[0].norm.vmax == pytest.approx(11.0)
    assert "beyond 1.1 times the base" in said(bar)


def test_infinite_cells_have_the_colour_of_capped_ones() -> None:
    cells = table(3)
    cells.loc[cells["last"] == 2, "perplexity"] = math.inf
    figures = pictures(cells)
    image = figures[0].axes[0].images[0]
    rgba = image.to_rgba(image.get_array())
    assert tuple(rgba[0, 2]) == tuple(image.cmap.get_over())
    assert tuple(rgba[2, 0]) == tuple(image.cmap.get_bad()) != tuple(image.cmap.get_over())


@pytest.mark.sampled
@pytest.mark.parametrize("operations", [("prune",), ("prune", "merge")])
@pytest.mark.parametrize(
    ("worst", "bad"), [(100.0, 500.0), (20.0, 20.0), (10.8, 500.0), (10.8, math.inf), (9.9, 9.9)]
)
def test_the_page_has_the_same_colours(operations: tuple[str, ...], worst: float, bad: float) -> None:
    cells = table(12, operations, worst)
    cells.loc[(cells["operation"] == "prune") & (cells["first"] == 0), "perplexity"] = bad
    cells = pd.concat(
        [
            cells,
            cells.iloc[-9:],
            pd.DataFrame([("lowrank", 0, 0, 90.0, 0.1, 100, 0.5)], columns=[*cells, "keep"]),
        ]
    )
    figures = pictures(cells)
    found = Scan(cells, BASE, record={"num_layers": 12, "steps_per_layer": 2})
    picture = next(
        block
        for block in found.section()
        if isinstance(block, Picture) and isinstance(block.items[0], Map)
    )
    figure = figures[-1] if len(operations) > 1 else figures[0]
    panels = [axes for axes in figure.axes if axes.images]
    assert len(panels) == len(picture.items) == len(operations)
    for panel, item in zip(panels, picture.items, strict=True):
        (own,) = item.figure.axes[0].images
        np.testing.assert_array_equal(
            own.to_rgba(own.get_array()), panel.images[0].to_rgba(panel.images[0].get_array())
        )
        fences = [
            [line.tolist() for lines in axes.collections for line in lines.get_segments()]
            for axes in (item.figure.axes[0], panel)
        ]
        assert fences[0] == fences[1]
    words = [
        text.get_text() for text in (picture.legend or picture.items[0].legend).figure.axes[0].texts
    ]
    assert ("beyond" in words) == ("beyond" in figure.axes[-1].get_ylabel())


@pytest.mark.parametrize("num_layers", [1, pytest.param(16, marks=pytest.mark.thorough), 32, 80])
def test_labels_do_not_overlap(num_layers: int) -> None:
    figures = pictures(table(num_layers, ("prune", "merge", "shuffle")))
    for figure in figures:
        figure.draw_without_rendering()
        renderer = FigureCanvasAgg(figure).get_renderer()
        for axes in figure.axes:
            texts = [label for label in axes.get_xticklabels() if label.get_text()]
            boxes = [label.get_window_extent(renderer) for label in texts]
            assert all(a.x1 < b.x0 for a, b in pairwise(boxes))
            if axes.images:
                assert all(label.get_text().isdecimal() for label in texts)
