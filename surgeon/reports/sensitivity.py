"""Pictures and tables of the error of LP pairs: its bound by first order, what it really is, and what it costs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from surgeon.reports.drawing import COLOURS, INK, SOFT, save
from surgeon.reports.similarity import as_text, finish_axes

BLUE, ORANGE, GREEN, PURPLE, YELLOW = COLOURS[:5]
BLACK, GREY = INK, SOFT
_ERRORS = {
    "bound": ("bound (equation 12)", BLACK, "o"),
    "attention_shift": ("its attention shift", BLUE, ""),
    "mlp_shift": ("its shift of the first MLP", YELLOW, ""),
    "next_mlp_shift": ("its shift of the second MLP", ORANGE, ""),
    "first_order": ("first order", PURPLE, "^"),
    "error": ("measured error", GREEN, "s"),
}
_JACOBIANS = {
    "attention_jacobian": ("second attention", BLUE, "o"),
    "mlp_jacobian": ("first MLP", YELLOW, "D"),
    "next_mlp_jacobian": ("second MLP", ORANGE, "s"),
}
_NAMES = {
    "bound": "bound (equation 12)",
    "relative_bound": "bound / stream",
    "log10_output_bound": "bound x amplification (13)",
    "first_order": "first order",
    "relative_first_order": "first order / stream",
    "error": "measured local error",
    "relative_error": "measured error / stream",
}


def draw_sensitivity(table: pd.DataFrame, path: Path, label: str) -> Path:
    """Draw, by pair of layers: bound and error, Jacobians, and the damage measured with that pair in parallel.

    Args:
        table: with the columns of `sensitivity.csv`.
        label: the model's name, for the title.
    """
    figure = Figure(figsize=(max(7.2, min(12, 0.22 * len(table) + 4)), 7.6), layout="constrained", dpi=150)
    errors, jacobians, damage = figure.subplots(3, 1, sharex=True, height_ratios=(2, 1.2, 1.2))
    _lines(errors, table, _ERRORS)
    errors.set_ylabel("norm over a window's stream")
    errors.set_title(f"{label}: pairs of layers $k$, $k+1$ in parallel (LP)", fontsize=11)
    _lines(jacobians, table, _JACOBIANS)
    jacobians.set_ylabel("Jacobian's norm")
    low, high = (np.clip(table[f"divergence_{end}"], 1e-12, 1e12) for end in ("low", "high"))
    damage.fill_between(table["first"], low, high, color=GREY, alpha=0.25, lw=0)
    damage.plot(table["first"], table["divergence"], color=BLACK, marker="o", ms=3.5, lw=1.2)
    damage.set(ylabel="divergence\n(nats/token)", xlabel="first layer of the pair, $k$", yscale="log")
    positive = table["divergence"][(table["divergence"] > 0) & np.isfinite(table["divergence"])]
    if len(positive):
        damage.set_ylim(float(positive.min()) / 2, float(positive.max()) * 2)
    for axes in (errors, jacobians, damage):
        finish_axes(axes)
    return save(figure, path)


def print_sensitivity(correlations: pd.DataFrame, table: pd.DataFrame, within: int, of: int) -> None:
    """Print how well the bound, and the error itself, order the pairs by their damage, in 80 columns.

    Args:
        correlations: with `predictor`, `damage`, `rho`, `p`, `n`.
        table: with the columns of `sensitivity.csv`.
        within: in how many of the windows and pairs the error was within the bound.
        of: how many there are.
    """
    pairs = len(table)
    title = f"Spearman's rho over {pairs} pairs of layers (p in brackets; *: the best)"
    shown = Table(box=None, pad_edge=False)
    shown.add_column("by pair", no_wrap=True)
    damages = {"error": "local error", "divergence": "divergence", "log_perplexity_ratio": "log perplexity\nratio"}
    for heading in damages.values():
        shown.add_column(heading, justify="right", vertical="bottom")
    keys = list(zip(correlations["predictor"], correlations["damage"], strict=True))
    found = dict(zip(keys, zip(correlations["rho"], correlations["p"], strict=True), strict=True))
    best = {damage: max((found[key][0] for key in keys if key[1] == damage), default=np.nan) for damage in damages}
    for predictor, words in _NAMES.items():
        cells = [
            _cell(*found[predictor, damage], best[damage]) if (predictor, damage) in found else "" for damage in damages
        ]
        shown.add_row(words, *cells)
    print(title)
    print(as_text(shown))
    looseness = float(np.median(table["bound"] / table["error"])) if (table["error"] > 0).all() else np.inf
    print(f"the error is within its bound in {within} of {of} cases (pairs and windows);")
    print(f"the bound is {looseness:.3g} times the error (median over pairs)")


def _cell(rho: float, p: float, best: float) -> str:
    return "-" if np.isnan(rho) else f"{rho:.3f}{'*' if rho == best else ' '} ({p:.0e})"


def _lines(axes: Axes, table: pd.DataFrame, lines: dict[str, tuple[str, str, str]]) -> None:
    for name, (words, colour, marker) in lines.items():
        values = table[name].where(
            (table[name] > 0) & np.isfinite(table[name])
        )  # a term that is 0 (GPT-NeoX has one) has no place on this scale
        if values.notna().any():
            style = "-" if marker else ":"
            axes.plot(table["first"], values, style, color=colour, marker=marker, ms=3.5, lw=1.2, label=words)
    axes.set_yscale("log")
    axes.legend(fontsize=7.5, frameon=False, ncols=2 if len(lines) > 3 else 3)
