"""What all pictures have in common: colours, marks, axes, and points that say their values when they are pointed at.

A picture is a matplotlib figure. A command writes it as a file (`save`); the page has it as inline SVG, where these
colours are those of the page, light or dark (`surgeon.findings.inline`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal
from weakref import WeakKeyDictionary

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from surgeon.processes.files import whole_file
from surgeon.words import MOST_LAYERS, tick

# Of kinds of things: they stay apart for colour-blind readers and in print, and by dash and mark without colour.
COLOURS = ("#0072b2", "#d55e00", "#00835f", "#a3478a", "#8a6500", "#2f8fc9", "#6b3fa0", "#3f454d")
DASHES = (
    "-",
    (0, (4, 1.7)),
    (0, (1.2, 1.5)),
    (0, (5, 2, 1.2, 2)),
    (0, (7, 2.5)),
    (0, (2.5, 2.5)),
    (0, (6, 2, 1, 2)),
    "-",
)
MARKERS = "os^DvPXh"
# Of more and more of one thing, from dark to bright.
ORDERED = ("#440154", "#46327e", "#365c8d", "#277f8e", "#1fa187", "#35b779", "#76c043", "#b3b71c")
INK, SOFT, GRID, PAPER, NO_CELL = "#1b1e23", "#585f69", "#e9ebee", "#ffffff", "#e0e0e0"

WIDTH, HEIGHT = 480.0, 300.0  # of a chart of the page, in points; it has the margins below
_LEFT, _RIGHT, _TOP, _BOTTOM = 60.0, 10.0, 10.0, 40.0
POINTS = 72.0  # to the inch

TIPS: WeakKeyDictionary[Artist, Sequence[str]] = WeakKeyDictionary()  # what is said of each of a line's points


@dataclass(frozen=True)
class Chart:
    """A drawing with a caption, and the legend of its axes where more than one thing is drawn.

    Attributes:
        described: read out for those who do not see it; the title where there is nothing more to say.
        themed: in the page's colours; else in its own, on a light sheet.
        table: the page's, of its numbers.
    """

    kind: ClassVar[str] = "chart"
    figure: Figure
    title: str
    caption: str = ""
    described: str = ""
    wide: bool = False
    themed: bool = True
    table: Any = None


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as a PNG file that is whole or not there."""
    with whole_file(path) as beside:
        figure.savefig(beside, format="png")
    return path


def panel(width: float, height: float, left: float, bottom: float, right: float, top: float) -> tuple[Figure, Axes]:
    """A figure with axes inside margins, all in points."""
    figure = Figure(figsize=(width / POINTS, height / POINTS))
    inside = (left / width, bottom / height, 1 - (left + right) / width, 1 - (bottom + top) / height)
    return figure, figure.add_axes(inside)


def chart(x: str, y: str) -> tuple[Figure, Axes]:
    """An empty chart of the page with titles of its axes."""
    figure, axes = panel(WIDTH, HEIGHT, _LEFT, _BOTTOM, _RIGHT, _TOP)
    axes.set_xlabel(x, fontsize=11)
    axes.set_ylabel(y, fontsize=11)
    axes.yaxis.set_label_coords(12 / WIDTH, 0.5 + (_BOTTOM - _TOP) / 2 / HEIGHT, transform=figure.transFigure)
    axes.tick_params(labelsize=11, labelcolor=SOFT, color=SOFT, length=4)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", color=GRID, lw=1)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(SOFT)
    return figure, axes


def layers_across(axes: Axes, first: int, last: int) -> None:
    """Whole layers on the x axis, all of them or evenly chosen ones labelled."""
    if last - first > MOST_LAYERS:
        raise ValueError(f"layers {first} to {last} are more than any model has")
    step = next(s for s in (1, 2, 4, 5, 10, 20, 50, 100, 1000) if (last - first) / s <= 16)
    axes.set_xlim(first - 0.5, last + 0.5)
    shown = [layer for layer in range(first, last + 1) if layer % step == 0]
    axes.set_xticks(shown, labels=[str(layer) for layer in shown])


def scale(
    axes: Axes,
    which: Literal["x", "y"],
    values: Sequence[float],
    log: bool = False,
    zero: bool = False,
    end: float = math.inf,
) -> None:
    """Set an axis around the finite values (those above 0 if it is logarithmic), with ticks at round numbers.

    Args:
        zero: begin at 0.
        end: larger values are left to lie beyond the axis.
    """
    least = 0.0 if log else -math.inf
    finite = [min(float(value), end) for value in values if least < value < math.inf]
    low, high = (min(finite), max(finite)) if finite else (1.0, 10.0) if log else (0.0, 1.0)
    if log:
        high = high if high > low * 1.0001 else low * 1.1
        room = (high / low) ** 0.05
        low, high = low / room, high * room
        ticks = _log_ticks(low, high)
    else:
        low = min(0.0, low) if zero else low
        high = high if high > low else low + (abs(low) or 1.0) * 0.1
        ticks = list(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high))
        low, high = ticks[0], ticks[-1]
    kind = "log" if log else "linear"
    axes.set(xscale=kind, xlim=(low, high)) if which == "x" else axes.set(yscale=kind, ylim=(low, high))
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))


