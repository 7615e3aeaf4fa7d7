"""The numbers behind a map: for the page's script, and as a table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from surgeon.reports.blocks import Table
from surgeon.reports.svg import Grid
from surgeon.words import number

CellPosition = tuple[int, int]


def map_cells(
    grid: Grid,
    places: Sequence[CellPosition],
    table: pd.DataFrame,
    fields: Mapping[str, str],
    title: str,
    one: str = "",
    base: float | None = None,
) -> dict[str, Any]:
    """What the page's script shows of each cell, as JSON values.

    Args:
        places: of each row of the table, numbers of the grid's row and column.
        fields: columns to show, and what they are called; their intervals are found by `_low` and `_high`.
        title: of a cell, with {row} and {column}; `one` where the two are the same.
        base: what the first field is compared with.
    """
    cells: dict[str, Any] = {
        "rows": list(grid.rows),
        "columns": list(grid.columns),
        "at": [int(row * len(grid.columns) + column) for row, column in places],
        "fields": [_field(table, name, label) for name, label in fields.items()],
        "title": title,
    }
    if one:
        cells["one"] = one
    if base is not None:
        cells["base"] = short_number(base)
    if "tokens" in table:
        tokens = [int(value) for value in table["tokens"].fillna(0)]
        cells["tokens"] = tokens[0] if len(set(tokens)) == 1 else tokens
    return cells


def _field(table: pd.DataFrame, name: str, label: str) -> dict[str, Any]:
    ends = {end: f"{name}_{end}" for end in ("low", "high") if f"{name}_{end}" in table}
    columns = {"values": name, **(ends if len(ends) == 2 else {})}
    return {"label": label} | {key: [short_number(v) for v in table[column]] for key, column in columns.items()}


def short_number(value: float, digits: int = 4) -> float | str | None:
    """Four digits; infinity as a sign and NaN as null, since JSON has neither."""
    if math.isnan(value):
        return None
    if math.isinf(value):
        return "∞"
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() else rounded


def cell_table(caption: str, corner: str, grid: Grid) -> Table:
    """The values of a grid, for readers without a pointer."""
    rows = []
    for place, name in enumerate(grid.rows):
        values = (grid.values.get((place, column), math.nan) for column in range(len(grid.columns)))
        rows.append([name, *("" if math.isnan(value) else number(value) for value in values)])
    return Table(caption, [corner, *grid.columns], rows, folded=True, printed=False)
