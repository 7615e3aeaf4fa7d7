"""The charts of a scan: single layers, depths, and figure 7 of the Layer Parallelism paper; and its tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from surgeon.language.operations.declare import HEATMAPS
from surgeon.reports.blocks import Block, Chart, Gallery, Table
from surgeon.reports.chart import STYLES, Axis, Point, Series, draw_chart, layer_axis, log_axis
from surgeon.reports.heatmap import title_of
from surgeon.reports.scale import CAP, LEAST_CAP
from surgeon.reports.svg import TOLERANCES
from surgeon.reports.tolerance import (
    PAIRS,
    ScanTable,
    best_by_depth,
    group_size,
    longest_within,
    single_layers,
)
from surgeon.words import allowance, change, interval, number, plural, stretch

_MOST_POINTS = 0.8  # of the points of a chart lie well inside it


def charts(scan: ScanTable) -> list[Block]:
    """All charts that the scanned operations allow."""
    best = {name: cells for name in scan.operations if len(cells := best_by_depth(scan, name))}
    one = _removing_one(scan)
    side_by_side = ([one] if one else []) + ([_by_depth(scan, best)] if best else [])
    blocks: list[Block] = [Gallery(side_by_side)] if side_by_side else []
    if best:
        blocks.append(_depth_table(scan, best))
    drawn = sorted((name for name, heatmap in HEATMAPS.items() if heatmap.curves), key=lambda name: name != PAIRS)
    curves = [_by_end(scan, name) for name in drawn if len(scan.of_operation(name))]
    if curves:
        caption = (
            "One line for each length of the stretch (eight of them where there are more), by where it ends: figure 7 "
            "of the Layer Parallelism paper. Dashed: the unedited model."
        )
        blocks.append(Gallery(curves, caption))
    return blocks


def _style(operation: str) -> int:
    """Each operation looks the same in all charts."""
    return HEATMAPS[operation].style if operation in HEATMAPS else 0


def quality(cell: Any) -> str:
    """Perplexity and divergence of a cell, with their intervals."""
    parts = []
    for name in ("perplexity", "divergence"):
        known = interval(cell.get(f"{name}_low"), cell.get(f"{name}_high"))
        parts.append(f"{name} {number(cell[name])}{f' (95%: {known})' if known else ''}")
    return ", ".join(parts)


def _tip(cell: pd.Series[Any]) -> str:
    where = stretch(int(cell["first"]), int(cell["last"]))
    return f"{where}: {change(cell['ratio'])}, {quality(cell)}"


def _points(cells: pd.DataFrame, x: str, y: str) -> list[Point]:
    return [Point(float(cell[x]), float(cell[y]), _tip(cell)) for _, cell in cells.iterrows()]


def _perplexity_axis(scan: ScanTable, values: Sequence[float]) -> Axis:
    """Reaches beyond most of the points; the few that are far off would press the others together."""
    typical = float(np.quantile([value / scan.base for value in values], _MOST_POINTS, method="lower"))
    end = min(CAP, max(LEAST_CAP, 1 + 2.5 * (typical - 1)))
    return log_axis([scan.base, *values], "perplexity", end=scan.base * end)


def _above(values: Sequence[float], axis: Axis) -> str:
    """What a caption says of points that are drawn on the upper edge."""
    count = sum(value > axis.high for value in values)
    if not count:
        return ""
    return f" {plural(count, 'point')} of {len(values)} lie{'s' if count == 1 else ''} above (hollow, on the edge)."


def _removing_one(scan: ScanTable) -> Chart | None:
    series = []
    removing = [name for name, heatmap in HEATMAPS.items() if heatmap.removes]
    for place, operation in enumerate(removing):
        cells = single_layers(scan, operation).sort_values("first")
        ends = [cells.get(f"divergence_{end}", pd.Series(math.nan, cells.index)) for end in ("low", "high")]
        rows = zip(_points(cells, "first", "divergence"), *ends, strict=True)
        aside = (place - (len(removing) - 1) / 2) * 0.18  # so that bars do not hide each other
        points = [Point(point.x + aside, point.y, point.tip, low, high) for point, low, high in rows]
        if points:
            series.append(Series(title_of(operation), points, _style(operation), line=False))
    if not series:
        return None
    values = [value for one in series for point in one.points for value in (point.y, point.low, point.high)]
    layers = [point.x for one in series for point in one.points]
    y = log_axis([value for value in values if not math.isnan(value)], "divergence (nats per token)")
    title = "Removing one layer"
    bars = " Bars: 95% intervals." if any(math.isfinite(p.low) for one in series for p in one.points) else ""
    caption = f"How far the predictions move with one layer, or a part of it, left out.{bars}"
    svg = draw_chart(series, layer_axis(round(min(layers)), round(max(layers))), y, title)
    return Chart(svg, title, caption, [one.key() for one in series])


def _by_depth(scan: ScanTable, best: dict[str, pd.DataFrame]) -> Chart:
    series = [
        Series(title_of(name), _points(cells, "depth", "perplexity"), _style(name)) for name, cells in best.items()
    ]
    values = [point.y for one in series for point in one.points]
    depths = [point.x for one in series for point in one.points]
    y = _perplexity_axis(scan, values)
    x = layer_axis(math.floor(min(depths)), scan.num_layers, "effective depth (layers one after the other)")
    title = "The best stretch for every depth"
    caption = (
        f"The least perplexity that each kind of change has at a depth. Dashed: the unedited model.{_above(values, y)}"
    )
    svg = draw_chart(series, x, y, title, rule=scan.base)
    return Chart(svg, title, caption, [one.key() for one in series])


def _depth_table(scan: ScanTable, best: dict[str, pd.DataFrame]) -> Table:
    text = {
        (name, float(cell["depth"])): f"{number(cell['perplexity'])} ({int(cell['first'])} to {int(cell['last'])})"
        for name, cells in best.items()
        for _, cell in cells.iterrows()
    }
    depths = sorted({depth for _, depth in text}, reverse=True)
    rows = [[f"{depth:g}", *(text.get((name, depth), "") for name in best)] for depth in depths]
    caption = f"Perplexity at every depth (unedited: {number(scan.base)} at {scan.num_layers}), and the stretch"
    return Table(caption, ["depth", *map(title_of, best)], rows, folded=True)


def _by_end(scan: ScanTable, operation: str) -> Chart:
    cells = scan.of_operation(operation)
    lengths = sorted(int(length) for length in cells["changed"].unique())
    if len(lengths) > STYLES:
        lengths = [lengths[place] for place in np.linspace(0, len(lengths) - 1, STYLES).round().astype(int)]
    series = []
    for place, length in enumerate(lengths):
        points = _points(cells[cells["changed"] == length].sort_values("last"), "last", "perplexity")
        groups = f" ({plural(length // 2, 'pair')})" if group_size(operation) == 2 else ""
        style = round(place * (STYLES - 1) / max(1, len(lengths) - 1))
        series.append(Series(plural(length, "layer") + groups, points, style, ordered=True))
    values = [point.y for one in series for point in one.points]
    ends = [point.x for one in series for point in one.points]
    y = _perplexity_axis(scan, values)
    title = f"{title_of(operation)}: where the stretch ends"
    x = layer_axis(int(min(ends)), int(max(ends)), "last layer of the stretch")
    svg = draw_chart(series, x, y, title, rule=scan.base)
    return Chart(svg, title, _above(values, y).strip(), [one.key() for one in series])


def reach_table(scan: ScanTable) -> Table:
    """How far each operation goes within each tolerance."""
    rows = []
    for operation in scan.operations:
        cells = (longest_within(scan, operation, tolerance) for tolerance in TOLERANCES)
        rows.append(
            [title_of(operation), *("none" if cell is None else _reach(scan, operation, cell) for cell in cells)]
        )
    head = ["change", *(f"within {allowance(tolerance)}" for tolerance in TOLERANCES)]
    note = (
        "The stretch with the most changed layers whose perplexity stays within this much of the unedited model's "
        f"{number(scan.base)}; in brackets its perplexity and the effective depth, of {scan.num_layers} layers."
    )
    return Table("How far each change goes", head, rows, note, left=frozenset(range(len(head))))


def _reach(scan: ScanTable, operation: str, cell: pd.Series[Any]) -> str:
    depth = scan.depth(operation, int(cell["changed"]))
    ends = f", depth {depth:g}" if depth is not None else ""
    return f"{stretch(int(cell['first']), int(cell['last']))} ({number(cell['perplexity'])}{ends})"
