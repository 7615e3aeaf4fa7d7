"""Maps as the page has them, their legends, and the numbers behind them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from surgeon.findings.blocks import Table
from surgeon.findings.drawing import INK, SOFT, panel
from surgeon.findings.maps import colour_bar, draw_map, label_map, name_of
from surgeon.words import TIMES, allowance, number

MANY_LAYERS = 48  # beyond, a map needs more room on the page
WIDE, HALF = 800.0, 520.0  # of flat maps of the page, alone and side by side, in points
_SIDE, _LEFT, _BOTTOM, _TOP, _RIGHT = 320.0, 34.0, 34.0, 6.0, 8.0  # of a square map
_ROW = 22.0  # of a flat one
_TICKS = (1.05, 1.10, 1.25, 1.5, 2.0, 3.0)  # of a base perplexity


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
    longest = max(len(name_of(name)) for name in values.index)
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
        axes.text(1.06, -0.62, "beyond", transform=axes.transAxes, fontsize=11, color=SOFT, va="top")
    return figure


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
    """What the page's script shows of each cell, as JSON values.

    Args:
        down, across: of each row of the table, in which row and column of the map it is.
        fields: columns to show, and what they are called; their intervals are found by `_low` and `_high`.
        title: of a cell, with {row} and {column}; `one` where the two are the same.
        base: what the first field is compared with.
    """
    rows, columns = ({name: place for place, name in enumerate(axis)} for axis in (values.index, values.columns))
    cells: dict[str, Any] = {
        "rows": [name_of(name) for name in values.index],
        "columns": [name_of(name) for name in values.columns],
        "at": [rows[row] * len(columns) + columns[column] for row, column in zip(down, across, strict=True)],
        "fields": [],
        "title": title,
    }
    for name, label in fields.items():
        ends = {end: f"{name}_{end}" for end in ("low", "high") if f"{name}_{end}" in table}
        shown = {"values": name, **(ends if len(ends) == 2 else {})}
        numbers = {key: [_short_number(value) for value in table[column]] for key, column in shown.items()}
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
    return int(rounded) if rounded.is_integer() else rounded


def cell_table(caption: str, corner: str, values: pd.DataFrame) -> Table:
    """The values of a map, for readers without a pointer."""
    rows = [
        [name_of(name), *("" if math.isnan(value) else number(value) for value in row)]
        for name, row in zip(values.index, values.to_numpy(dtype=np.float64), strict=True)
    ]
    return Table(caption, [corner, *map(name_of, values.columns)], rows, folded=True, printed=False)
