"""Quality against effective depth: what a search found, beside the depths on the way to its budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

# Colours that stay apart for colour-blind readers and in print.
_SOURCES = {
    "window": ("contiguous window (the paper's)", "#0072B2", "o"),
    "additive": ("least sum of single pairs' damage", "#009E73", "D"),
    "neighbour": ("neighbour of the best so far", "#E69F00", "^"),
    "sampled": ("Optuna's sampler", "#999999", "."),
}


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
    spread = _spread(trials)
    for axes, name, label in zip(
        panels, ("perplexity", "divergence"), ("perplexity", "divergence from the original (nats/token)"), strict=True
    ):
        depths = sorted(profile, reverse=True)
        axes.plot(
            depths, [getattr(profile[d], name) for d in depths], "-", color="#444444", lw=1.2,
            label="additive choice at every depth", zorder=1,
        )  # fmt: skip
        for source, (words, colour, marker) in _SOURCES.items():
            here = [(depth + spread[t.number], getattr(t.measured, name)) for t in trials if t.source == source]
            if here:
                axes.scatter(*zip(*here, strict=True), s=26, color=colour, marker=marker, label=words, zorder=2)
        found = getattr(best.measured, name)
        axes.scatter([depth + spread[best.number]], [found], s=130, facecolors="none", edgecolors="#D55E00", lw=1.8, zorder=3,
                     label="best")  # fmt: skip
        axes.set(xlabel="effective depth (layers)", ylabel=label, xticks=depths, xlim=(max(depths) + 0.6, depth - 0.9))
        axes.set_ylim(*_useful_range([getattr(profile[d], name) for d in depths], [getattr(t.measured, name) for t in trials]))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def _spread(trials: Sequence[Any]) -> dict[int, float]:
    """A small sideways shift for each trial, in the order they ran, so that points at one depth do not hide each other."""
    count = max(1, len(trials) - 1)
    return {trial.number: 0.15 - 0.75 * place / count for place, trial in enumerate(trials)}


def _useful_range(profile: Sequence[float], trials: Sequence[float]) -> tuple[float, float]:
    """Limits that show the profile and all but the worst trials, which would squeeze everything else."""
    shown = [*profile, *sorted(trials)[: max(1, round(0.9 * len(trials)))]]
    low, high = min(shown), max(shown)
    room = 0.06 * (high - low) or 0.01
    return low - room, high + room
