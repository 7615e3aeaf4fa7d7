"""Panels and pictures: charts with axes, points and bars, and maps of cells in colours; each says the values it shows.

A panel draws itself into axes: for the page as inline SVG in its own colours (`page.py`), for a file beside the other
panels of its picture (`sheet`).
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal
from weakref import WeakKeyDictionary

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import Colormap, FuncNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import ScaledTranslation

from surgeon.processes.files import whole_file
from surgeon.words import MOST_LAYERS, TIMES, allowance, number, plural, tick

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
INK = "#1b1e23"
SOFT = "#585f69"
GRID = "#e9ebee"
PAPER = "#ffffff"
NO_CELL = "#e0e0e0"

# Of a chart, in points; on the page it has the margins below.
WIDTH = 480.0
HEIGHT = 300.0
_LEFT = 60.0
_RIGHT = 10.0
_TOP = 10.0
_BOTTOM = 40.0
_WIDEST = 1700.0  # of a file's picture, in points
POINTS = 72.0  # to the inch

MARKED = 1.10  # times the base perplexity: cells up to here are fenced in
_MAP_COLOURS = "viridis"
BEYOND = "#fff6c2"  # paler than the scale's last colour, so that a capped cell is seen to be one
LEAST_CAP = 1.1
# Share of the cells that colours tell apart, with some room, if a few cells are beyond the cap.
MOST = 0.85
_ROOM = 1.4
MANY_LAYERS = 48  # beyond, a map needs more room on the page
CAP = 3.0  # colours of maps end at this multiple of the base perplexity, at the latest
# Of flat maps, alone and side by side, in points.
WIDE = 800.0
HALF = 520.0
# Of a square map.
_MAP_SIDE = 320.0
_MAP_LEFT = 34.0
_MAP_BOTTOM = 34.0
_MAP_TOP = 6.0
_MAP_RIGHT = 8.0
_MAP_ROW = 22.0  # of a flat one
_STRETCH = {"first": "first layer", "last": "last layer"}
_TICKS = (1.05, 1.10, 1.25, 1.5, 2.0, 3.0)  # of a base perplexity

# Tips of each of a line's points.
TIPS: WeakKeyDictionary[Artist, Sequence[str]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Chart:
    """Lines, points or bars, drawn into axes that have their looks.

    Attributes:
        x, y: titles of the axes.
        name: of the file; a chart without one is in the file of its picture, or in none.
        height: in points.
    """

    themed: ClassVar[bool] = True
    wide: ClassVar[bool] = False
    title: str
    drawn: Callable[[Axes], None]
    x: str = ""
    y: str = ""
    caption: str = ""
    name: str = ""
    described: str = ""
    height: float = HEIGHT
    left: float = _LEFT

    @property
    def size(self) -> tuple[float, float]:
        return WIDTH, self.height

    def draw(self, axes: Axes) -> None:
        axes.set_xlabel(self.x, fontsize=11)
        axes.set_ylabel(self.y, fontsize=11)
        axes.tick_params(labelsize=11, labelcolor=SOFT, color=SOFT, length=4)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", color=GRID, lw=1)
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(SOFT)
        self.drawn(axes)

    @cached_property
    def figure(self) -> Figure:
        figure, axes = panel(WIDTH, self.height, self.left, _BOTTOM, _RIGHT, _TOP)
        self.draw(axes)
        middle = 0.5 + (_BOTTOM - _TOP) / 2 / self.height
        axes.yaxis.set_label_coords(12 / WIDTH, middle, transform=figure.transFigure)
        return figure

    @property
    def words(self) -> str:
        """The page's caption."""
        return f"{self.caption} {above(self.figure.axes[0])}".strip()


@dataclass(frozen=True)
class Drawing:
    """A figure as it is, on a light sheet of the page."""

    themed: ClassVar[bool] = False
    wide: ClassVar[bool] = True
    figure: Figure
    title: str
    words: str
    described: str


