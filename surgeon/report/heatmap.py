"""Heatmaps of a scan, drawn like figure 4 of the Layer Parallelism paper: first layer down, last layer across."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, LogNorm, Normalize
from matplotlib.figure import Figure
from numpy.typing import NDArray

from surgeon.provenance import whole_file

TITLES = {
    "shuffle": "Shuffle",
    "prune": "Prune",
    "merge": "Merge",
    "parallel": "Parallel",
    "2-parallel": "2-Parallel",
}
CAP = 3.0  # colours end at this multiple of the base perplexity, at the latest
LEAST_CAP = 1.1
_COLOURS = "viridis"
_BEYOND = "#fff6c2"  # paler than the scale's last colour, so that a capped cell is seen to be one
_NO_STRETCH = "0.88"

Grid = NDArray[np.float64]  # (layers, layers)


def draw_heatmaps(
    table: pd.DataFrame, base_perplexity: float, folder: Path, model: str, cap: float = CAP
) -> list[Path]:
    """Write `heatmap-<operation>.png` for each operation of a scan's table, and all of them in `heatmaps.png`.

    A map of its own has a scale of its own, so that small damage can be told apart; side by side they share one.

    Args:
        table: with the columns of `cells.csv`.
        model: its name, for the title.
        cap: colours end at this multiple of the base perplexity, or at the worst cell if that is better.

    Returns:
        The files written.
    """
    grids = {name: grid(table[table["operation"] == name]) for name in table["operation"].unique()}
    written = []
    for name, values in grids.items():
        size = _side(len(values))
        figure = Figure(figsize=(size + 1.0, size), layout="constrained", dpi=160)
        axes = figure.add_subplot()
        scale = _scale([values], base_perplexity, cap)
        _draw(axes, values, scale)
        _colour_bar(figure, [axes], [values], scale)
        axes.set_title(f"{TITLES.get(name, name)}: {model}, base perplexity {base_perplexity:.4g}", fontsize=11)
        written.append(_save(figure, folder / f"heatmap-{name}.png"))
    if len(grids) > 1:
        written.append(_overview(grids, base_perplexity, folder / "heatmaps.png", model, cap))
    return written


def grid(cells: pd.DataFrame) -> Grid:
    """Perplexity by first layer (row) and last layer (column); NaN where there is no such stretch."""
    num_layers = int(cells["last"].max()) + 1
    values = np.full((num_layers, num_layers), np.nan)
    values[cells["first"], cells["last"]] = cells["perplexity"]
    return values


def _overview(grids: dict[str, Grid], base: float, path: Path, model: str, cap: float) -> Path:
    """All heatmaps of a scan side by side, under one colour scale."""
    figure = Figure(figsize=(3.2 * len(grids) + 1.0, 3.9), layout="constrained", dpi=160)
    scale = _scale(list(grids.values()), base, cap)
    panels = np.atleast_1d(figure.subplots(1, len(grids), sharey=True))
    for letter, (panel, (name, values)) in enumerate(zip(panels, grids.items(), strict=True)):
        _draw(panel, values, scale, small=True)
        panel.set_title(f"({chr(ord('a') + letter)}) {TITLES.get(name, name)}", fontsize=11)
        if letter:
            panel.set_ylabel("")
    _colour_bar(figure, list(panels), list(grids.values()), scale)
    figure.suptitle(f"{model}, base perplexity {base:.4g}", fontsize=12)
    return _save(figure, path)


def _draw(axes: Axes, values: Grid, scale: Normalize, small: bool = False) -> None:
    # Infinity would be left blank like a stretch that does not exist.
    shown = np.ma.masked_invalid(np.where(np.isinf(values), np.finfo(np.float64).max, values))
    axes.imshow(shown, cmap=_colours(), norm=scale, interpolation="nearest", aspect="equal")
    ticks = list(range(0, len(values), _tick_step(len(values), small)))
    axes.set_xticks(ticks)
    axes.set_yticks(ticks)
    axes.tick_params(labelsize=8, length=2)
    axes.set_xlabel("last layer $e$", fontsize=9)
    axes.set_ylabel("first layer $s$", fontsize=9)


def _colours() -> Colormap:
    return matplotlib.colormaps[_COLOURS].with_extremes(bad=_NO_STRETCH, over=_BEYOND)


def _scale(grids: list[Grid], base: float, cap: float) -> Normalize:
    """Logarithmic, from the base perplexity (better cells have its colour) to the cap or the worst cell."""
    worst = max(float(np.nanmax(values)) for values in grids)
    return LogNorm(base, min(base * cap, max(base * LEAST_CAP, worst)))


def _colour_bar(figure: Figure, axes: list[Axes], grids: list[Grid], scale: Normalize) -> None:
    base, end = float(scale.vmin or 0), float(scale.vmax or 0)
    capped = any(bool((values > end).any()) for values in grids)
    mappable = ScalarMappable(scale, _colours())
    bar = figure.colorbar(mappable, ax=axes, extend="max" if capped else "neither", shrink=0.85, pad=0.02)
    ticks = [base * (end / base) ** (i / 4) for i in range(5)]
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
