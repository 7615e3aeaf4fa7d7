"""Figures inside the page: everything that is drawn is there, in the page's colours, and says its values."""

from __future__ import annotations

import math
import re
from operator import itemgetter
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from surgeon.findings.drawing import COLOURS, Chart, Legend, Map, layers_across, points, save, scale
from surgeon.findings.page import inline_svg, legend_keys
from surgeon.findings.program import program_figure
from surgeon.language.program import Program
from tests.findings.read_page import marks_in


def chart(x: str, y: str) -> tuple[Figure, Axes]:
    figure = Chart("a chart", lambda _: None, x, y).figure
    return figure, figure.axes[0]


PROGRAM = Program.parse("A0 F0 [A1 A2] [F1 F2] >A3 >F3 {A4 F4 | A5 F5} F6")


def test_points_lie_where_they_are_and_say_their_values() -> None:
    figure, axes = chart("layer", "value")
    layers_across(axes, 0, 9)
    scale(axes, "y", [1.0, 10.0], log=True, end=10.0)
    table = pd.DataFrame({"x": range(5), "value": [1.0, math.nan, 10.0, 10.0**0.5, 500.0]})
    points(axes, table, "x", "value", lambda row: f"value <{row['value']:g}>", style=2, label="one")
    text = str(inline_svg(figure, "a chart", "here"))
    root = ElementTree.fromstring(text)
    assert (root.get("role"), root.get("aria-label")) == ("img", "a chart")
    marks = marks_in(root)
    assert [tip for *_, tip in marks] == ["value <1>", "value <10>", "value <3.16228>", "value <500>"]
    assert [hollow for *_, hollow, _ in marks] == [False, False, False, True]
    steps = np.diff([x for x, *_ in marks])
    assert steps / steps[1] == pytest.approx([2, 1, 1], abs=0.01)
    heights = [y for _, y, *_ in marks]
    assert heights[2] == pytest.approx((heights[0] + heights[1]) / 2, abs=0.02)
    assert heights[3] < heights[1], "on the edge"
    assert 'fill="var(--s2)"' in text
    assert COLOURS[2] not in text
    assert [name for _, name in legend_keys(figure)] == ["one"]
    ids = re.findall(r' id="([^"]*)"', text)
    assert {*re.findall(r'href="#([^"]*)"', text)} == set(ids)
    assert all(name.startswith("here-") for name in ids)


def test_nothing_that_a_page_should_not_hold() -> None:
    figure, axes = chart("$x$ & </svg><script>", "\x07\x00bell")
    table = pd.DataFrame({"x": [0, 1], "tip": ["<img src=x>", "'\""]})
    points(axes, table, "x", "x", itemgetter("tip"))
    text = str(inline_svg(figure, 'a "title"'))
    assert not re.search(r"style=|xlink|https?:|url\(|<script|<img|<style|\x07|\x00", text)
    assert ElementTree.fromstring(text).get("aria-label") == 'a "title"'


def test_a_map_is_an_image_of_a_pixel_for_each_cell() -> None:
    values = pd.DataFrame(
        [[0.0, 1.0, math.nan], [0.5, math.inf, 0.2]], index=["a", "b"], columns=[0, 1, 2]
    )
    table = values.rename_axis("row").reset_index().melt("row", var_name="layer")
    legend = Legend(Normalize(0, 1), "values")
    figure = Map(
        "a map", table, "row", "layer", {"value": "value"}, legend, limit=0.5, flat=300.0
    ).figure
    root = ElementTree.fromstring(str(inline_svg(figure, "a map")))
    (image,) = root.iter("image")
    assert (image.get("width"), image.get("height")) == ("3", "2")
    place = {
        name: float(str(root.get(f"data-{name}")))
        for name in ("left", "top", "w", "h", "across", "down")
    }
    assert place["left"] + 3 * place["w"] == pytest.approx(300, abs=1e-3)
    assert (place["h"], place["across"], place["down"]) == (pytest.approx(22, abs=1e-3), 3, 2)
    assert sum(rect.get("class") == "here" for rect in root.iter("rect")) == 1
    shown = figure.axes[0].images[0]
    colours = shown.to_rgba(shown.get_array())
    assert colours[0, 2, 3] == 0
    assert tuple(colours[1, 1]) == tuple(shown.cmap.get_over())
    fence = figure.axes[0].collections[0]
    assert len(fence.get_segments()) == 3  # between 0 and 1, 0.5 and infinity, infinity and 0.2


def test_a_program_keeps_its_own_colours() -> None:
    figure = program_figure(PROGRAM, 7, 2)
    names = [name for _, name in legend_keys(figure)]
    assert names == ["attention", "feed-forward", "late: beside the step before", "left out"]
    text = str(inline_svg(figure, "a program", themed=False))
    words = re.findall(r"<text[^>]*>([^<]*)</text>", text)
    assert {"A3", "F3", "no A6"} <= set(words)
    assert not set(names) & set(words), "the page says them as text"
    assert "var(" not in text
    for sample, _ in legend_keys(figure):
        assert 'class="key"' in str(inline_svg(sample, themed=False))


def test_the_same_figure_gives_the_same_text_and_a_file(tmp_path: Path) -> None:
    figure, axes = chart("x", "y")
    points(axes, pd.DataFrame({"x": [0.0, 1.0], "tip": ["a", "b"]}), "x", "x", itemgetter("tip"))
    assert inline_svg(figure, "t", "n") == inline_svg(figure, "t", "n")
    assert save(figure, tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("values", "log", "wanted"),
    [
        ([0.02, 5.0], True, ["0.02", "0.05", "0.1", "0.2", "0.5", "1", "2", "5"]),
        ([6.3, 6.6], True, ["6.3", "6.4", "6.5", "6.6"]),
        ([1e-3, 1e3], True, ["0.001", "0.01", "0.1", "1", "10", "100", "1,000"]),
        ([math.nan, math.inf, 0.0], True, ["1", "2", "5", "10"]),
        ([0.1, 0.93], False, ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        ([3.0], False, None),
        ([8.017, 8.026], True, ["8.018", "8.02", "8.022", "8.024", "8.026"]),
        ([1021.0, 1029.0], False, ["1,020", "1,022", "1,024", "1,026", "1,028", "1,030"]),
        ([], False, ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
    ],
)
def test_axes_have_a_few_round_numbers(values: list[float], log: bool, wanted: list[str] | None) -> None:
    _, axes = chart("x", "y")
    scale(axes, "y", values, log)
    shown = [label.get_text() for label in axes.get_yticklabels()]
    assert wanted is None or shown == wanted
    assert 2 <= len(shown) <= 8
