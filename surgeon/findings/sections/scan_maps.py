"""The maps of a scan: a heatmap for each operation, and what each layer tolerates."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pandas as pd
from matplotlib.colors import Normalize

from surgeon.findings.blocks import Gallery, Legend, Map, Table
from surgeon.findings.maps import MARKED
from surgeon.findings.page_maps import HALF, MANY_LAYERS, WIDE, cell_table, legend_figure, map_cells, map_figure
from surgeon.findings.scan import Scan, grid, named_across, scale_of, title_of, varied_by
from surgeon.findings.tolerance import ScanTable, changed_layers, cheapest_with, group_size, shown_stretch
from surgeon.language.operations.declare import HEATMAPS
from surgeon.words import allowance, change, number, stretch

_ORDERS_SHOWN = 12  # layers of a random order, before it is cut short
_FIELDS = {"perplexity": "perplexity", "divergence": "divergence"}


def _cells_of_maps(table: pd.DataFrame, over_stretches: bool) -> dict[str, pd.DataFrame]:
    """The cells of each operation's map, each once; of maps over stretches or of the others."""
    names = (name for name in dict.fromkeys(table["operation"]) if (varied_by(name) is None) == over_stretches)
    return {
        name: table[table["operation"] == name].drop_duplicates(["first", varied_by(name) or "last"]) for name in names
    }


def _scale(maps: dict[str, pd.DataFrame], base: float) -> tuple[Normalize, Legend]:
    """Of a scan's maps over stretches, here as in `heatmaps.png`, or of the others; with its legend."""
    scale, capped = scale_of([cells[["perplexity"]] for cells in maps.values()], base)
    title = f"Colours: perplexity over that of the unedited model, {number(base)}"
    return scale, Legend(legend_figure(scale, base, capped), title)


def heatmaps(found: Scan, scan: ScanTable) -> Iterator[Gallery]:
    """One map for every operation of a scan: those over stretches on one scale, then the others on another one.

    Args:
        scan: its cells.
    """
    table, orders = found.cells, found.permutations
    colours = (
        f"Colour: perplexity over that of the unedited model, {number(scan.base)}. The line fences in the cells within "
        f"{allowance(MARKED)}."
    )
    if maps := _cells_of_maps(table, over_stretches=True):
        scale, legend = _scale(maps, scan.base)
        drawn = [_heatmap(operation, cells, scan, scale, orders) for operation, cells in maps.items()]
        many = max(len(item.cells["rows"]) for item in drawn) > MANY_LAYERS
        axes = "First layer of the stretch down, last layer across; the diagonal is single layers."
        shared = " These maps share one scale, that of heatmaps.png." if len(maps) > 1 else ""
        yield Gallery(drawn, f"{axes} {colours}{shared}", legend, many=many)
    if maps := _cells_of_maps(table, over_stretches=False):
        scale, legend = _scale(maps, scan.base)
        drawn = [_map_of_values(name, cells, found, scan, scale) for name, cells in maps.items()]
        yield Gallery(drawn, f"Each layer alone, with every value of a parameter. {colours}", legend, wide=True)


def _heatmap(operation: str, cells: pd.DataFrame, scan: ScanTable, scale: Normalize, orders: pd.DataFrame) -> Map:
    values = grid(cells)
    title = title_of(operation)
    extent = [number(float(getattr(cells["perplexity"], end)())) for end in ("min", "max")]
    data = map_cells(
        values, cells["first"], cells["last"], cells, _FIELDS, "layers {row} to {column}", "layer {row}", scan.base
    )
    if scan.steps_per_layer:
        spans = zip(cells["first"], cells["last"], strict=True)
        lengths = {changed_layers(operation, first, last) for first, last in spans} - {0}
        data |= {"programs": _programs(operation, lengths, scan.steps_per_layer), "group": group_size(operation)}
    if _is_random(operation) and len(orders):
        data["notes"] = _orders(cells, orders[orders["operation"] == operation])
    return Map(
        map_figure(values, scale, ("last layer", "first layer"), scan.base * MARKED),
        title,
        "",
        data,
        cell_table(f"{title}: perplexity of every stretch", "first \\ last", values),
        described=f"{title}: {len(cells)} stretches, perplexity {' to '.join(extent)}",
    )


def _map_of_values(operation: str, cells: pd.DataFrame, found: Scan, scan: ScanTable, scale: Normalize) -> Map:
    """Single layers down, the values of a parameter across."""
    varied, across = str(varied_by(operation)), str(named_across(operation))
    values = grid(cells, varied).reindex(sorted(set(cells["first"])))
    values.index = pd.Index([f"layer {row}" for row in values.index])
    rows, columns = values.shape
    title = title_of(operation)
    down = [f"layer {layer}" for layer in cells["first"]]
    data = map_cells(values, down, cells[varied], cells, _FIELDS, f"{{row}}, {across} {{column}}", base=scan.base)
    if operation == "experts" and len(found.experts):
        data["notes"] = _loads(cells, found)
    drawn = map_figure(values, scale, (across, ""), scan.base * MARKED, flat=HALF)
    table = cell_table(f"{title}: perplexity of every layer with every value of {across}", f"layer \\ {across}", values)
    described = f"{title}: perplexity of {rows} layers, each alone with {columns} values of {across}"
    return Map(drawn, title, "", data, table, described=described, wide=True)


def _loads(cells: pd.DataFrame, found: Scan) -> list[str]:
    """What each expert gets, and who gets most of its layer where it is left out."""
    load = found.experts.set_index(["layer", "expert"])["load"]
    rest = found.loads.sort_values("load").drop_duplicates(["layer", "without"], keep="last")
    most = rest.set_index(["layer", "without"])
    notes = []
    for place in zip(cells["first"], cells["drop"].astype(int), strict=True):
        heir = most.loc[place]
        notes.append(f"gets {load[place]:.0%} of tokens; without it expert {heir['expert']:g} gets {heir['load']:.0%}")
    return notes


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


def ribbon(scan: ScanTable, table: pd.DataFrame) -> Map:
    """For every operation and layer, the cheapest measured change that includes the layer.

    Args:
        table: all of `cells.csv`, whose maps have the same scale.
    """
    scale, legend = _scale(_cells_of_maps(table, over_stretches=True), scan.base)
    found = {title_of(operation): cheapest_with(scan, operation) for operation in scan.operations}
    rows = {name: cells.set_index("layer")["perplexity"] for name, cells in found.items()}
    values = pd.DataFrame(rows).reindex(range(scan.num_layers)).T
    cells = pd.concat(found.values(), ignore_index=True)
    down = [name for name, own in found.items() for _ in range(len(own))]
    data = map_cells(values, down, cells["layer"], cells, _FIELDS, "{row}, layer {column}", base=scan.base)
    data["notes"] = [
        f"cheapest with it: {stretch(int(f), int(e))}" for f, e in zip(cells["first"], cells["last"], strict=True)
    ]
    title = "What each layer tolerates"
    caption = (
        "The cheapest measured change of each kind that includes the layer. Bright columns are layers that no change "
        "spares: leave them alone."
    )
    ratios = (values / scan.base).iterrows()
    body = [[str(name), *("" if math.isnan(r) else change(r) for r in row)] for name, row in ratios]
    against = Table(
        f"{title}: perplexity against the base", ["", *map(str, values.columns)], body, folded=True, printed=False
    )
    return Map(map_figure(values, scale, ("layer", ""), flat=WIDE), title, caption, data, against, legend, wide=True)
