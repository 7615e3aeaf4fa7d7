"""Perplexity against where a stretch ends, one line per length, as in figure 7 of the Layer Parallelism paper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, LinearSegmentedColormap, ListedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from surgeon.language.operations.declare import HEATMAPS
from surgeon.reports.drawing import ORDERED, SOFT, points, save, scale
from surgeon.reports.heatmap import title_of
from surgeon.reports.scale import CAP, largest_shown

MOST_LINES = 16


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
            figure = Figure(figsize=(7.2, 4.4), layout="constrained", dpi=160)
            axes = figure.add_subplot()
            title = f"{title_of(name)}: {model}, base perplexity {base_perplexity:.4g}"
            axes.set_title(title, fontsize=11)
            _finish(figure, axes, cells, base_perplexity, cap)
            written.append(save(figure, folder / f"curves-{name}.png"))
    return written


def draw_lengths(
    axes: Axes,
    cells: pd.DataFrame,
    base: float,
    end: float,
    names: Any = None,
    tips: Any = None,
    most: int = MOST_LINES,
) -> dict[int, str]:
    """A line for each length of a stretch, or evenly chosen ones, and the base, dashed.

    Args:
        cells: with `length`, `last` and `perplexity`.
        end: where the vertical axis ends; what lies beyond is hollow, on the edge.
        names: of a length, for a legend.
        tips: what is said of each of some cells.

    Returns:
        The colour of each length.
    """
    lengths = sorted(int(length) for length in cells["length"].unique())
    if len(lengths) > most:
        lengths = [lengths[place] for place in np.linspace(0, len(lengths) - 1, most).round().astype(int)]
    blend = LinearSegmentedColormap.from_list("ordered", ORDERED)
    places = [place * (len(ORDERED) - 1) / max(1, len(lengths) - 1) for place in range(len(lengths))]
    # Of eight and fewer each has one of the named colours, which the page has in light and dark.
    hues = [
        ORDERED[round(p)] if len(lengths) <= len(ORDERED) else to_hex(blend(p / (len(ORDERED) - 1))) for p in places
    ]
    scale(axes, "y", [base, *cells["perplexity"][cells["length"].isin(lengths)]], log=True, end=end)
    axes.axhline(base, color=SOFT, lw=1.2, ls=(0, (4, 3)), zorder=1, clip_on=False)
    for length, hue in zip(lengths, hues, strict=True):
        line = cells[cells["length"] == length].sort_values("last")
        said: Sequence[str] = () if tips is None else tips(line)
        points(axes, line["last"], line["perplexity"], said, label=names(length) if names else "", colour=hue)
    return dict(zip(lengths, hues, strict=True))


def _finish(figure: Figure, axes: Axes, cells: pd.DataFrame, base: float, cap: float) -> None:
    end = largest_shown(cells["perplexity"], base, cap)
    hues = draw_lengths(axes, cells, base, end)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=16, integer=True))
    axes.set_xlabel("last layer of the stretch (end index)", fontsize=9)
    axes.set_ylabel("perplexity (dashed: base)", fontsize=9)
    axes.tick_params(labelsize=8, length=2)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    beyond = int((cells["perplexity"] > end).sum())
    if beyond:
        text = f"{beyond} of {len(cells)} stretches lie above (hollow)"
        axes.text(0.99, 0.95, text, zorder=5, ha="right", va="top", fontsize=8, color=SOFT, transform=axes.transAxes,
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5})  # fmt: skip
    edges = np.arange(len(hues) + 1) - 0.5
    bar = figure.colorbar(
        ScalarMappable(BoundaryNorm(edges, len(hues)), ListedColormap([*hues.values()])), ax=axes, pad=0.02
    )
    bar.set_ticks(list(range(len(hues))), labels=[str(length) for length in hues])
    bar.minorticks_off()
    bar.ax.tick_params(labelsize=8, length=0)
    bar.set_label("layers in the stretch (Δ)", fontsize=9)
