"""Quality against effective depth: what a search found, beside the depths on the way to its budget."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from surgeon.provenance import whole_file

# Colours that stay apart for colour-blind readers and in print.
_SOURCES = {
    "window": ("contiguous window (the paper's)", "#0072B2", "o"),
    "additive": ("least sum of single pairs' damage", "#009E73", "D"),
    "neighbour": ("neighbour of the best so far", "#E69F00", "^"),
    "sampled": ("Optuna's sampler", "#999999", "."),
}

_PANELS = {"perplexity": "perplexity", "divergence": "divergence from the original (nats/token)"}


def draw_quality_against_depth(
    path: Path, profile: Mapping[float, Any], trials: Sequence[Any], best: Any, depth: float, title: str
) -> None:
    """Draw perplexity and divergence against effective depth.

    Args:
        profile: measured quality by depth, from the unedited model down to the budget.
        trials: with `source` and `measured`, all of them at `depth`.
        best: the trial that won.
    """
    figure = Figure(figsize=(9, 4.4), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, (name, label) in zip(panels, _PANELS.items(), strict=True):
        _draw_panel(axes, name, profile, trials, best, depth)
        axes.set_ylabel(label)
    figure.suptitle(title)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=8
    )
    with whole_file(path) as beside:
        figure.savefig(beside, format="png", dpi=150)


def _draw_panel(
    axes: Axes, name: str, profile: Mapping[float, Any], trials: Sequence[Any], best: Any, depth: float
) -> None:
    """One quantity against depth."""
    depths = sorted(profile, reverse=True)
    on_the_way = [getattr(profile[d], name) for d in depths]
    shift = _spread(trials)
    axes.plot(depths, on_the_way, "-", color="#444444", lw=1.2, label="additive choice at every depth", zorder=1)
    for source, (words, colour, marker) in _SOURCES.items():
        here = [(depth + shift[t.number], getattr(t.measured, name)) for t in trials if t.source == source]
        if here:
            xs, ys = zip(*here, strict=True)
            axes.scatter(xs, ys, s=26, color=colour, marker=marker, label=words, zorder=2)
    axes.scatter(
        depth + shift[best.number],
        getattr(best.measured, name),
        s=130,
        facecolors="none",
        edgecolors="#D55E00",
        lw=1.8,
        label="best",
        zorder=3,
    )
    axes.set(xlabel="effective depth (layers)", xticks=depths, xlim=(max(depths) + 0.6, depth - 0.6))
    values = [getattr(trial.measured, name) for trial in trials]
    low, high = _useful_range(on_the_way, values)
    axes.set_ylim(low, high)
    beyond = sum(value > high for value in values)
    if beyond:
        axes.text(0.02, 0.98, f"{beyond} of {len(values)} trials lie above", ha="left", va="top", fontsize=8,
                  color="#666666", transform=axes.transAxes)  # fmt: skip
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _spread(trials: Sequence[Any]) -> dict[int, float]:
    """A sideways shift for each trial, in the order they ran, so that points do not hide each other."""
    count = max(1, len(trials) - 1)
    return {trial.number: 0.3 - 0.6 * place / count for place, trial in enumerate(trials)}


def _useful_range(profile: Sequence[float], trials: Sequence[float]) -> tuple[float, float]:
    """Limits that show the profile and the better half of the trials well; a few poor ones would squeeze the rest."""
    shown, found = ([value for value in values if math.isfinite(value)] for values in (profile, trials))
    low = min([*shown, *found])
    middle = sorted(found)[len(found) // 2] if found else low
    high = max([*shown, low + 2 * (middle - low)])
    room = 0.08 * (high - low) or 0.01
    return low - room, high + room
