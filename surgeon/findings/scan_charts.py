"""The charts of a scan: single layers, depths, and figure 7 of the Layer Parallelism paper; and its tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from surgeon.findings.blocks import Block, Table
from surgeon.findings.drawing import ORDERED, Chart, Picture, layers_across, points, rule, scale
from surgeon.findings.maps import CAP, LEAST_CAP
from surgeon.findings.tolerance import (
    PAIRS,
    TOLERANCES,
    ScanTable,
    best_by_depth,
    group_size,
    longest_within,
    single_layers,
    title_of,
)
from surgeon.language.operations.declare import HEATMAPS
from surgeon.words import allowance, change, known, number, plural, stretch

_MOST_POINTS = 0.8  # of the points of a chart lie well inside it


def charts(scan: ScanTable) -> Iterator[Block]:
    """All charts that the scanned operations allow."""
    best = {name: cells for name in scan.operations if len(cells := best_by_depth(scan, name))}
    side_by_side = []
    if removed := _removing_one(scan):
        side_by_side.append(removed)
    if best:
        side_by_side.append(_by_depth(scan, best))
    if side_by_side:
        yield Picture(side_by_side)
    if best:
        yield _depth_table(scan, best)
    drawn = sorted((name for name, heatmap in HEATMAPS.items() if heatmap.curves), key=lambda name: name != PAIRS)
    curves = [_by_end(scan, name) for name in drawn if len(scan.of_operation(name))]
    if curves:
        caption = (
            "One line for each length of the stretch (eight of them where there are more), by where it ends: figure 7 "
            "of the Layer Parallelism paper. Dashed: the unedited model."
        )
        yield Picture(curves, caption)


def _style(operation: str) -> int:
    """Each operation looks the same in all charts."""
    if operation in HEATMAPS:
        return HEATMAPS[operation].style
    return 0


def _tips(cells: pd.DataFrame) -> list[str]:
    tips = []
    for _, cell in cells.iterrows():
        quality = ", ".join(f"{name} {known(cell, name)}" for name in ("perplexity", "divergence"))
        tips.append(f"{stretch(int(cell['first']), int(cell['last']))}: {change(cell['ratio'])}, {quality}")
    return tips


def _end_of_axis(scan: ScanTable, values: Sequence[float]) -> float:
    """Reaches beyond most of the points; the few that are far off would press the others together."""
    typical = float(np.quantile([value / scan.base for value in values], _MOST_POINTS, method="lower"))
    return scan.base * min(CAP, max(LEAST_CAP, 1 + 2.5 * (typical - 1)))


def _removing_one(scan: ScanTable) -> Chart | None:
    removing = [name for name, heatmap in HEATMAPS.items() if heatmap.removes]
    found = {operation: single_layers(scan, operation).sort_values("first") for operation in removing}
    cells = pd.concat(found.values())
    if cells.empty:
        return None
    names = ["divergence", *(name for name in ("divergence_low", "divergence_high") if name in cells)]

    def draw(axes: Axes) -> None:
        layers_across(axes, int(cells["first"].min()), int(cells["first"].max()))
        scale(axes, "y", cells[names].to_numpy().ravel().tolist(), log=True)
        for place, (operation, own) in enumerate(found.items()):
            if own.empty:
                continue
            aside = (place - (len(removing) - 1) / 2) * 0.18  # so that bars do not hide each other
            ends = None
            if len(names) == 3:
                ends = (own["divergence_low"], own["divergence_high"])
            title = title_of(operation)
            points(axes, own["first"] + aside, own["divergence"], _tips(own), _style(operation), title, line=False,
                   ends=ends)  # fmt: skip

    caption = "How far the predictions move with one layer, or a part of it, left out."
    if len(names) == 3 and np.isfinite(cells[names[1:]].to_numpy(dtype=float)).any():
        caption += " Bars: 95% intervals."
    return Chart("Removing one layer", draw, "layer", "divergence (nats per token)", caption)


def _by_depth(scan: ScanTable, best: dict[str, pd.DataFrame]) -> Chart:
    every = pd.concat(best.values())
    values = every["perplexity"].tolist()

    def draw(axes: Axes) -> None:
        layers_across(axes, math.floor(every["depth"].min()), max(scan.num_layers, math.ceil(every["depth"].max())))
        scale(axes, "y", [scan.base, *values], log=True, end=_end_of_axis(scan, values))
        rule(axes, scan.base)
        for name, cells in best.items():
            points(axes, cells["depth"], cells["perplexity"], _tips(cells), _style(name), title_of(name))

    caption = "The least perplexity that each kind of change has at a depth. Dashed: the unedited model."
    x = "effective depth (layers one after the other)"
    return Chart("The best stretch for every depth", draw, x, "perplexity", caption)


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
    """Perplexity over the last layer of a stretch, a line for each length, or for evenly chosen ones."""
    cells = scan.of_operation(operation)
    lengths = sorted(int(length) for length in cells["changed"].unique())
    if len(lengths) > len(ORDERED):
        lengths = [lengths[place] for place in np.linspace(0, len(lengths) - 1, len(ORDERED)).round().astype(int)]
    shown = cells[cells["changed"].isin(lengths)]

    def draw(axes: Axes) -> None:
        layers_across(axes, int(shown["last"].min()), int(shown["last"].max()))
        end = _end_of_axis(scan, cells["perplexity"].tolist())
        scale(axes, "y", [scan.base, *shown["perplexity"]], log=True, end=end)
        rule(axes, scan.base)
        for place, length in enumerate(lengths):
            line = shown[shown["changed"] == length].sort_values("last")
            hue = ORDERED[round(place * (len(ORDERED) - 1) / max(1, len(lengths) - 1))]
            name = plural(length, "layer")
            if group_size(operation) == 2:
                name += f" ({plural(length // 2, 'pair')})"
            points(axes, line["last"], line["perplexity"], _tips(line), label=name, colour=hue)

    title = f"{title_of(operation)}: where the stretch ends"
    return Chart(title, draw, "last layer of the stretch", "perplexity", name=f"curves-{operation}")


def reach_table(scan: ScanTable) -> Table:
    """How far each operation goes within each tolerance."""
    rows = []
    for operation in scan.operations:
        row = [title_of(operation)]
        for tolerance in TOLERANCES:
            cell = longest_within(scan, operation, tolerance)
            if cell is None:
                row.append("none")
                continue
            depth = scan.depth(operation, int(cell["changed"]))
            ends = ""
            if depth is not None:
                ends = f", depth {depth:g}"
            row.append(f"{stretch(int(cell['first']), int(cell['last']))} ({number(cell['perplexity'])}{ends})")
        rows.append(row)
    head = ["change", *(f"within {allowance(tolerance)}" for tolerance in TOLERANCES)]
    note = (
        "The stretch with the most changed layers whose perplexity stays within this much of the unedited model's "
        f"{number(scan.base)}; in brackets its perplexity and the effective depth, of {scan.num_layers} layers."
    )
    return Table("How far each change goes", head, rows, note, left=frozenset(range(len(head))))