@dataclass(frozen=True)
class Picture:
    """Panels side by side, under one heading and one legend of colours; a file of this name."""

    items: Sequence[Any]
    caption: str = ""
    name: str = ""
    heading: str = ""

    @property
    def legend(self) -> Legend | None:
        """The colours that all of its maps share, if there are several."""
        legends = [getattr(item, "legend", None) for item in self.items]
        if len(legends) > 1 and all(one is legends[0] for one in legends):
            return legends[0]
        return None

    @property
    def many(self) -> bool:
        return any(getattr(item, "many", False) for item in self.items)

    @property
    def flat(self) -> bool:
        return any(getattr(item, "flat", 0) for item in self.items)


def pictures_in(blocks: Iterable[Any]) -> Iterator[tuple[str, Picture]]:
    """Everything in a section that is also a file, with its name."""
    for block in blocks:
        if name := getattr(block, "name", ""):
            yield name, block if isinstance(block, Picture) else Picture([block])
        elif isinstance(block, Picture):
            yield from pictures_in(block.items)


def sheet(picture: Picture, heading: str) -> Figure:
    """A picture as a figure of a file, all of its panels side by side, with their captions."""
    panels = picture.items
    width = max(one.size[0] for one in panels)
    height = max(one.size[1] for one in panels)
    across = min(len(panels), max(1, int(_WIDEST / width)))
    down = math.ceil(len(panels) / across)
    across = math.ceil(len(panels) / down)
    inches = ((across * width + 90) / POINTS, (down * (height + 60) + 70) / POINTS)
    figure = Figure(figsize=inches, layout="compressed", dpi=110)  # maps have square cells
    places = list(figure.subplots(down, across, squeeze=False).flat)
    for axes, one in zip(places, panels, strict=False):
        one.draw(axes)
        said = " ".join(filter(None, [one.caption, above(axes)]))
        words = textwrap.fill(said, int(one.size[0] / 5.2))
        axes.set_title(f"{one.title}\n{words}".strip(), fontsize=10, loc="left")
        if axes.get_legend_handles_labels()[0] and axes.get_legend() is None:
            below = axes.transAxes + ScaledTranslation(0, -40 / POINTS, figure.dpi_scale_trans)
            place: Any = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "bbox_transform": below}
            axes.legend(fontsize=9, frameon=False, ncols=2, **place)
        if isinstance(one, Map) and picture.legend is None:
            one.legend.beside(figure, [axes])
    for axes in places[len(panels) :]:
        axes.set_visible(False)
    if picture.legend is not None:
        picture.legend.beside(figure, places[: len(panels)])
    figure.suptitle(heading, fontsize=13)
    if picture.caption:
        figure.supxlabel(textwrap.fill(picture.caption, int(inches[0] * 14)), fontsize=9, color=SOFT)
    return figure


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as a PNG file that is whole or not there."""
    with whole_file(path) as beside:
        figure.savefig(beside, format="png", bbox_inches="tight")
    return path


def panel(
    width: float, height: float, left: float, bottom: float, right: float, top: float
) -> tuple[Figure, Axes]:
    """A figure with axes inside margins, all in points."""
    figure = Figure(figsize=(width / POINTS, height / POINTS))
    inside = (left / width, bottom / height, 1 - (left + right) / width, 1 - (bottom + top) / height)
    return figure, figure.add_axes(inside)


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
    """Set an axis around the finite values (above 0 if logarithmic) up to an end, with ticks at round numbers."""
    least = -math.inf
    if log:
        least = 0.0
    finite = [min(float(value), end) for value in values if least < value < math.inf]
    if not finite:
        finite = [0.0, 1.0]
        if log:
            finite = [1.0, 10.0]
    low = min(finite)
    high = max(finite)
    if log:
        if not (high > low * 1.0001):
            high = low * 1.1
        room = (high / low) ** 0.05
        low = low / room
        high = high * room
        subs = [(1.0, 2.0, 5.0), (1.0, 3.0), (1.0,)]
        found = np.asarray(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high))
        while high / low >= 4:
            found = np.asarray(LogLocator(subs=subs.pop(0), numticks=8).tick_values(low, high))
            if not subs or np.sum((low <= found) & (found <= high)) <= 8:
                break
        ticks = [float(value) for value in found if low <= value <= high]
    else:
        if zero:
            low = min(0.0, low)
        if not (high > low):
            high = low + (abs(low) or 1.0) * 0.1
        ticks = list(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high))
        low = ticks[0]
        high = ticks[-1]
    axes.set(**{f"{which}scale": "log" if log else "linear", f"{which}lim": (low, high)})
    axis: Any = getattr(axes, f"{which}axis")
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    # As many digits as the round numbers have: 8.02 and 8.025 are not the same.
    digits = next(
        (
            some
            for some in range(3, 9)
            if all(math.isclose(float(f"{one:.{some}g}"), one) for one in ticks)
        ),
        9,
    )
    axis.set_major_formatter(FuncFormatter(lambda value, _: tick(value, digits)))


def points(
    axes: Axes,
    table: pd.DataFrame,
    across: str,
    column: str,
    tip: Callable[[Any], str],
    style: int = 0,
    label: str = "",
    *,
    colour: str = "",
    line: bool = True,
    marks: bool = True,
    intervals: bool = False,
    band: bool = False,
) -> None:
    """Draw two columns of a table into axes that have their limits; points beyond are hollow, on the edge.

    Args:
        tip: text of a row's point.
        style: number of its colour, dash and mark; `colour` in its place is of an ordered series.
        intervals: draw 95% intervals where the table has them; with `band` as an area along the line.
    """
    table = table[table[column].notna()]
    if table.empty:
        return
    x = table[across].to_numpy(dtype=float)
    y = table[column].to_numpy(dtype=float)
    low, high = axes.get_ylim()
    look: dict[str, Any] = {"color": colour or COLOURS[style % len(COLOURS)], "clip_on": False}
    names = [f"{column}_low", f"{column}_high"]
    if intervals and {*names} <= {*table}:
        below, above = table[names].to_numpy(dtype=float).T
        told = np.isfinite(below) & np.isfinite(above)
        interval = x[told], np.clip(below[told], low, high), np.clip(above[told], low, high)
        if band and told.any():
            axes.fill_between(*interval, alpha=0.14, lw=0, **look)
        elif told.any():
            axes.vlines(*interval, alpha=0.65, lw=1.1, **look)
    shown = np.clip(y, low, high)
    inside = y <= high
    mark: dict[str, Any] = {"marker": "o" if colour else MARKERS[style % len(MARKERS)], "ms": 6.2}
    dashes: Any = "-" if colour else DASHES[style % len(DASHES)]
    tips = np.array([tip(row) for _, row in table.iterrows()], dtype=object)
    drawn = {}
    if marks:
        drawn = {"markevery": np.flatnonzero(inside).tolist(), "mec": PAPER, "mew": 0.8, **mark}
    (curve,) = axes.plot(
        x, shown, linestyle=dashes if line else "", lw=1.8, label=label or None, **drawn, **look
    )
    if marks:
        TIPS[curve] = tips[inside].tolist()
    if marks and not inside.all():
        (hollow,) = axes.plot(
            x[~inside], shown[~inside], linestyle="", mfc=PAPER, mew=1.3, **mark, **look
        )
        TIPS[hollow] = tips[~inside].tolist()


def columns_chart(
    table: pd.DataFrame,
    lines: Mapping[str, tuple[str, int]],
    named: Callable[[Any], str],
    titles: tuple[str, str, str],
    caption: str = "",
    log: bool = True,
) -> Chart:
    """Draw columns of a table over its first, the layers, up to 1 or logarithmic; lines have words and a style."""
    title, x, y = titles
    first = str(table.columns[0])
    shown = table
    if log:  # a term that is 0 (GPT-NeoX has one) has no place there
        shown = table.assign(**{name: table[name].where(table[name] > 0) for name in lines})

    def draw(axes: Axes) -> None:
        layers_across(axes, int(table[first].min()), int(table[first].max()))
        numbers = table[list(lines)].to_numpy(dtype=float).ravel().tolist()
        if not log:
            numbers.append(1.0)
        scale(axes, "y", numbers, log, zero=not log)
        for column, (words, style) in lines.items():
            points(axes, shown, first, column, partial(tip, column, words), style, words)

    def tip(column: str, words: str, row: Any) -> str:
        return f"{named(row)}, {words}: {number(row[column])}"

    return Chart(title, draw, x, y, caption)


def rule(axes: Axes, value: float) -> None:
    """A dashed line across: the unedited model's value."""
    axes.axhline(value, color=SOFT, lw=1.2, ls=(0, (4, 3)), zorder=1, clip_on=False)