def _log_ticks(low: float, high: float) -> list[float]:
    """At most eight, of which there are some within less than a decade, too."""
    if high / low < 4:
        found = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    else:
        found = next(
            ticks
            for subs in ((1.0, 2.0, 5.0), (1.0, 3.0), (1.0,))
            if len(ticks := _inside(LogLocator(subs=subs, numticks=8).tick_values(low, high), low, high)) <= 8
            or subs == (1.0,)
        )
    return _inside(found, low, high)


def _inside(ticks: Any, low: float, high: float) -> list[float]:
    return [float(value) for value in ticks if low <= value <= high]


def points(
    axes: Axes,
    x: Any,
    y: Any,
    tips: Sequence[str] = (),
    style: int = 0,
    label: str = "",
    *,
    colour: str = "",
    line: bool = True,
    marks: bool = True,
    ends: tuple[Any, Any] | None = None,
    band: bool = False,
) -> None:
    """Draw a line and its points into axes that have their limits; what lies beyond is hollow, on the edge.

    Args:
        tips: what is said of each point.
        style: number of its colour, dash and mark.
        colour: instead of the style's, for one of several that are more and more of the same.
        line, marks: what is drawn.
        ends: of the 95% interval of each point; NaN where there is none.
        band: intervals are an area along the line instead of a bar at every point.
    """
    known = ~np.isnan(np.asarray(y, dtype=float))
    x, y = np.asarray(x, dtype=float)[known], np.asarray(y, dtype=float)[known]
    if not len(x):
        return
    low, high = axes.get_ylim()
    look: dict[str, Any] = {"color": colour or COLOURS[style % len(COLOURS)], "clip_on": False}
    if ends is not None:
        below, above = (np.asarray(end, dtype=float)[known] for end in ends)
        told = np.isfinite(below) & np.isfinite(above)
        interval = x[told], np.clip(below[told], low, high), np.clip(above[told], low, high)
        if band and told.any():
            axes.fill_between(*interval, alpha=0.14, lw=0, **look)
        elif told.any():
            axes.vlines(*interval, alpha=0.65, lw=1.1, **look)
    shown, inside = np.clip(y, low, high), y <= high
    mark: dict[str, Any] = {"marker": "o" if colour else MARKERS[style % len(MARKERS)], "ms": 6.2}
    dashes: Any = "-" if colour else DASHES[style % len(DASHES)]
    said = [tip for tip, here in zip(tips, known, strict=True) if here] if len(tips) else [""] * len(x)
    drawn = {"markevery": np.flatnonzero(inside).tolist(), "mec": PAPER, "mew": 0.8, **mark} if marks else {}
    (curve,) = axes.plot(x, shown, linestyle=dashes if line else "", lw=1.8, label=label or None, **drawn, **look)
    if marks:
        TIPS[curve] = [tip for tip, here in zip(said, inside, strict=True) if here]
    if marks and not inside.all():
        (hollow,) = axes.plot(x[~inside], shown[~inside], linestyle="", mfc=PAPER, mew=1.3, **mark, **look)
        TIPS[hollow] = [tip for tip, here in zip(said, inside, strict=True) if not here]


def rule(axes: Axes, value: float) -> None:
    """A dashed line across: the unedited model's value."""
    axes.axhline(value, color=SOFT, lw=1.2, ls=(0, (4, 3)), zorder=1, clip_on=False)


def bars(
    axes: Axes,
    names: Any,
    parts: Sequence[tuple[str, str, Any]],
    notes: Sequence[str],
    room: float = 1.6,
) -> None:
    """Draw a horizontal bar for each name, the first on top, of parts end to end, with a note behind it.

    Args:
        parts: what each is, its colour, and its length in each bar.
        room: the width of the axes, in lengths of the longest bar.
    """
    places, ends = np.arange(len(names)), np.zeros(len(names))
    for words, colour, lengths in parts:
        axes.barh(places, lengths, left=ends, color=colour, label=words, height=0.62)
        ends = ends + lengths
    for place, end, note in zip(places.tolist(), ends, notes, strict=True):
        axes.text(end, place, f"  {note}", va="center", fontsize=8)
    axes.set_yticks(places, labels=list(names), fontsize=9)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, room * float(np.nanmax(ends)))


def finish(axes: Axes, layers: bool = False, grid: bool = True) -> None:
    """What charts in files have in common: a faint grid, small labels, no box; whole layers on the x axis."""
    if grid:
        axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(which="both", labelsize=8, length=2)
    if layers:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=20, integer=True))
