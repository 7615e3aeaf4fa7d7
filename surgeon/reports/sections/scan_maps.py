"""The maps of a scan: a heatmap for each operation, and what each layer tolerates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pandas as pd
from markupsafe import Markup

from surgeon.language.operations.declare import HEATMAPS
from surgeon.reports.blocks import Gallery, Map, Table
from surgeon.reports.heatmap import title_of, varied_by
from surgeon.reports.svg import HALF, MANY_LAYERS, MARKED, WIDE, ColourScale, Grid, colour_bar, draw_map
from surgeon.reports.tolerance import ScanTable, changed_layers, cheapest_with, group_size, shown_stretch
from surgeon.reports.values import cell_table, map_cells
from surgeon.words import allowance, change, number, stretch

_ORDERS_SHOWN = 12  # layers of a random order, before it is cut short
_FIELDS = {"perplexity": "perplexity", "divergence": "divergence"}


def colours_of(table: pd.DataFrame, base: float) -> ColourScale:
    """The scale that a scan's maps over stretches share, here as in `heatmaps.png`."""
    return _scale(_cells_of_maps(table, over_stretches=True), base)


def _cells_of_maps(table: pd.DataFrame, over_stretches: bool) -> dict[str, pd.DataFrame]:
    """The cells of each operation's map, each once; of maps over stretches or of the others."""
    names = (name for name in dict.fromkeys(table["operation"]) if (varied_by(name) is None) == over_stretches)
    return {
        name: table[table["operation"] == name].drop_duplicates(["first", varied_by(name) or "last"]) for name in names
    }


def _scale(maps: dict[str, pd.DataFrame], base: float) -> ColourScale:
    return ColourScale.of_perplexity([float(value) for cells in maps.values() for value in cells["perplexity"]], base)


def legend_of(scale: ColourScale) -> Markup:
    """Its legend."""
    return colour_bar(scale, f"Colours: perplexity over that of the unedited model, {number(scale.low)}")


def heatmaps(table: pd.DataFrame, scan: ScanTable, orders: pd.DataFrame | None = None) -> Iterator[Gallery]:
    """One map for every operation of a scan: those over stretches on one scale, then the others on another one.

    Args:
        table: all of `cells.csv`.
        orders: `permutations.csv`, where there is one.
    """
    colours = (
        f"Colour: perplexity over that of the unedited model, {number(scan.base)}. The line fences in the cells within "
        f"{allowance(MARKED)}."
    )
    if maps := _cells_of_maps(table, over_stretches=True):
        scale = _scale(maps, scan.base)
        drawn = [_heatmap(operation, cells, scan, scale, orders) for operation, cells in maps.items()]
        many = max(len(item.cells["rows"]) for item in drawn) > MANY_LAYERS
        axes = "First layer of the stretch down, last layer across; the diagonal is single layers."
        shared = " These maps share one scale, that of heatmaps.png." if len(maps) > 1 else ""
        yield Gallery(drawn, f"{axes} {colours}{shared}", legend_of(scale), many=many)
    if maps := _cells_of_maps(table, over_stretches=False):
        scale = _scale(maps, scan.base)
        drawn = [_map_of_values(name, cells, str(varied_by(name)), scan, scale) for name, cells in maps.items()]
        yield Gallery(
            drawn, f"Each layer alone, with every value of a parameter. {colours}", legend_of(scale), wide=True
        )


def _heatmap(
    operation: str, cells: pd.DataFrame, scan: ScanTable, scale: ColourScale, orders: pd.DataFrame | None
) -> Map:
    rows, columns = _evenly(cells["first"]), _evenly(cells["last"])
    places = [(rows.index(int(f)), columns.index(int(e))) for f, e in zip(cells["first"], cells["last"], strict=True)]
    values = dict(zip(places, (float(value) for value in cells["perplexity"]), strict=True))
    grid = Grid([str(r) for r in rows], [str(c) for c in columns], values, "first layer", "last layer")
    title = title_of(operation)
    described = (
        f"{title}: {len(cells)} stretches, perplexity {number(min(values.values()))} to {number(max(values.values()))}"
    )
    data = map_cells(grid, places, cells, _FIELDS, "layers {row} to {column}", "layer {row}", scan.base)
    if scan.steps_per_layer:
        spans = zip(cells["first"], cells["last"], strict=True)
        lengths = {changed_layers(operation, first, last) for first, last in spans} - {0}
        data |= {"programs": _programs(operation, lengths, scan.steps_per_layer), "group": group_size(operation)}
    if _is_random(operation) and orders is not None:
        data["notes"] = _orders(cells, orders[orders["operation"] == operation])
    return Map(
        draw_map(grid, scale, described, border=scan.base * MARKED),
        title,
        "",
        data,
        cell_table(f"{title}: perplexity of every stretch", "first \\ last", grid),
    )


