"""Heatmaps of a scan, drawn like figure 4 of the Layer Parallelism paper: first layer down, last layer across.

A map over the values of a parameter has the layers down and these values across.
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, FuncNorm, Normalize
from matplotlib.figure import Figure

from surgeon.language.operations.declare import HEATMAPS
from surgeon.provenance import whole_file
from surgeon.reports.scale import BEYOND, CAP, COLOURS, damage, largest_shown, ratio_of

_NO_STRETCH = "0.88"
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
        scale = _scale([values], base_perplexity, cap)
        _draw(axes, values, scale, varied=varied_by(name))
        _colour_bar(figure, [axes], [values], scale)
        axes.set_title(f"{title_of(name)}: {model}, base perplexity {base_perplexity:.4g}", fontsize=11)
        written.append(_save(figure, folder / f"heatmap-{name}.png"))
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
    scale = _scale(list(grids.values()), base, cap)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for place, (panel, (name, values)) in enumerate(zip(panels, grids.items(), strict=False)):
        _draw(panel, values, scale, small=True)
        panel.set_title(f"({chr(ord('a') + place)}) {title_of(name)}", fontsize=11)
        if place % columns:
            panel.set_ylabel("")
        if place + columns < len(grids):
            panel.set_xlabel("")
        else:
            panel.tick_params(labelbottom=True)
    for panel in panels[len(grids) :]:
        panel.set_visible(False)
    _colour_bar(figure, list(panels), list(grids.values()), scale)
    figure.suptitle(f"{model}, base perplexity {base:.4g}", fontsize=12)
    return _save(figure, path)


def _draw(axes: Axes, values: pd.DataFrame, scale: Normalize, small: bool = False, varied: str | None = None) -> None:
    # Infinity would be left blank like a stretch that does not exist.
    shown = np.ma.masked_invalid(values.replace(math.inf, np.finfo(np.float64).max).to_numpy())
    axes.imshow(
        shown, cmap=_colours(), norm=scale, interpolation="nearest", aspect="equal" if varied is None else "auto"
    )
    step = _tick_step(max(values.shape), small)
    across, down = (range(0, len(layers), step) for layers in (values.columns, values.index))
    axes.set_xticks(across, labels=[f"{values.columns[place]:g}" for place in across])
    axes.set_yticks(down, labels=[str(values.index[place]) for place in down])
    axes.tick_params(labelsize=8, length=2)
    axes.set_xlabel("last layer $e$" if varied is None else varied, fontsize=9)
    axes.set_ylabel("first layer $s$" if varied is None else "layer", fontsize=9)


def _colours() -> Colormap:
    return matplotlib.colormaps[COLOURS].with_extremes(bad=_NO_STRETCH, over=BEYOND)


def _scale(grids: list[pd.DataFrame], base: float, cap: float) -> Normalize:
    """From the base perplexity to the largest that is shown; better cells have the base's colour."""
    cells = pd.Series(np.concatenate([values.to_numpy().ravel() for values in grids]))
    end = largest_shown(cells, base, cap)
    return FuncNorm((lambda value: damage(value / base), lambda place: base * ratio_of(place)), base, end)


def _colour_bar(figure: Figure, axes: list[Axes], grids: list[pd.DataFrame], scale: Normalize) -> None:
    base, end = float(scale.vmin or 0), float(scale.vmax or 0)
    capped = any(bool((values > end).to_numpy().any()) for values in grids)
    mappable = ScalarMappable(scale, _colours())
    bar = figure.colorbar(mappable, ax=axes, extend="max" if capped else "neither", shrink=0.85, pad=0.02)
    ticks = [base * float(ratio_of(damage(end / base) * part / 4)) for part in range(5)]
    bar.set_ticks(ticks, labels=[f"{tick:.3g}" for tick in ticks])
    bar.minorticks_off()
    bar.ax.tick_params(labelsize=8)
    beyond = f" (pale: beyond {end / base:.3g} times the base)" if capped else ""
    bar.set_label("perplexity" + beyond, fontsize=9)


def _tick_step(num_layers: int, small: bool) -> int:
    """Labels stay apart: every layer up to 24 (12 in a small panel), then every 2nd, 4th, ..."""
    room = 12 if small else 24
    step = 1
    while num_layers / step > room:
        step *= 2
    return step


def _side(num_layers: int) -> float:
    """Inches: more for more layers, so that a cell stays visible."""
    return min(7.5, max(4.6, 0.24 * num_layers + 1.0))


def _save(figure: Figure, path: Path) -> Path:
    with whole_file(path) as beside:
        figure.savefig(beside, format="png")
    return path