def above(axes: Axes) -> str:
    """The number of points beyond the axis, in words."""
    hollow = [
        len(TIPS[line]) for line in axes.lines if line in TIPS and line.get_markerfacecolor() == PAPER
    ]
    count = sum(hollow)
    if not count:
        return ""
    every = sum(len(TIPS[line]) for line in axes.lines if line in TIPS)
    verb = "lie"
    if count == 1:
        verb = "lies"
    return f"{plural(count, 'point')} of {every} {verb} above (hollow, on the edge)."


def damage(ratio: Any) -> Any:
    """Map a multiple of the base's perplexity to its distance on the colour scale.

    The square root of the logarithm: +5% and +10% differ as plainly as twice and three times the base. Values better
    than the base have its colour.

    Args:
        ratio: a number or an array of them.
    """
    with np.errstate(divide="ignore"):
        return np.sqrt(np.maximum(0.0, np.log(ratio)))


def colours() -> Colormap:
    """From dark for little to bright for much, and a paler one beyond."""
    return matplotlib.colormaps[_MAP_COLOURS].with_extremes(
        bad=(0, 0, 0, 0), over=BEYOND, under="#2a0134"
    )


def name_of(value: Any) -> str:
    """Name a row or a column."""
    if isinstance(value, str):
        return value
    return f"{value:g}"


