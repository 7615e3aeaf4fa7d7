"""A search in one picture: every trial by its source, the best so far, and which layers the good trials change."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from surgeon.provenance import whole_file
from surgeon.reports.front import COLOURS, MARKERS
from surgeon.reports.search_trials import SOURCES, SearchedTrials

_UNITS = {"divergence": "divergence (nats/token)", "perplexity": "perplexity"}
_ABOVE = 30.0  # times the least: where the axis ends
_STRIP = 0.3  # of an inch, the height of a space's strip


def draw_search(path: Path, trials: SearchedTrials, layers: int, title: str) -> None:
    """Write the picture as a PNG.

    Args:
        layers: of the unedited model.
        title: above the picture.
    """
    spaces = trials.spaces()
    strips = 0.75 + _STRIP * max(1, len(spaces))
    figure = Figure(figsize=(9.0, 4.8 + strips), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=[4.2, strips])
    _draw_history(above, trials)
    _draw_layers(below, trials, spaces, layers)
    figure.suptitle(title, fontsize=11)
    with whole_file(path) as beside:
        figure.savefig(beside, format="png", dpi=150)


def _draw_history(axes: Axes, trials: SearchedTrials) -> None:
    places, sources = np.arange(1, len(trials) + 1), np.array(trials.sources)
    shown = trials.relative[(trials.relative > 0) & np.isfinite(trials.relative)]
    least = float(shown.min()) if len(shown) else 1.0
    end = min(_ABOVE * least, float(shown.max()) if len(shown) else 1.0)
    for number, source in enumerate(dict.fromkeys([*SOURCES.values(), *trials.sources])):
        own = (sources == source) & (trials.relative <= end)
        drawn: dict[str, Any] = {"s": 24, "marker": MARKERS[number % len(MARKERS)]}
        colour = COLOURS[number % len(COLOURS)]
        if (sources == source).any():
            axes.scatter(places[own & trials.whole], trials.relative[own & trials.whole], color=colour, label=source,
                         **drawn)  # fmt: skip
        hollow = own & ~trials.whole
        axes.scatter(places[hollow], trials.relative[hollow], facecolors="none", edgecolors=colour, **drawn)
    if not trials.whole.all():
        axes.scatter([], [], s=24, facecolors="none", edgecolors="#666666", label="hollow: stopped early, an estimate")
    name = "best so far, mean of all levels" if trials.has_levels else "best so far"
    axes.plot(places, trials.best_so_far, color="#222222", lw=1.3, drawstyle="steps-post", label=name, zorder=1)
    axes.set_yscale("log")
    room = max(end / least, 2.0) ** 0.06
    axes.set_ylim(least / room, end * room)
    _label_values(axes)
    beyond = int((trials.relative > end).sum())
    if beyond:
        text = f"{beyond} of {len(trials)} trials lie above"
        axes.text(0.01, 0.98, text, va="top", fontsize=8, color="#666666", transform=axes.transAxes)
    unit = f"{trials.by}, times the best of its level" if trials.has_levels else _UNITS[trials.by]
    axes.set(xlabel="trials, in the order they were asked for", ylabel=unit)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(0.3, len(trials) + 0.7)
    axes.figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=3)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


def _label_values(axes: Axes) -> None:
    """A few round numbers, also within one decade."""
    low, high = axes.get_ylim()
    if high / low < 20:
        axes.set_yticks([tick for tick in MaxNLocator(5).tick_values(low, high) if low <= tick <= high])
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylim(low, high)


def _draw_layers(axes: Axes, trials: SearchedTrials, spaces: list[str], layers: int) -> None:
    shares = np.array([trials.touched(space, layers, trials.good) for space in spaces]).reshape(-1, layers)
    if not len(spaces):
        axes.axis("off")
        return
    drawn = axes.imshow(shares, aspect="auto", cmap="Blues", vmin=0.0, vmax=1.0, interpolation="nearest")
    axes.set_yticks(range(len(spaces)), labels=spaces)
    axes.set_xticks(range(0, layers, math.ceil(layers / 32)))
    axes.set_xticks(np.arange(layers + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(len(spaces) + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", lw=1.0)
    axes.tick_params(which="both", labelsize=8, length=0)
    axes.set_xlabel("layer")
    axes.spines[:].set_visible(False)
    of_each = " of each level" if trials.has_levels else ""
    text = f"share of the best tenth of trials{of_each} ({len(trials.good)}) that change the layer"
    axes.set_title(text, fontsize=9, loc="left")
    bar = axes.figure.colorbar(drawn, ax=axes, ticks=[0, 0.5, 1], pad=0.01, aspect=8)
    bar.ax.tick_params(labelsize=8)
