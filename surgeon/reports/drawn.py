"""A figure of lines, boxes and texts as SVG text for the page: one drawing for files and for readers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.path import Path as Outline
from matplotlib.text import Text

from surgeon.reports.blocks import LegendKey
from surgeon.reports.svg import element

_POINTS = 72.0  # to the inch: what text sizes and line widths are in
_COMMANDS = {Outline.MOVETO: "M", Outline.LINETO: "L", Outline.CURVE3: "Q", Outline.CURVE4: "C"}
_ANCHORS = {"left": "start", "center": "middle", "right": "end"}
_LEGEND = 0.55  # of an axes' units: its room at the bottom
_MIDDLE = 0.35  # of a text's size: how far its baseline lies below its middle


def figure_svg(figure: Figure, title: str) -> Markup:
    """What is drawn on the only axes of a figure, which fill it; without its legend (see `legend_keys`).

    Args:
        title: read out for those who do not see it.
    """
    (axes,) = figure.axes
    left, right = axes.get_xlim()
    width = float(figure.get_figwidth()) * _POINTS
    scale, (bottom, top) = width / (right - left), axes.get_ylim()
    height = (top - bottom - (_LEGEND if axes.get_legend() else 0.0)) * scale

    def at(x: Any, y: Any) -> tuple[float, float]:
        return (float(x) - left) * scale, (top - float(y)) * scale

    parts = [(0.0, element("rect", width=width, height=height, class_="sheet"))]
    parts += [(line.get_zorder(), _line(line, at)) for line in axes.lines]
    parts += [(patch.get_zorder(), _patch(patch, at)) for patch in axes.patches]
    parts += [(text.get_zorder(), _text(text, at)) for text in axes.texts if text.get_text()]
    drawn = [part for _, part in sorted(parts, key=lambda part: part[0])]
    view = f"0 0 {width:.2f} {height:.2f}"
    return element("svg", *drawn, viewBox=view, class_="drawn", role="img", aria_label=title)


def legend_keys(axes: Axes) -> list[LegendKey]:
    """The entries of its legend."""
    legend = axes.get_legend()
    found = []
    for handle, text in zip(legend.legend_handles, legend.get_texts(), strict=True) if legend else ():
        if isinstance(handle, Line2D):
            sample = element("line", x1=0, x2=26, y1=7, y2=7, **_stroke(handle))
        else:
            assert isinstance(handle, Patch)
            sample = element("rect", x=4, y=1, width=18, height=12, rx=2, fill=to_hex(handle.get_facecolor()))
        svg = element("svg", sample, viewBox="0 0 26 14", class_="key", aria_hidden="true")
        found.append(LegendKey(svg, text.get_text()))
    return found


def _stroke(line: Line2D) -> dict[str, str | float | None]:
    dashes = None if line.get_linestyle() == "-" else "3 2.5"
    return {"stroke": to_hex(line.get_color()), "stroke_width": line.get_linewidth(), "stroke_dasharray": dashes}


def _line(line: Line2D, at: Any) -> Markup:
    points = [at(x, y) for x, y in np.asarray(line.get_xydata(), dtype=np.float64)]
    text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return element("polyline", points=text, fill="none", **_stroke(line))


def _patch(patch: Patch, at: Any) -> Markup:
    outline = patch.get_path().transformed(patch.get_patch_transform())
    steps = []
    for points, code in outline.iter_segments(curves=True, simplify=False):
        steps.append("Z" if code == Outline.CLOSEPOLY else _COMMANDS[code] + _pairs(points.tolist(), at))
    edge = to_hex(patch.get_edgecolor(), keep_alpha=True)
    drawn = {} if edge.endswith("00") else {"stroke": edge[:7], "stroke_width": patch.get_linewidth()}
    return element("path", d="".join(steps), fill=to_hex(patch.get_facecolor()), **drawn)


def _pairs(points: Sequence[float], at: Any) -> str:
    pairs = zip(points[::2], points[1::2], strict=True)
    return " ".join(f"{x:.1f} {y:.1f}" for x, y in (at(x, y) for x, y in pairs))


def _text(text: Text, at: Any) -> Markup:
    """Lines of text around a place."""
    x, y = at(*text.get_position())
    size, lines = float(text.get_fontsize()), text.get_text().split("\n")
    rise = {"center": _MIDDLE - 0.6 * (len(lines) - 1), "top": 1.0}.get(text.get_verticalalignment(), 0.0)
    spans = [element("tspan", escape(one), x=x, y=y + size * (rise + 1.2 * number)) for number, one in enumerate(lines)]
    anchor = _ANCHORS[text.get_horizontalalignment()]
    words = element("text", *spans, color=to_hex(text.get_color()), text_anchor=anchor)
    return element("g", words, font_size=size)
