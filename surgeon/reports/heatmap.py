"""Heatmaps of a scan, drawn like figure 4 of the Layer Parallelism paper: first layer down, last layer across.

A map over the values of a parameter has the layers down and these values across.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from surgeon.language.operations.declare import HEATMAPS
from surgeon.reports.drawing import save
from surgeon.reports.maps import MARKED, colour_bar, damage_scale, draw_map, label_map
from surgeon.reports.scale import CAP, damage, largest_shown, ratio_of
from surgeon.words import allowance

_PANELS_IN_A_ROW = 5


def title_of(operation: str) -> str:
    """As pictures name an operation."""
    return HEATMAPS[operation].title if operation in HEATMAPS else operation


def varied_by(operation: str) -> str | None:
    """The parameter whose values are the columns of an operation's map, if these are not last layers."""
    return HEATMAPS[operation].varied if operation in HEATMAPS else None


def draw_heatmaps(
    table: pd.DataFrame, base_perplexity: float, folder: Path, model: str, cap: float = CAP
) -> list[Path]:
    """Write `heatmap-<operation>.png` for each operation of a scan's table, and those over stretches in `heatmaps.png`.

    A map of its own has a scale of its own, so that small damage can be told apart; side by side they share one.

    Args:
        table: with the columns of `cells.csv`.
        model: its name, for the title.
        cap: as in `largest_shown`.

    Returns:
        The files written.
    """
    names = list(table["operation"].unique())
    grids = {name: grid(table[table["operation"] == name], varied_by(name)) for name in names}
    written = []
    for name, values in grids.items():
        size = _side(max(values.shape))
        figure = Figure(figsize=(size + 1.0, size), layout="constrained", dpi=160)
        axes = figure.add_subplot()
        scale, capped = scale_of([values], base_perplexity, cap)
        draw_heatmap(axes, values, scale, base_perplexity, varied_by(name), ticks=24)
        _colour_bar(figure, [axes], scale, capped)
        axes.set_title(f"{title_of(name)}: {model}, base perplexity {base_perplexity:.4g}", fontsize=11)
        written.append(save(figure, folder / f"heatmap-{name}.png"))
    over_stretches = [name for name in names if varied_by(name) is None]
    if len(over_stretches) > 1:
        same = grid(table[table["operation"].isin(over_stretches)])
        grids = {name: grids[name].reindex_like(same) for name in over_stretches}
        written.append(_overview(grids, base_perplexity, folder / "heatmaps.png", model, cap))
    return written


def grid(cells: pd.DataFrame, varied: str | None = None) -> pd.DataFrame:
    """Perplexity by first layer (index) and last layer (columns); NaN where there is no such stretch.

    Layers between those of the stretches that were measured are left out where all stretches leave them out.

    Args:
        varied: the column whose values are the columns instead, in their order there.
    """
    if varied is not None:
        values = cells.drop_duplicates(["first", varied]).pivot(index="first", columns=varied, values="perplexity")
        return values.reindex(index=_evenly(cells["first"]), columns=cells[varied].unique())
    cells = cells.drop_duplicates(["first", "last"])
    values = cells.pivot(index="first", columns="last", values="perplexity")
    return values.reindex(index=_evenly(cells["first"]), columns=_evenly(cells["last"]))


def _evenly(layers: pd.Series[int]) -> range:
    """The layers there are, and those that are missing for them to be evenly spaced."""
    present = sorted(set(layers))
    return range(present[0], present[-1] + 1, math.gcd(*(b - a for a, b in pairwise(present))) or 1)


def _overview(grids: dict[str, pd.DataFrame], base: float, path: Path, model: str, cap: float) -> Path:
    """All heatmaps of a scan side by side, in as few rows as fit, under one colour scale."""
    rows = math.ceil(len(grids) / _PANELS_IN_A_ROW)
    columns = math.ceil(len(grids) / rows)
    figure = Figure(figsize=(3.2 * columns + 1.0, 3.4 * rows + 0.5), layout="constrained", dpi=160)
    scale, capped = scale_of(list(grids.values()), base, cap)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for place, (panel, (name, values)) in enumerate(zip(panels, grids.items(), strict=False)):
        draw_heatmap(panel, values, scale, base, None, ticks=12)
        panel.set_title(f"({chr(ord('a') + place)}) {title_of(name)}", fontsize=11)
        if place % columns:
            panel.set_ylabel("")
        if place + columns < len(grids):
            panel.set_xlabel("")
        else:
            panel.tick_params(labelbottom=True)
    for panel in panels[len(grids) :]:
        panel.set_visible(False)
    _colour_bar(figure, list(panels), scale, capped)
    figure.suptitle(f"{model}, base perplexity {base:.4g}", fontsize=12)
    return save(figure, path)


def draw_heatmap(
    axes: Axes, values: pd.DataFrame, scale: Normalize, base: float, varied: str | None, ticks: int
) -> None:
    """A map with names of its axes and a line around the cells within `MARKED`."""
    draw_map(axes, values, scale, base * MARKED, "equal" if varied is None else "auto")
    label_map(axes, values, ticks, ticks, 8)
    axes.set_xlabel("last layer $e$" if varied is None else varied, fontsize=9)
    axes.set_ylabel("first layer $s$" if varied is None else "layer", fontsize=9)


def scale_of(grids: Sequence[pd.DataFrame], base: float, cap: float = CAP) -> tuple[Normalize, bool]:
    """The scale of these maps, from the base perplexity to the largest that is shown, and whether some lie beyond."""
    cells = pd.Series(np.concatenate([values.to_numpy().ravel() for values in grids]))
    end = largest_shown(cells, base, cap)
    return damage_scale(base, end), bool((cells > end).any())


def _colour_bar(figure: Figure, axes: list[Axes], scale: Normalize, capped: bool) -> None:
    base, end = float(scale.vmin or 0), float(scale.vmax or 0)
    bar = colour_bar(figure, axes, scale, capped, shrink=0.85, pad=0.02)
    ticks = [base * float(ratio_of(damage(end / base) * part / 4)) for part in range(5)]
    bar.set_ticks(ticks, labels=[f"{tick:.3g}" for tick in ticks])
    bar.minorticks_off()
    beyond = f" (pale: beyond {end / base:.3g} times the base)" if capped else ""
    bar.set_label(f"perplexity, line: {allowance(MARKED)}{beyond}", fontsize=9)


def _side(num_layers: int) -> float:
    """Inches: more for more layers, so that a cell stays visible."""
    return min(7.5, max(4.6, 0.24 * num_layers + 1.0))
