"""Pictures and tables of similarity: CKA against layer, angular distances, and how well each proxy predicts a scan."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.table import Table

from surgeon.provenance import whole_file

# Colours that stay apart for colour-blind readers and in print.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#666666"
_CKA = {
    "cka_attention": ("attention", BLUE, "-", "o"),
    "cka_mlp": ("MLP", ORANGE, "-", "s"),
    # Darker, and over the others: with many tokens they lie on them.
    "cka_attention_debiased": ("attention, debiased", "#003554", "--", ""),
    "cka_mlp_debiased": ("MLP, debiased", "#5E2900", "--", ""),
}
_WIDTH = 80
_OPERATIONS_ACROSS = 4
_NOT_PRINTED = "_debiased"  # orders stretches almost as the biased one does


def draw_similarity(layers: pd.DataFrame, path: Path, label: str) -> Path:
    """Draw CKA without the previous layer against layer, as figure 5 of the Layer Parallelism paper, and influence.

    Args:
        layers: with the columns of `similarity.csv`.
        label: the model's name, for the title.
    """
    figure = Figure(figsize=(max(6.4, min(12, 0.22 * len(layers) + 3)), 5.4), layout="constrained", dpi=150)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for name, (words, colour, line, marker) in _CKA.items():
        above.plot(layers["layer"], layers[name], line, color=colour, marker=marker, ms=4, lw=1.4, label=words)
    above.set(ylabel="CKA", ylim=(min(0.0, float(layers[list(_CKA)].min().min())) - 0.02, 1.02))
    above.set_title(f"{label}: outputs with and without the layer before", fontsize=11)
    above.legend(fontsize=8, frameon=False)
    for name, words, colour, marker in (
        ("block_influence", "block influence", GREEN, "D"),
        ("attention_size", "attention's output / stream", BLUE, ""),
        ("mlp_size", "MLP's output / stream", ORANGE, ""),
    ):
        below.plot(layers["layer"], layers[name], color=colour, marker=marker, ms=3.5, lw=1.2, label=words)
    below.set(xlabel="layer", ylabel="size of the update", yscale="log")
    handles = below.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    for axes in (above, below):
        finish_axes(axes)
    return save(figure, path)


def draw_distances(distances: pd.DataFrame, path: Path, label: str) -> Path:
    """Draw the angular distance of every stretch: first layer down, last layer across, as a scan's heatmaps.

    Args:
        distances: with the columns of `distances.csv`.
    """
    num_layers = int(distances["last"].max()) + 1
    values = np.full((num_layers, num_layers), np.nan)
    values[distances["first"], distances["last"]] = distances["angular_distance"]
    side = min(7.5, max(4.6, 0.24 * num_layers + 1.0))
    figure = Figure(figsize=(side + 1.0, side), layout="constrained", dpi=150)
    axes = figure.add_subplot()
    colours = matplotlib.colormaps["viridis"].with_extremes(bad="0.88", over="#fff6c2")
    # Layer 0 turns the embedding almost at a right angle: under one scale with it the others would look alike.
    rest = values[1:][~np.isnan(values[1:])]
    end = float(rest.max() if len(rest) else values[0, -1])
    image = axes.imshow(np.ma.masked_invalid(values), cmap=colours, interpolation="nearest", vmin=0, vmax=end)
    axes.set_xlabel("last layer", fontsize=9)
    axes.set_ylabel("first layer", fontsize=9)
    axes.set_title(f"{label}: angle between the streams\nbefore the first and after the last layer", fontsize=11)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=16, integer=True))
    axes.tick_params(labelsize=8, length=2)
    beyond = bool((values > end).any())
    bar = figure.colorbar(image, ax=axes, shrink=0.85, pad=0.02, extend="max" if beyond else "neither")
    bar.ax.tick_params(labelsize=8)
    pale = f", pale: up to {np.nanmax(values):.2f}" if beyond else ""
    bar.set_label(f"angular distance (0.5: at right angles{pale})", fontsize=9)
    return save(figure, path)


def finish_axes(axes: Axes) -> None:
    """Whole layers on the x axis, a faint grid, no box."""
    axes.xaxis.set_major_locator(MaxNLocator(nbins=20, integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(which="both", labelsize=8)


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as a PNG file that is whole or not there."""
    with whole_file(path) as beside:
        figure.savefig(beside, format="png")
    return path


def as_text(table: Table) -> str:
    """A table as lines of up to 80 columns."""
    console = Console(width=_WIDTH, highlight=False, file=StringIO())
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def print_proxies(table: pd.DataFrame) -> None:
    """Print how well each proxy orders each operation's stretches, the best one marked, in 80 columns.

    Args:
        table: with the columns of `proxies.csv`.
    """
    shown = table[~table["proxy"].str.endswith(_NOT_PRINTED) & (table["aggregate"] != "mean")]
    operations = list(dict.fromkeys(table["operation"]))
    for start in range(0, len(operations), _OPERATIONS_ACROSS):
        part = operations[start : start + _OPERATIONS_ACROSS]
        for damage, column, words in (
            ("divergence", "rho", "divergence"),
            ("divergence", "rho_at_equal_length", "divergence, at equal length"),
            ("log_perplexity_ratio", "rho", "log perplexity ratio"),
        ):
            rows = shown[(shown["damage"] == damage) & shown["operation"].isin(part)]
            _print_correlations(rows, part, column, f"Spearman's rho with {words} (*: the best proxy)")


def _print_correlations(rows: pd.DataFrame, operations: list[str], column: str, title: str) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("proxy", no_wrap=True)
    best = {}
    for operation in operations:
        values = rows[rows["operation"] == operation]
        table.add_column(f"{operation}\nn={values['n'].max()}", justify="right", vertical="bottom")
        best[operation] = values[column].max()
    for (proxy, aggregate), values in rows.groupby(["proxy", "aggregate"], sort=False):
        by_operation = values.set_index("operation")[column]
        cells = [_cell(by_operation[operation], best[operation]) for operation in operations]
        table.add_row(f"{proxy}: {aggregate}" if aggregate else str(proxy), *cells)
    print(title)
    print(as_text(table))


def _cell(rho: float, best: float) -> str:
    return "-  " if np.isnan(rho) else f"{rho:.3f}" + (" *" if rho == best else "  ")
