"""Maps of cells: values in colours by row and column, the scale of damage, its legend, and the numbers behind cells."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import Colormap, FuncNorm, Normalize
from matplotlib.figure import Figure

from surgeon.findings.drawing import INK, NO_CELL, SOFT, panel
from surgeon.findings.result import Table
from surgeon.findings.tolerance import CAP
from surgeon.words import TIMES, allowance, number

MARKED = 1.10  # times the base perplexity: cells up to here are fenced in
COLOURS = "viridis"
BEYOND = "#fff6c2"  # paler than the scale's last colour, so that a capped cell is seen to be one
LEAST_CAP = 1.1
# Share of the cells that colours tell apart, with some room, if a few cells are beyond the cap.
MOST = 0.85
_ROOM = 1.4
MANY_LAYERS = 48  # beyond, a map needs more room on the page
# Of flat maps, alone and side by side, in points.
WIDE = 800.0
HALF = 520.0
# Of a square map.
_SIDE = 320.0
_LEFT = 34.0
_BOTTOM = 34.0
_TOP = 6.0
_RIGHT = 8.0
_ROW = 22.0  # of a flat one
_TICKS = (1.05, 1.10, 1.25, 1.5, 2.0, 3.0)  # of a base perplexity


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
    return matplotlib.colormaps[COLOURS].with_extremes(bad=(0, 0, 0, 0), over=BEYOND, under="#2a0134")


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


def damage_legend(title: str, grids: Sequence[pd.DataFrame], base: float, cap: float = CAP) -> Legend:
    """The colours of these maps, from the base perplexity up.

    Colours end at the worst cell, at the latest at `cap` times the base; sooner where nearly all cells are far better.
    """
    cells = pd.Series(
        np.concatenate([values.to_numpy().ravel() for values in grids]), dtype=float
    ).dropna()
    worst = base
    if len(cells):
        worst = float(cells.max())
    if worst > base * cap:
        worst = base * (float(cells.quantile(MOST, interpolation="lower")) / base) ** _ROOM
    end = min(base * cap, max(base * LEAST_CAP, worst))
    functions = (lambda value: damage(value / base), lambda place: base * np.exp(np.square(place)))
    return Legend(FuncNorm(functions, base, end), title, base, bool((cells > end).any()))


@dataclass(frozen=True)
class Map:
    """A heatmap whose cells can be read one by one.

    Attributes:
        values: by index (down) and columns (across); NaN where there is no cell.
        titles: of the columns and of the rows.
        cells: for the page's script (`map_cells`).
        what: name of the values in their table.
        limit: a line fences in the cells up to this value.
        flat: width of a map with few, named rows: `WIDE` or `HALF`.
    """

    title: str
    values: pd.DataFrame
    scale: Normalize
    titles: tuple[str, str]
    cells: dict[str, Any]
    what: str = "values"
    caption: str = ""
    name: str = ""
    legend: Legend | None = None
    described: str = ""
    limit: float = math.nan
    flat: float = 0.0

    @property
    def words(self) -> str:
        return self.caption

    @property
    def many(self) -> bool:
        return len(self.values) > MANY_LAYERS

    @property
    def inside(self) -> tuple[float, float]:
        down, across = self.values.shape
        if self.flat:
            return self.flat - self.left, _ROW * down
        cell = _SIDE / max(down, across)
        return cell * across, cell * down

    @property
    def left(self) -> float:
        if not self.flat:
            return _LEFT
        return min(14.0 + 6.2 * max(len(name_of(name)) for name in self.values.index), self.flat / 2)

    @property
    def size(self) -> tuple[float, float]:
        width, height = self.inside
        return self.left + width + _RIGHT, _TOP + height + _BOTTOM

    def draw(self, axes: Axes) -> None:
        cells = self.values.to_numpy(dtype=np.float64)
        # Infinity would be left blank like a cell that does not exist.
        shown = np.ma.masked_invalid(np.where(np.isposinf(cells), 1e6 * (self.scale.vmax or 1.0), cells))
        aspect: Any = "equal"
        rows = 16
        if self.flat:
            aspect = "auto"
            rows = len(self.values)
        axes.set_facecolor(NO_CELL)
        axes.imshow(shown, cmap=colours(), norm=self.scale, interpolation="none", aspect=aspect)
        known = ~np.isnan(cells)
        within = cells <= self.limit
        below = known[:-1] & known[1:] & (within[:-1] != within[1:])
        beside = known[:, :-1] & known[:, 1:] & (within[:, :-1] != within[:, 1:])
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
        axes.set_xlabel(self.titles[0], fontsize=11, color=INK)
        axes.set_ylabel(self.titles[1], fontsize=11, color=INK)

    @cached_property
    def figure(self) -> Figure:
        figure, axes = panel(*self.size, self.left, _BOTTOM, _RIGHT, _TOP)
        self.draw(axes)
        return figure

    @property
    def table(self) -> Table:
        rows = [
            [name_of(name), *("" if math.isnan(value) else number(value) for value in row)]
            for name, row in zip(self.values.index, self.values.to_numpy(dtype=np.float64), strict=True)
        ]
        corner = " \\ ".join(filter(None, [self.titles[1], self.titles[0]]))
        head = [corner, *map(name_of, self.values.columns)]
        return Table(f"{self.title}: {self.what}", head, rows, folded=True, printed=False)


def map_cells(
    values: pd.DataFrame,
    down: Iterable[Any],
    across: Iterable[Any],
    table: pd.DataFrame,
    fields: Mapping[str, str],
    title: str,
    one: str = "",
    base: float | None = None,
) -> dict[str, Any]:
    """Cells for the page's script, as JSON values.

    Args:
        down, across: row and column of the map, of each row of the table.
        fields: columns and their labels; intervals are found by `_low` and `_high`.
        title: of a cell, with {row} and {column}; `one` where the two are the same.
        base: compared with the first field.
    """
    rows, columns = (
        {name: place for place, name in enumerate(axis)} for axis in (values.index, values.columns)
    )
    cells: dict[str, Any] = {
        "rows": [name_of(name) for name in values.index],
        "columns": [name_of(name) for name in values.columns],
        "at": [
            rows[row] * len(columns) + columns[column] for row, column in zip(down, across, strict=True)
        ],
        "fields": [],
        "title": title,
    }
    for name, label in fields.items():
        ends = {end: f"{name}_{end}" for end in ("low", "high") if f"{name}_{end}" in table}
        shown = {"values": name, **(ends if len(ends) == 2 else {})}
        numbers = {
            key: [_short_number(value) for value in table[column]] for key, column in shown.items()
        }
        cells["fields"].append({"label": label} | numbers)
    if one:
        cells["one"] = one
    if base is not None:
        cells["base"] = _short_number(base)
    if "tokens" in table:
        tokens = [int(value) for value in table["tokens"].fillna(0)]
        cells["tokens"] = tokens[0] if len(set(tokens)) == 1 else tokens
    return cells


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
