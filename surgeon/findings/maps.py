"""Maps of cells: values in colours by row and column, and the colour scale of damage, one for files and the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import Colormap, FuncNorm, Normalize
from matplotlib.figure import Figure

from surgeon.findings.drawing import NO_CELL

MARKED = 1.10  # times the base perplexity: cells up to here are fenced in
COLOURS = "viridis"
BEYOND = "#fff6c2"  # paler than the scale's last colour, so that a capped cell is seen to be one
CAP = 3.0  # colours end at this multiple of the base perplexity, at the latest
LEAST_CAP = 1.1
MOST = 0.85  # where a few cells are beyond the cap, colours tell this share of the cells apart, with some room
_ROOM = 1.4


def largest_shown(perplexity: Sequence[float] | pd.Series[float], base: float, cap: float = CAP) -> float:
    """Where the colours of these cells end.

    At the worst cell, and at the latest at `cap` times the base; sooner where nearly all cells are far better, as when
    one layer tolerates nothing and the others nearly everything.

    Args:
        perplexity: of the cells; NaN is none.
    """
    cells = pd.Series(perplexity, dtype=float).dropna()
    worst = float(cells.max()) if len(cells) else base
    if worst > base * cap:
        worst = base * (float(cells.quantile(MOST, interpolation="lower")) / base) ** _ROOM
    return min(base * cap, max(base * LEAST_CAP, worst))


def damage(ratio: Any) -> Any:
    """How far from the base's colour a multiple of its perplexity lies, in units of the scale's own.

    The square root of the logarithm, so that +5% and +10% differ as plainly as twice and three times the base do. What
    is better than the base has its colour.

    Args:
        ratio: a number or an array of them.
    """
    with np.errstate(divide="ignore"):
        return np.sqrt(np.maximum(0.0, np.log(ratio)))


def ratio_of(distance: Any) -> Any:
    """The multiple of the base's perplexity that lies so far from its colour; the inverse of `damage` from 1 on."""
    return np.exp(np.square(distance))


def colours() -> Colormap:
    """From dark for little to bright for much, and a paler one beyond; where there is no cell the axes are seen."""
    return matplotlib.colormaps[COLOURS].with_extremes(bad=(0, 0, 0, 0), over=BEYOND, under="#2a0134")


def damage_scale(base: float, end: float) -> Normalize:
    """From the base perplexity to `end`, by `damage`; better cells have the base's colour."""
    return FuncNorm((lambda value: damage(value / base), lambda place: base * ratio_of(place)), base, end)


def draw_map(
    axes: Axes, values: pd.DataFrame, scale: Normalize, limit: float = math.nan, aspect: Any = "equal"
) -> None:
    """Values by index (down) and columns (across); NaN where there is no cell, infinity beyond the scale.

    Args:
        limit: a line fences in the cells up to this value.
    """
    cells = values.to_numpy(dtype=np.float64)
    # Infinity would be left blank like a cell that does not exist.
    shown = np.ma.masked_invalid(np.where(np.isposinf(cells), 1e6 * (scale.vmax or 1.0), cells))
    axes.set_facecolor(NO_CELL)
    axes.imshow(shown, cmap=colours(), norm=scale, interpolation="none", aspect=aspect)
    known, within = ~np.isnan(cells), cells <= limit
    below = known[:-1] & known[1:] & (within[:-1] != within[1:])
    beside = known[:, :-1] & known[:, 1:] & (within[:, :-1] != within[:, 1:])
    edges = [[(column - 0.5, row + 0.5), (column + 0.5, row + 0.5)] for row, column in np.argwhere(below)]
    edges += [[(column + 0.5, row - 0.5), (column + 0.5, row + 0.5)] for row, column in np.argwhere(beside)]
    if edges:
        for colour, width in (("#00000090", 2.2), ("#fefefe", 1.1)):
            axes.add_collection(LineCollection(edges, colors=colour, lw=width, capstyle="projecting"), autolim=False)


def label_map(axes: Axes, values: pd.DataFrame, across: int, down: int, size: float) -> None:
    """Names of rows and columns, as many as there is room for."""
    for axis, names, room in ((axes.xaxis, values.columns, across), (axes.yaxis, values.index, down)):
        step = 1
        while len(names) / step > room:
            step *= 2
        axis.set_ticks(range(0, len(names), step), labels=[name_of(name) for name in names[::step]])
    axes.tick_params(labelsize=size, length=2)


def name_of(value: Any) -> str:
    """A row or a column as text."""
    return value if isinstance(value, str) else f"{value:g}"


def colour_bar(
    figure: Figure, axes: Sequence[Axes] | None, scale: Normalize, above: bool, below: bool = False, **place: Any
) -> Any:
    """The legend of a map, beside axes or filling its own, with the colours of values above and below its ends."""
    extend = {(False, False): "neither", (True, False): "min", (False, True): "max", (True, True): "both"}[below, above]
    bar = figure.colorbar(ScalarMappable(scale, colours()), ax=axes, extend=extend, **place)
    bar.ax.tick_params(labelsize=8)
    return bar


def map_side(cells: int) -> float:
    """Inches of a square map in a file: more for more cells in a row, so that each stays visible."""
    return min(7.5, max(4.6, 0.24 * cells + 1.0))
