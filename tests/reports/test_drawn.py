"""Figures as SVG text: every line, box and word of the figure is in it, where it was."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np

from surgeon.language.program import Program
from surgeon.reports.drawn import figure_svg, legend_keys
from surgeon.reports.program import program_figure

PROGRAM = Program.parse("A0 F0 [A1 A2] [F1 F2] >A3 >F3 {A4 F4 | A5 F5} F6")


def test_everything_that_is_drawn_is_there_where_it_was() -> None:
    figure = program_figure(PROGRAM, 7, 2)
    (axes,) = figure.axes
    root = ElementTree.fromstring(str(figure_svg(figure, "a program")))
    assert root.get("aria-label") == "a program"
    width, height = map(float, str(root.get("viewBox")).split()[2:])
    scale = width / (axes.get_xlim()[1] - axes.get_xlim()[0])
    top = axes.get_ylim()[1]
    drawn = [pair.split(",") for one in root.iter("polyline") for pair in str(one.get("points")).split()]
    points = np.array(drawn, dtype=float)
    ordered = sorted(axes.lines, key=lambda line: line.get_zorder())
    wanted = np.concatenate([np.asarray(line.get_xydata(), dtype=float) for line in ordered])
    assert np.allclose(points, (wanted * [1, -1] + [0.6, top]) * scale, atol=0.06)
    words = sorted(span.text or "" for span in root.iter("tspan"))
    assert words == sorted(line for text in axes.texts for line in text.get_text().split("\n") if text.get_text())
    assert {"A3", "F3", "no A6"} <= set(words)
    assert len(list(root.iter("path"))) == len(axes.patches)
    for span in root.iter("tspan"):
        assert 0 <= float(str(span.get("x"))) <= width
        assert 0 <= float(str(span.get("y"))) <= height
    assert not re.search(r"style=|href|https?:", str(figure_svg(figure, "")))


def test_the_legend_is_in_words() -> None:
    figure = program_figure(PROGRAM, 7, 2)
    names = [key.name for key in legend_keys(figure.axes[0])]
    assert names == ["attention", "feed-forward", "pale: as it was", "late: beside the step before", "left out"]
