"""Pictures and the printed table of a spectrum: damage by layer and matrix, ranks, curves of singular values."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.table import Table

from surgeon.analysis.factors.matrices import TargetRank
from surgeon.analysis.spectrum import Spectrum
from surgeon.analysis.spectrum_tables import METHODS
from surgeon.reports.drawing import save
from surgeon.reports.maps import colour_bar, draw_map, label_map
from surgeon.reports.similarity import as_text

_COLOURS = "viridis"
_PANELS_ACROSS = 4
_RANKS_ACROSS = 4
_DECADES = 5  # of damage, below the worst, that have colours of their own
_MOST_NUMBERS = 40  # layers, beyond which the cells of a map are too low for numbers
_INCHES_PER_LETTER = 0.09  # of a title
_LEAST_VALUE = 1e-4  # of the largest singular value
_LINES = ListedColormap(matplotlib.colormaps[_COLOURS](np.linspace(0, 0.92, 256)))  # yellow is faint on white


def draw_spectrum(found: Spectrum, ranks: Sequence[TargetRank], folder: Path, label: str) -> list[Path]:
    """Write `rank95.png`, `singular-values-plain.png`, `singular-values-whitened.png`, and with damage `damage.png`.

    Args:
        ranks: those asked for, a panel of `damage.png` each.
        label: the model's name, for the titles.

    Returns:
        The files written.
    """
    written = [draw_damage(found.damage, ranks, folder / "damage.png", label)] if len(found.damage) else []
    written.append(draw_ranks(found.matrices, folder / "rank95.png", label))
    for method in METHODS:
        values = found.values[found.values["method"] == method]
        written.append(draw_values(values, folder / f"singular-values-{method}.png", label))
    return written


def draw_damage(damage: pd.DataFrame, ranks: Sequence[TargetRank], path: Path, label: str) -> Path:
    """Draw divergence by layer (down) and matrix (across), a panel for each rank, all under one colour scale.

    Args:
        damage: with the columns of `damage.csv`.
    """
    rows = damage["full_rank"]
    panels = {rank: damage[damage["rank"] == rows.map(rank.of)] for rank in ranks}
    weights = list(dict.fromkeys(damage["weight"]))
    across = min(_PANELS_ACROSS, len(panels))
    down = math.ceil(len(panels) / across)
    layers = damage["layer"].nunique()
    size = (across * max(2.1, 0.42 * len(weights)) + 1.4, down * _height(layers) + 0.9)
    figure = Figure(figsize=size, layout="constrained", dpi=160)
    axes = figure.subplots(down, across, squeeze=False)
    scale = _damage_scale(damage["divergence"])
    for place, panel in enumerate(axes.flat):
        if place >= len(panels):
            panel.set_axis_off()
            continue
        rank, part = list(panels.items())[place]
        # Infinity and zero, which have no logarithm, would be left blank like cells that were not measured.
        _map(panel, _by_layer(part, "divergence").clip((scale.vmin or 0) / 2, (scale.vmax or 1) * 2), scale)
        kept = part.groupby("weight")["kept"].mean()
        panel.set_xticks(range(len(weights)), [f"{w}\n{kept[w]:.0%}" for w in weights], fontsize=7)
        panel.set_title(f"rank {rank} of full" if rank.is_share else f"rank {rank}", fontsize=10)
        if place % across == 0:
            panel.set_ylabel("layer", fontsize=9)
    _damage_bar(figure, list(axes.flat), scale, damage["divergence"])
    method = damage["method"].iloc[0]
    _title(figure, f"{label}: one matrix at a lower rank ({method}); below its name, the parameters kept")
    return save(figure, path)


def draw_ranks(matrices: pd.DataFrame, path: Path, label: str) -> Path:
    """Draw the rank that holds 95% of the energy, as a share of the full rank: plain beside whitened.

    Args:
        matrices: with the columns of `spectrum.csv`.
    """
    weights = list(dict.fromkeys(matrices["weight"]))
    layers = matrices["layer"].nunique()
    size = (2 * max(2.4, 0.5 * len(weights)) + 1.4, _height(layers) + 0.9)
    figure = Figure(figsize=size, layout="constrained", dpi=160)
    axes = figure.subplots(1, 2, sharey=True)
    scale = Normalize(0, 1)
    for panel, (method, ending) in zip(axes, METHODS.items(), strict=True):
        shares = matrices.assign(share=matrices[f"rank95{ending}"] / matrices["full_rank"])
        values = _by_layer(shares, "share")
        _map(panel, values, scale)
        if layers <= _MOST_NUMBERS:
            _write_numbers(panel, values)
        panel.set_xticks(range(len(weights)), weights, fontsize=8)
        panel.set_title(method, fontsize=10)
    axes[0].set_ylabel("layer", fontsize=9)
    bar = colour_bar(figure, list(axes), scale, False, shrink=0.85, pad=0.02)
    bar.set_label("rank / full rank", fontsize=9)
    _title(figure, f"{label}: rank with 95% of the energy")
    return save(figure, path)


def draw_values(values: pd.DataFrame, path: Path, label: str) -> Path:
    """Draw singular values relative to the largest one, a panel for each weight, a line for each layer.

    Args:
        values: with the columns of `singular_values.csv`, of one method.
    """
    weights = list(dict.fromkeys(values["weight"]))
    across = min(_PANELS_ACROSS, len(weights))
    down = math.ceil(len(weights) / across)
    figure = Figure(figsize=(2.9 * across + 1.2, 2.5 * down + 0.6), layout="constrained", dpi=150)
    axes = figure.subplots(down, across, squeeze=False, sharey=True)
    layers = sorted(values["layer"].unique())
    scale = Normalize(layers[0], max(layers[-1], layers[0] + 1))
    least = 1.0
    for place, panel in enumerate(axes.flat):
        if place >= len(weights):
            panel.set_axis_off()
            continue
        for layer, line in values[values["weight"] == weights[place]].groupby("layer"):
            relative = (line["value"] / line["value"].max()).to_numpy()
            least = min(least, float(relative[relative > 0].min(initial=1.0)))
            shown = np.where(relative > 0, relative, np.nan)
            panel.plot(line["index"] + 1, shown, color=_LINES(scale(layer)), lw=0.9)
        panel.set_title(weights[place], fontsize=10)
        _finish_values(panel, is_lowest=place + across >= len(weights), is_first=place % across == 0)
    axes[0, 0].set_ylim(max(_LEAST_VALUE, least / 1.3), 1.3)
    bar = figure.colorbar(ScalarMappable(scale, _LINES), ax=list(axes.flat), pad=0.02)
    bar.locator = MaxNLocator(nbins=10, integer=True)
    bar.ax.tick_params(labelsize=8)
    bar.set_label("layer", fontsize=9)
    _title(figure, f"{label}: singular values, {values['method'].iloc[0]}")
    return save(figure, path)


def print_spectrum(found: Spectrum, ranks: Sequence[TargetRank]) -> None:
    """Print, for each weight, medians over layers of the rank with 95% of the energy and of divergence, in 80 columns.

    Args:
        ranks: those that damage was measured at.
    """
    print("Medians over layers: rank with 95% of the energy, as a share of the full rank")
    if len(found.damage):
        print("(whitened: weighed by the inputs); divergence at lower ranks, nats per token")
    for start in range(0, max(1, len(ranks)), _RANKS_ACROSS):
        print(as_text(_medians(found, ranks[start : start + _RANKS_ACROSS])))


def _medians(found: Spectrum, ranks: Sequence[TargetRank]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("weight", no_wrap=True, vertical="bottom")
    at_ranks = [f"at rank\n{rank}" + " full" * rank.is_share for rank in ranks]
    for heading in ("out x in", "rank95\nplain", "rank95\nwhitened", *at_ranks):
        table.add_column(heading, justify="right", vertical="bottom")
    for weight, rows in found.matrices.groupby("weight", sort=False):
        first = rows.iloc[0]
        shares = [(rows[f"rank95{ending}"] / rows["full_rank"]).median() for ending in METHODS.values()]
        cells = [f"{first['out_features']} x {first['in_features']}", *(f"{share:.2f}" for share in shares)]
        damage = found.damage[found.damage["weight"] == weight]
        at = [damage[damage["rank"] == damage["full_rank"].map(rank.of)] for rank in ranks]
        table.add_row(str(weight), *cells, *(f"{part['divergence'].median():.3g}" for part in at))
    return table


def _by_layer(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """Values by layer and weight, in the order of the table; NaN where there is none."""
    table = rows.pivot_table(index="layer", columns="weight", values=column, sort=False, dropna=False)
    return table.reindex(columns=list(dict.fromkeys(rows["weight"]))).sort_index()


def _damage_scale(divergence: pd.Series[float]) -> Normalize:
    """Logarithmic, over the last few decades up to the worst finite value."""
    finite = divergence[np.isfinite(divergence) & (divergence > 0)]
    if finite.empty:
        return Normalize(0, 1)
    worst = float(finite.max())
    return LogNorm(max(float(finite.min()), worst / 10**_DECADES) * (1 - 1e-9), worst * (1 + 1e-9))


def _map(axes: Axes, values: pd.DataFrame, scale: Normalize) -> None:
    draw_map(axes, values, scale, aspect="auto")
    label_map(axes, values, len(values.columns), 20, 8)


def _write_numbers(axes: Axes, values: pd.DataFrame) -> None:
    for (row, column), value in np.ndenumerate(values.to_numpy()):
        colour = "white" if value < 0.6 else "black"
        axes.text(column, row, f"{100 * value:.0f}", ha="center", va="center", fontsize=6, color=colour)


def _damage_bar(figure: Figure, axes: list[Axes], scale: Normalize, divergence: pd.Series[float]) -> None:
    above = bool(np.isinf(divergence).any())
    bar = colour_bar(
        figure, axes, scale, above, below=bool((divergence < (scale.vmin or 0)).any()), shrink=0.85, pad=0.02
    )
    bar.set_label("divergence, nats per token", fontsize=9)


def _finish_values(axes: Axes, is_lowest: bool, is_first: bool) -> None:
    axes.set_yscale("log")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    if is_lowest:
        axes.set_xlabel("number", fontsize=9)
    if is_first:
        axes.set_ylabel("relative to the largest", fontsize=9)


def _title(figure: Figure, words: str) -> None:
    """Above all panels, on as many lines as it takes to fit."""
    figure.suptitle(textwrap.fill(words, int(figure.get_figwidth() / _INCHES_PER_LETTER)), fontsize=11)


def _height(layers: int) -> float:
    """Inches of a map: more for more layers, so that a cell stays visible."""
    return min(9.0, max(2.4, 0.17 * layers + 0.8))