@dataclass(frozen=True)
class Legend:
    """The colours of maps.

    Attributes:
        base: the perplexity whose multiples are named; None for values as they are.
        capped: some value lies beyond the scale.
    """

    scale: Normalize
    title: str
    base: float | None = None
    capped: bool = False

    def bar(self, figure: Figure, **place: Any) -> Any:
        extend = "neither"
        if self.capped:
            extend = "max"
        bar = figure.colorbar(ScalarMappable(self.scale, colours()), extend=extend, **place)
        low = float(self.scale.vmin or 0.0)
        high = float(self.scale.vmax or 1.0)
        bar.minorticks_off()
        if self.base is None:
            ticks = list(np.linspace(low, high, 5))
            names = [f"{value:.3g}" for value in ticks]
        else:
            ratios = [ratio for ratio in _TICKS if self.base * ratio <= high * (1 + 1e-9)]
            if not ratios or self.scale(self.base * ratios[-1]) < 0.85:
                ratios.append(high / self.base)
            ticks = [self.base, *(self.base * ratio for ratio in ratios)]
            names = [
                "base",
                *(allowance(ratio) if ratio < 2 else f"{TIMES}{ratio:.3g}" for ratio in ratios),
            ]
        bar.set_ticks(ticks, labels=names)
        bar.outline.set_visible(False)
        return bar

    def beside(self, figure: Figure, panels: Sequence[Axes]) -> None:
        bar = self.bar(figure, ax=panels, shrink=0.85, pad=0.02)
        bar.ax.tick_params(labelsize=9)
        beyond = ""
        if self.capped and self.base is not None:
            beyond = f"; pale: beyond {float(self.scale.vmax or 1.0) / self.base:.3g} times the base"
        elif self.capped:
            beyond = "; pale: beyond"
        bar.set_label(textwrap.fill(f"{self.title}{beyond}", 48), fontsize=9)

    @cached_property
    def figure(self) -> Figure:
        figure, axes = panel(480, 32, 14, 20, 66, 0)
        bar = self.bar(figure, cax=axes, orientation="horizontal", extendfrac=0.06, extendrect=True)
        bar.solids.set_rasterized(True)
        axes.tick_params(labelsize=11, labelcolor=SOFT, color=SOFT)
        if self.capped:
            axes.text(1.06, -0.62, "beyond", transform=axes.transAxes, fontsize=11, color=SOFT, va="top")
        return figure


