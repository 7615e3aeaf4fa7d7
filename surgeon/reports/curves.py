"""Perplexity against where a stretch ends, one line per length, as in figure 7 of the Layer Parallelism paper."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from surgeon.language.operations.declare import HEATMAPS
from surgeon.provenance import whole_file
from surgeon.reports.heatmap import title_of
from surgeon.reports.scale import CAP, largest_shown

MOST_LINES = 16
_COLOURS = "viridis_r"


def draw_curves(table: pd.DataFrame, base_perplexity: float, folder: Path, model: str, cap: float = CAP) -> list[Path]:
    """Write `curves-<operation>.png` for each operation in a scan's table that declares it.

    The horizontal axis is the last layer of the stretch, the vertical one perplexity; the colour of a line is the
    stretch's number of layers.

    Args:
        table: with the columns of `cells.csv`.
        model: its name, for the title.
        cap: as in `draw_heatmaps`.

    Returns:
        The files written.
    """
    written = []
    for name in (name for name, heatmap in HEATMAPS.items() if heatmap.curves):
        cells = table[table["operation"] == name]
        length = cells["last"] - cells["first"] + 1
        # Layers that fill no group stay as they were, so that other lengths say nothing new.
        cells = cells.assign(length=length)[length % HEATMAPS[name].group == 0]
        if len(cells):
            title = f"{title_of(name)}: {model}, base perplexity {base_perplexity:.4g}"
            written.append(_draw(cells, base_perplexity, folder / f"curves-{name}.png", title, cap))
    return written


def _draw(cells: pd.DataFrame, base: float, path: Path, title: str, cap: float) -> Path:
    figure = Figure(figsize=(7.2, 4.4), layout="constrained", dpi=160)
    axes = figure.add_subplot()
    lengths = _thinned(sorted(cells["length"].unique()))
    colours = matplotlib.colormaps[_COLOURS](np.linspace(0.02, 1.0, len(lengths)))
    for length, colour in zip(lengths, colours, strict=True):
        line = cells[cells["length"] == length].sort_values("last")
        axes.plot(line["last"], line["perplexity"], "o-", ms=3.2, lw=1.3, color=colour)
    axes.axhline(base, color="#444444", lw=1.0, ls="--", zorder=1)
    axes.set_title(title, fontsize=11)
    _finish(axes, cells[cells["length"].isin(lengths)], base, cap)
    _colour_bar(figure, axes, lengths, ListedColormap(colours))
    with whole_file(path) as beside:
        figure.savefig(beside, format="png")
    return path


def _finish(axes: Axes, cells: pd.DataFrame, base: float, cap: float) -> None:
    """Axes, their limits and labels."""
    end = largest_shown(cells["perplexity"], base, cap)
    low = min(base, float(cells["perplexity"].min()))
    room = (end / low) ** 0.04
    axes.set_yscale("log")
    axes.set_ylim(low / room, end * room)
    ticks = [base * (end / base) ** (i / 4) for i in range(5)]
    axes.set_yticks(ticks, labels=[f"{tick:.3g}" for tick in ticks])
    axes.minorticks_off()
    axes.xaxis.set_major_locator(MaxNLocator(nbins=16, integer=True))
    axes.set_xlabel("last layer of the stretch (end index)", fontsize=9)
    axes.set_ylabel("perplexity (dashed: base)", fontsize=9)
    axes.tick_params(labelsize=8, length=2)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    beyond = int((cells["perplexity"] > end).sum())
    if beyond:
        axes.text(0.99, 0.98, f"{beyond} of {len(cells)} stretches lie above", ha="right", va="top", fontsize=8,
                  color="#666666", transform=axes.transAxes,
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5})  # fmt: skip


def _colour_bar(figure: Figure, axes: Axes, lengths: list[int], colours: ListedColormap) -> None:
    """One block for each length."""
    edges = np.arange(len(lengths) + 1) - 0.5
    bar = figure.colorbar(ScalarMappable(BoundaryNorm(edges, len(lengths)), colours), ax=axes, pad=0.02)
    bar.set_ticks(list(range(len(lengths))), labels=[str(length) for length in lengths])
    bar.minorticks_off()
    bar.ax.tick_params(labelsize=8, length=0)
    bar.set_label("layers in the stretch (Δ)", fontsize=9)


def _thinned(lengths: list[int]) -> list[int]:
    """At most `MOST_LINES` lengths, evenly chosen, the shortest and the longest among them."""
    if len(lengths) <= MOST_LINES:
        return lengths
    places = np.linspace(0, len(lengths) - 1, MOST_LINES).round().astype(int)
    return [lengths[place] for place in places]
