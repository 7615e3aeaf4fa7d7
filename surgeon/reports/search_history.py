"""A search in one picture: every trial by its source, the best so far, and which layers the good trials change."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from surgeon.reports.search_trials import SOURCES, SearchedTrials
from surgeon.results.drawing import COLOURS, points, save, scale
from surgeon.results.maps import colour_bar, draw_map, label_map
from surgeon.words import TIMES

UNITS = {"divergence": "divergence (nats per token)", "perplexity": "perplexity"}
STOPPED, _OTHER = 7, 6  # styles
_ABOVE = 30.0  # times the least: where the axis ends
_STRIP = 0.3  # of an inch, the height of a space's strip


def draw_search(path: Path, trials: SearchedTrials, layers: int, title: str) -> None:
    """Write the picture as a PNG.

    Args:
        layers: of the unedited model.
        title: above the picture.
    """
    values = trials.shares(layers)
    strips = 0.75 + _STRIP * max(1, len(values))
    figure = Figure(figsize=(9.0, 4.8 + strips), layout="constrained", dpi=150)
    above, below = figure.subplots(2, 1, height_ratios=[4.2, strips])
    beyond = draw_history(above, trials)
    if beyond:
        text = f"{beyond} of {len(trials)} trials lie above (hollow, on the edge)"
        above.text(0.01, 0.98, text, va="top", fontsize=8, color="#666666", transform=above.transAxes)
    above.set_xlabel("trials, in the order they were asked for")
    above.xaxis.set_major_locator(MaxNLocator(integer=True))
    above.set_xlim(0.3, len(trials) + 0.7)
    figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=3)
    above.grid(alpha=0.25)
    above.spines[["top", "right"]].set_visible(False)
    above.tick_params(labelsize=8)
    if len(values):
        _draw_layers(figure, below, trials, layers)
    else:
        below.axis("off")
    figure.suptitle(title, fontsize=11)
    save(figure, path)


def draw_history(axes: Axes, trials: SearchedTrials) -> int:
    """Draw every trial in the order they were asked for, and the best so far.

    Returns:
        How many lie above the axis.
    """
    values = [value for value in trials.relative if 0 < value < math.inf]
    scale(axes, "y", values, log=True, end=_ABOVE * min(values, default=1.0))
    unit = f"{trials.by}, {TIMES} the best of its level" if trials.has_levels else UNITS[trials.by]
    axes.set_ylabel(unit)
    known = {words: place for place, words in enumerate(SOURCES.values())}
    sources = np.array(trials.sources)
    kinds = [(words, known.get(words, _OTHER), trials.whole & (sources == words)) for words in {*trials.sources}]
    kinds = sorted(kinds, key=lambda kind: (kind[1], kind[0]))
    for words, style, own in [*kinds, ("stopped early: an estimate", STOPPED, ~trials.whole)]:
        rows = np.flatnonzero(own).tolist()
        if rows:
            tips = [trials.tip(row) for row in rows]
            points(axes, np.array(rows) + 1, trials.relative[rows], tips, style, words, line=False)
    best = trials.best_so_far
    name = "best so far, mean of all levels" if trials.has_levels else "best so far"
    steps = np.where(best > 0, best, np.nan)
    axes.plot(
        np.arange(1, len(trials) + 1), steps, color=COLOURS[1], lw=1.8, drawstyle="steps-post", label=name, zorder=1
    )
    return int((trials.relative > axes.get_ylim()[1]).sum())


def _draw_layers(figure: Figure, axes: Axes, trials: SearchedTrials, layers: int) -> None:
    values, shares = trials.shares(layers), Normalize(0, 1)
    draw_map(axes, values, shares, aspect="auto")
    label_map(axes, values, 32, len(values), 8)
    axes.set_xlabel("layer")
    axes.spines[:].set_visible(False)
    of_each = " of each level" if trials.has_levels else ""
    text = f"share of the best tenth of trials{of_each} ({len(trials.good)}) that change the layer"
    axes.set_title(text, fontsize=9, loc="left")
    colour_bar(figure, [axes], shares, False, ticks=[0, 0.5, 1], pad=0.01, aspect=8)
