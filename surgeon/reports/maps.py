"""Maps of cells: values in colours by row and column, their scale, and the numbers behind them for the page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import Colormap, FuncNorm, Normalize
from matplotlib.figure import Figure

from surgeon.reports.blocks import Table
from surgeon.reports.drawing import INK, NO_CELL, SOFT, panel
from surgeon.reports.scale import BEYOND, COLOURS, damage, ratio_of
from surgeon.words import TIMES, allowance, number

MARKED = 1.10  # times the base perplexity: cells up to here are fenced in
MANY_LAYERS = 48  # beyond, a map needs more room on the page
WIDE, HALF = 800.0, 520.0  # of flat maps of the page, alone and side by side, in points
_SIDE, _LEFT, _BOTTOM, _TOP, _RIGHT = 320.0, 34.0, 34.0, 6.0, 8.0  # of a square map
_ROW = 22.0  # of a flat one
_TICKS = (1.05, 1.10, 1.25, 1.5, 2.0, 3.0)  # of a base perplexity


def colours() -> Colormap:
    """From dark for little to bright for much, and a paler one beyond; where there is no cell the axes are seen."""
    return matplotlib.colormaps[COLOURS].with_extremes(bad=(0, 0, 0, 0), over=BEYOND, under="#2a0134")


def damage_scale(base: float, end: float) -> Normalize:
    """From the base perplexity to `end`, by `surgeon.reports.scale.damage`; better cells have the base's colour."""
    return FuncNorm((lambda value: damage(value / base), lambda place: base * ratio_of(place)), base, end)


def draw_map(
    axes: Axes, values: pd.DataFrame, scale: Normalize, limit: float = math.nan, aspect: Any = "equal"
) -> None:
    """Values by index (down) and columns (across); NaN where there is no cell, infinity beyond the scale.

    Args:
        limit: a line fences in the cells up to this value.
    """
    cells = values.to_numpy(dtype=np.float64)
    # Infinity would be left blank like a cell that does not exist.
    shown = np.ma.masked_invalid(np.where(np.isposinf(cells), 1e6 * (scale.vmax or 1.0), cells))
    axes.set_facecolor(NO_CELL)
    axes.imshow(shown, cmap=colours(), norm=scale, interpolation="none", aspect=aspect)
    known, within = ~np.isnan(cells), cells <= limit
    below = known[:-1] & known[1:] & (within[:-1] != within[1:])
    beside = known[:, :-1] & known[:, 1:] & (within[:, :-1] != within[:, 1:])
    edges = [[(column - 0.5, row + 0.5), (column + 0.5, row + 0.5)] for row, column in np.argwhere(below)]
    edges += [[(column + 0.5, row - 0.5), (column + 0.5, row + 0.5)] for row, column in np.argwhere(beside)]
    if edges:
        for colour, width in (("#00000090", 2.2), ("#fefefe", 1.1)):
            axes.add_collection(LineCollection(edges, colors=colour, lw=width, capstyle="projecting"), autolim=False)


def label_map(axes: Axes, values: pd.DataFrame, across: int, down: int, size: float) -> None:
    """Names of rows and columns, as many as there is room for."""
    for axis, names, room in ((axes.xaxis, values.columns, across), (axes.yaxis, values.index, down)):
        step = 1
        while len(names) / step > room:
            step *= 2
        axis.set_ticks(range(0, len(names), step), labels=[_name(name) for name in names[::step]])
    axes.tick_params(labelsize=size, length=2)


