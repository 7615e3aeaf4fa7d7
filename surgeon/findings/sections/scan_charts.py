"""The charts of a scan: single layers, depths, and figure 7 of the Layer Parallelism paper; and its tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from surgeon.findings.blocks import Block, Gallery, Table
from surgeon.findings.drawing import ORDERED, Chart, chart, layers_across, points, rule, scale
from surgeon.findings.maps import CAP, LEAST_CAP
from surgeon.findings.scan import draw_lengths, title_of
from surgeon.findings.tolerance import (
    PAIRS,
    TOLERANCES,
    ScanTable,
    best_by_depth,
    group_size,
    longest_within,
    single_layers,
)
from surgeon.language.operations.declare import HEATMAPS
from surgeon.words import allowance, change, known, number, plural, stretch

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


def _tip(cell: pd.Series[Any]) -> str:
    where = stretch(int(cell["first"]), int(cell["last"]))
    quality = ", ".join(f"{name} {known(cell, name)}" for name in ("perplexity", "divergence"))
    return f"{where}: {change(cell['ratio'])}, {quality}"


def _end_of_axis(scan: ScanTable, values: Sequence[float]) -> float:
    """Reaches beyond most of the points; the few that are far off would press the others together."""
    typical = float(np.quantile([value / scan.base for value in values], _MOST_POINTS, method="lower"))
    return scan.base * min(CAP, max(LEAST_CAP, 1 + 2.5 * (typical - 1)))


def _above(values: Sequence[float], axes: Axes) -> str:
    """What a caption says of points that are drawn on the upper edge."""
    count = sum(value > axes.get_ylim()[1] for value in values)
    if not count:
        return ""
    return f" {plural(count, 'point')} of {len(values)} lie{'s' if count == 1 else ''} above (hollow, on the edge)."


def _removing_one(scan: ScanTable) -> Chart | None:
    removing = [name for name, heatmap in HEATMAPS.items() if heatmap.removes]
    found = {operation: single_layers(scan, operation).sort_values("first") for operation in removing}
    cells = pd.concat(found.values())
    if cells.empty:
        return None
    figure, axes = chart("layer", "divergence (nats per token)")
    names = ["divergence", *(name for name in ("divergence_low", "divergence_high") if name in cells)]
    layers_across(axes, int(cells["first"].min()), int(cells["first"].max()))
    scale(axes, "y", cells[names].to_numpy().ravel().tolist(), log=True)
    for place, (operation, own) in enumerate(found.items()):
        if len(own):
            aside = (place - (len(removing) - 1) / 2) * 0.18  # so that bars do not hide each other
            ends = (own["divergence_low"], own["divergence_high"]) if len(names) == 3 else None
            tips, style = [_tip(cell) for _, cell in own.iterrows()], _style(operation)
            points(
                axes, own["first"] + aside, own["divergence"], tips, style, title_of(operation), line=False, ends=ends
            )
    known = len(names) == 3 and np.isfinite(cells[names[1:]].to_numpy(dtype=float)).any()
    bars = " Bars: 95% intervals." if known else ""
    caption = f"How far the predictions move with one layer, or a part of it, left out.{bars}"
    return Chart(figure, "Removing one layer", caption)


def _by_depth(scan: ScanTable, best: dict[str, pd.DataFrame]) -> Chart:
    every = pd.concat(best.values())
    values = every["perplexity"].tolist()
    figure, axes = chart("effective depth (layers one after the other)", "perplexity")
    layers_across(axes, math.floor(every["depth"].min()), max(scan.num_layers, math.ceil(every["depth"].max())))
    scale(axes, "y", [scan.base, *values], log=True, end=_end_of_axis(scan, values))
    rule(axes, scan.base)
    for name, cells in best.items():
        tips = [_tip(cell) for _, cell in cells.iterrows()]
        points(axes, cells["depth"], cells["perplexity"], tips, _style(name), title_of(name))
    caption = (
        "The least perplexity that each kind of change has at a depth. Dashed: the unedited model."
        f"{_above(values, axes)}"
    )
    return Chart(figure, "The best stretch for every depth", caption)


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
    cells = scan.of_operation(operation).assign(length=lambda table: table["changed"])

    def name(length: int) -> str:
        return plural(length, "layer") + (f" ({plural(length // 2, 'pair')})" if group_size(operation) == 2 else "")

    def tips(line: pd.DataFrame) -> list[str]:
        return [_tip(cell) for _, cell in line.iterrows()]

    figure, axes = chart("last layer of the stretch", "perplexity")
    end = _end_of_axis(scan, cells["perplexity"].tolist())
    drawn = draw_lengths(axes, cells, scan.base, end, name, tips, most=len(ORDERED))
    shown = cells[cells["length"].isin(drawn)]
    layers_across(axes, int(shown["last"].min()), int(shown["last"].max()))
    return Chart(
        figure, f"{title_of(operation)}: where the stretch ends", _above(shown["perplexity"].tolist(), axes).strip()
    )


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