def damage_legend(title: str, perplexities: pd.Series[float], base: float) -> Legend:
    """The colours of these maps, from the base perplexity up.

    Colours end at the worst cell, at the latest at `CAP` times the base; sooner where nearly all cells are far better.
    """
    cells = perplexities.dropna()
    worst = base
    if len(cells):
        worst = float(cells.max())
    if worst > base * CAP:
        worst = base * (float(cells.quantile(MOST, interpolation="lower")) / base) ** _ROOM
    end = min(base * CAP, max(base * LEAST_CAP, worst))
    functions = (lambda value: damage(value / base), lambda place: base * np.exp(np.square(place)))
    return Legend(FuncNorm(functions, base, end), title, base, bool((cells > end).any()))


@dataclass(frozen=True)
class Map:
    """A heatmap of cells that can be read one by one.

    Attributes:
        table: a row for each cell.
        down, across: its columns that name the row and the column of a cell; of stretches "first" and "last".
        fields: its columns that are said of a cell, and their labels; the first is drawn. Intervals are found by `_low`
            and `_high`, beside them `tokens` and a `note`.
        columns: of the map, in their order; by default those that there are.
        limit: a line fences in the cells up to this value.
        flat: width of a map with few, named rows: `WIDE` or `HALF`.
    """

    title: str
    table: pd.DataFrame
    down: str
    across: str
    fields: Mapping[str, str]
    legend: Legend
    caption: str = ""
    name: str = ""
    columns: Sequence[Any] | None = None
    limit: float = math.nan
    flat: float = 0.0

    @cached_property
    def values(self) -> pd.DataFrame:
        """By row (index) and column; NaN where there is no cell."""
        table = self.table.drop_duplicates([self.down, self.across])
        values = table.pivot(index=self.down, columns=self.across, values=next(iter(self.fields)))
        rows = _places(table[self.down])
        columns = self.columns or _places(table[self.across])
        return values.reindex(index=rows, columns=list(columns))

    @property
    def words(self) -> str:
        return self.caption

    @property
    def described(self) -> str:
        """The text for screen readers."""
        name, label = next(iter(self.fields.items()))
        ends = [number(float(end)) for end in (self.table[name].min(), self.table[name].max())]
        return f"{self.title}: {label} of {plural(len(self.table), 'cell')}, {' to '.join(ends)}"

    @property
    def many(self) -> bool:
        return len(self.values) > MANY_LAYERS

    @property
    def inside(self) -> tuple[float, float]:
        down, across = self.values.shape
        if self.flat:
            return self.flat - self.left, _MAP_ROW * down
        cell = _MAP_SIDE / max(down, across)
        return cell * across, cell * down

    @property
    def left(self) -> float:
        if not self.flat:
            return _MAP_LEFT
        return min(14.0 + 6.2 * max(len(name_of(name)) for name in self.values.index), self.flat / 2)

    @property
    def size(self) -> tuple[float, float]:
        width, height = self.inside
        return self.left + width + _MAP_RIGHT, _MAP_TOP + height + _MAP_BOTTOM

    @property
    def titles(self) -> tuple[str, str]:
        """Titles of the rows, which a flat map has not, and of the columns."""
        down, across = (_STRETCH.get(name, name) for name in (self.down, self.across))
        return ("" if self.flat else down), across

    def draw(self, axes: Axes) -> None:
        cells = self.values.to_numpy(dtype=np.float64)
        # Infinity would be left blank like a cell that does not exist.
        shown = np.ma.masked_invalid(
            np.where(np.isposinf(cells), 1e6 * (self.legend.scale.vmax or 1.0), cells)
        )
        aspect: Any = "equal"
        rows = 16
        if self.flat:
            aspect = "auto"
            rows = len(self.values)
        axes.set_facecolor(NO_CELL)
        axes.imshow(shown, cmap=colours(), norm=self.legend.scale, interpolation="none", aspect=aspect)
        is_measured = ~np.isnan(cells)
        within = cells <= self.limit
        below = is_measured[:-1] & is_measured[1:] & (within[:-1] != within[1:])
        beside = is_measured[:, :-1] & is_measured[:, 1:] & (within[:, :-1] != within[:, 1:])
        edges = [
            [(column - 0.5, row + 0.5), (column + 0.5, row + 0.5)] for row, column in np.argwhere(below)
        ]
        edges += [
            [(column + 0.5, row - 0.5), (column + 0.5, row + 0.5)] for row, column in np.argwhere(beside)
        ]
        if edges:
            for colour, width in (("#00000090", 2.2), ("#fefefe", 1.1)):
                axes.add_collection(
                    LineCollection(edges, colors=colour, lw=width, capstyle="projecting"), autolim=False
                )
        across = int(self.inside[0] / 24)
        for axis, names, room in (
            (axes.xaxis, self.values.columns, across),
            (axes.yaxis, self.values.index, rows),
        ):
            step = 1
            while len(names) / step > room:
                step *= 2
            axis.set_ticks(range(0, len(names), step), labels=[name_of(name) for name in names[::step]])
        axes.tick_params(labelsize=11, length=0, labelcolor=SOFT)
        axes.spines[:].set_visible(False)
        down, beside = self.titles
        axes.set_xlabel(beside, fontsize=11, color=INK)
        axes.set_ylabel(down, fontsize=11, color=INK)

    @cached_property
    def figure(self) -> Figure:
        figure, axes = panel(*self.size, self.left, _MAP_BOTTOM, _MAP_RIGHT, _MAP_TOP)
        self.draw(axes)
        return figure

    @property
    def numbers(self) -> dict[str, Any]:
        """All values as a folded table of the page."""
        rows = [
            [name_of(name), *("" if math.isnan(value) else number(value) for value in row)]
            for name, row in zip(self.values.index, self.values.to_numpy(dtype=np.float64), strict=True)
        ]
        corner = " \\ ".join(filter(None, self.titles))
        head = [corner, *map(name_of, self.values.columns)]
        label = next(iter(self.fields.values()))
        looks = {"left": (), "marked": (), "note": "", "folded": True, "printed": False}
        return looks | {"caption": f"{self.title}: {label}", "head": head, "rows": rows}

    @property
    def cells(self) -> dict[str, Any]:
        """The cells for the page's script, as JSON values."""
        table = self.table
        values = self.values
        down = values.index.get_indexer(pd.Index(table[self.down]))
        across = values.columns.get_indexer(pd.Index(table[self.across]))
        fields = []
        for name, label in self.fields.items():
            ends = {end: f"{name}_{end}" for end in ("low", "high") if f"{name}_{end}" in table}
            shown = {"values": name, **(ends if len(ends) == 2 else {})}
            numbers = {
                key: [_short_number(one) for one in table[column]] for key, column in shown.items()
            }
            fields.append({"label": label} | numbers)
        cells: dict[str, Any] = {
            "rows": [name_of(name) for name in values.index],
            "columns": [name_of(name) for name in values.columns],
            "at": (down * len(values.columns) + across).tolist(),
            "fields": fields,
        }
        if self.across in _STRETCH:
            cells |= {"title": "layers {row} to {column}", "one": "layer {row}"}
        else:
            row, column = self.titles
            cells["title"] = f"{row} {{row}}, {column} {{column}}".strip()
        if self.legend.base is not None:
            cells["base"] = _short_number(self.legend.base)
        if "note" in table:
            cells["notes"] = table["note"].tolist()
        if "tokens" in table:
            tokens = [int(value) for value in table["tokens"].fillna(0)]
            cells["tokens"] = tokens[0] if len(set(tokens)) == 1 else tokens
        return cells


def _places(names: pd.Series[Any]) -> list[Any]:
    """The rows or columns of a map: words as they come, numbers in order, and layers of stretches evenly spaced."""
    found = list(dict.fromkeys(names))
    if isinstance(found[0], str):
        return found
    found.sort()
    if names.name not in _STRETCH:
        return found
    step = math.gcd(*(b - a for a, b in pairwise(found))) or 1
    return list(range(found[0], found[-1] + 1, step))


def _short_number(value: float) -> float | str | None:
    """Four digits; infinity as a sign and NaN as null, since JSON has neither."""
    if math.isnan(value):
        return None
    if math.isinf(value):
        return "∞"
    rounded = float(f"{value:.4g}")
    if rounded.is_integer():
        return int(rounded)
    return rounded