def _name(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def map_figure(
    values: pd.DataFrame,
    scale: Normalize,
    titles: tuple[str, str],
    limit: float = math.nan,
    flat: float = 0.0,
) -> Figure:
    """A map of the page.

    Args:
        titles: of the columns and of the rows.
        flat: for few rows with names: how wide it is, with cells that are wider than high; `WIDE` or `HALF`.
    """
    down, across = values.shape
    longest = max(len(_name(name)) for name in values.index)
    left = min(14.0 + 6.2 * longest, flat / 2) if flat else _LEFT
    cell = _SIDE / max(down, across)
    width, height = (flat - left, _ROW * down) if flat else (cell * across, cell * down)
    figure, axes = panel(left + width + _RIGHT, _TOP + height + _BOTTOM, left, _BOTTOM, _RIGHT, _TOP)
    draw_map(axes, values, scale, limit, aspect="auto")
    label_map(axes, values, int(width / 24), len(values) if flat else 16, 11)
    axes.tick_params(length=0, labelcolor=SOFT)
    axes.spines[:].set_visible(False)
    axes.set_xlabel(titles[0], fontsize=11, color=INK)
    axes.set_ylabel(titles[1], fontsize=11, color=INK)
    return figure


def colour_bar(
    figure: Figure, axes: Sequence[Axes] | None, scale: Normalize, above: bool, below: bool = False, **place: Any
) -> Any:
    """The legend of a map, beside axes or filling its own, with the colours of values above and below its ends."""
    extend = {(False, False): "neither", (True, False): "min", (False, True): "max", (True, True): "both"}[below, above]
    bar = figure.colorbar(ScalarMappable(scale, colours()), ax=axes, extend=extend, **place)
    bar.ax.tick_params(labelsize=8)
    return bar


def legend_figure(scale: Normalize, base: float | None = None, capped: bool = False) -> Figure:
    """The legend of maps of the page.

    Args:
        base: the perplexity whose multiples are named; None for values as they are.
        capped: some value lies beyond the scale.
    """
    figure, axes = panel(480, 32, 14, 20, 66, 0)
    bar = colour_bar(figure, None, scale, capped, cax=axes, orientation="horizontal", extendfrac=0.06,
                     extendrect=True)  # fmt: skip
    bar.minorticks_off()
    bar.solids.set_rasterized(True)
    low, high = float(scale.vmin or 0.0), float(scale.vmax or 1.0)
    if base is None:
        ticks = list(np.linspace(low, high, 5))
        names = [f"{value:.3g}" for value in ticks]
    else:
        ratios = [ratio for ratio in _TICKS if base * ratio <= high * (1 + 1e-9)]
        if not ratios or scale(base * ratios[-1]) < 0.85:
            ratios.append(high / base)
        ticks = [base, *(base * ratio for ratio in ratios)]
        names = ["base", *(allowance(ratio) if ratio < 2 else f"{TIMES}{ratio:.3g}" for ratio in ratios)]
    bar.set_ticks(ticks, labels=names)
    bar.outline.set_visible(False)
    axes.tick_params(labelsize=11, labelcolor=SOFT, color=SOFT)
    if capped:
        axes.text(1.035, -0.62, "beyond", transform=axes.transAxes, fontsize=11, color=SOFT, va="top")
    return figure


def map_cells(
    values: pd.DataFrame,
    places: Sequence[tuple[int, int]],
    table: pd.DataFrame,
    fields: Mapping[str, str],
    title: str,
    one: str = "",
    base: float | None = None,
) -> dict[str, Any]:
    """What the page's script shows of each cell, as JSON values.

    Args:
        places: of each row of the table, numbers of the map's row and column.
        fields: columns to show, and what they are called; their intervals are found by `_low` and `_high`.
        title: of a cell, with {row} and {column}; `one` where the two are the same.
        base: what the first field is compared with.
    """
    cells: dict[str, Any] = {
        "rows": [_name(name) for name in values.index],
        "columns": [_name(name) for name in values.columns],
        "at": [int(row * values.shape[1] + column) for row, column in places],
        "fields": [_field(table, name, label) for name, label in fields.items()],
        "title": title,
    }
    if one:
        cells["one"] = one
    if base is not None:
        cells["base"] = _short_number(base)
    if "tokens" in table:
        tokens = [int(value) for value in table["tokens"].fillna(0)]
        cells["tokens"] = tokens[0] if len(set(tokens)) == 1 else tokens
    return cells


def _field(table: pd.DataFrame, name: str, label: str) -> dict[str, Any]:
    ends = {end: f"{name}_{end}" for end in ("low", "high") if f"{name}_{end}" in table}
    columns = {"values": name, **(ends if len(ends) == 2 else {})}
    return {"label": label} | {key: [_short_number(v) for v in table[column]] for key, column in columns.items()}


def _short_number(value: float) -> float | str | None:
    """Four digits; infinity as a sign and NaN as null, since JSON has neither."""
    if math.isnan(value):
        return None
    if math.isinf(value):
        return "∞"
    rounded = float(f"{value:.4g}")
    return int(rounded) if rounded.is_integer() else rounded


def cell_table(caption: str, corner: str, values: pd.DataFrame) -> Table:
    """The values of a map, for readers without a pointer."""
    rows = [
        [_name(name), *("" if math.isnan(value) else number(value) for value in row)]
        for name, row in zip(values.index, values.to_numpy(dtype=np.float64), strict=True)
    ]
    return Table(caption, [corner, *map(_name, values.columns)], rows, folded=True, printed=False)