def _map_of_values(operation: str, cells: pd.DataFrame, varied: str, scan: ScanTable, scale: ColourScale) -> Map:
    """Single layers down, the values of a parameter across."""
    rows, columns = sorted(set(cells["first"])), list(cells[varied].unique())
    places = [(rows.index(layer), columns.index(v)) for layer, v in zip(cells["first"], cells[varied], strict=True)]
    values = dict(zip(places, (float(value) for value in cells["perplexity"]), strict=True))
    grid = Grid([f"layer {row}" for row in rows], [f"{column:g}" for column in columns], values, "", varied)
    title = title_of(operation)
    described = f"{title}: perplexity of {len(rows)} layers, each alone with {len(columns)} values of {varied}"
    data = map_cells(grid, places, cells, _FIELDS, f"{{row}}, {varied} {{column}}", base=scan.base)
    drawn = draw_map(grid, scale, described, border=scan.base * MARKED, flat=HALF)
    table = cell_table(f"{title}: perplexity of every layer with every {varied}", f"layer \\ {varied}", grid)
    return Map(drawn, title, "", data, table, wide=True)


def _evenly(layers: Sequence[int] | pd.Series[Any]) -> range:
    """The layers there are, and those that are missing for them to be evenly spaced."""
    present = sorted({int(layer) for layer in layers})
    return range(present[0], present[-1] + 1, math.gcd(*(b - a for a, b in pairwise(present))) or 1)


def _programs(operation: str, lengths: set[int], steps: int) -> dict[str, str]:
    """The changed part of the program by its number of layers, written for layers from 0."""
    return {} if _is_random(operation) else {str(n): shown_stretch(operation, n, steps) for n in sorted(lengths)}


def _is_random(operation: str) -> bool:
    return operation in HEATMAPS and HEATMAPS[operation].seeded


def _orders(cells: pd.DataFrame, orders: pd.DataFrame) -> list[str]:
    """The random order of each cell, or how many it is the mean over."""
    by_stretch = orders.groupby(["first", "last"])["order"].agg(list)
    notes = []
    for span in zip(cells["first"], cells["last"], strict=True):
        here = by_stretch.get(span, [])
        layers = here[0].split() if here else []
        more = " …" if len(layers) > _ORDERS_SHOWN else ""
        single = "order: " + " ".join(layers[:_ORDERS_SHOWN]) + more
        notes.append(single if len(here) == 1 else f"mean over {len(here)} random orders")
    return notes


def ribbon(scan: ScanTable, scale: ColourScale) -> Map:
    """For every operation and layer, the cheapest measured change that includes the layer."""
    operations = scan.operations
    found = [cheapest_with(scan, operation) for operation in operations]
    layers = list(range(scan.num_layers))
    values = {
        (row, int(layer)): float(value)
        for row, cells in enumerate(found)
        for layer, value in zip(cells["layer"], cells["perplexity"], strict=True)
    }
    grid = Grid([title_of(name) for name in operations], [str(layer) for layer in layers], values, "", "layer")
    cells = pd.concat(found, ignore_index=True)
    places = list(values)
    data = map_cells(grid, places, cells, _FIELDS, "{row}, layer {column}", base=scan.base)
    data["notes"] = [
        f"cheapest with it: {stretch(int(f), int(e))}" for f, e in zip(cells["first"], cells["last"], strict=True)
    ]
    title = "What each layer tolerates"
    caption = (
        "The cheapest measured change of each kind that includes the layer. Bright columns are layers that no change "
        "spares: leave them alone."
    )
    rows = [
        [grid.rows[row], *(_ratio(values.get((row, k)), scan.base) for k in layers)] for row in range(len(operations))
    ]
    table = Table(f"{title}: perplexity against the base", ["", *grid.columns], rows, folded=True, printed=False)
    return Map(draw_map(grid, scale, title, flat=WIDE), title, caption, data, table, legend_of(scale), wide=True)


def _ratio(value: float | None, base: float) -> str:
    return "" if value is None else change(value / base)
