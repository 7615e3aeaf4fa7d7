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
    """Print which proxy orders each operation's stretches best by divergence, and how well; in 80 columns.

    Args:
        table: with the columns of `proxies.csv`, which has all the others.
    """
    shown = table[(table["damage"] == "divergence") & ~table["proxy"].str.endswith(_NOT_PRINTED)]
    printed = Table(box=None, pad_edge=False)
    for heading in ("operation", "n", "best proxy", "rho", "length", "at equal length", "rho"):
        words = heading in ("operation", "best proxy", "at equal length")
        printed.add_column(heading, justify="left" if words else "right", no_wrap=True)
    for operation, rows in shown.groupby("operation", sort=False):
        length = rows.loc[rows["proxy"] == "length", "rho"].max()
        best, rho = _best(rows, "rho")
        equal, rho_equal = _best(rows, "rho_at_equal_length")
        row = str(operation), f"{rows['n'].max()}", best, f"{rho:.3f}", f"{length:.3f}", equal, f"{rho_equal:.3f}"
        printed.add_row(*row)
    print("What predicts the divergence of a stretch best: Spearman's rho over n stretches,")
    print("beside that of its mere length; and among stretches of equal length. Proxies")
    print("of single layers are summed over the stretch where max or mean is not said.")
    print(as_text(printed))


def _best(rows: pd.DataFrame, column: str) -> tuple[str, float]:
    """The name of the proxy with the highest rank correlation, and that."""
    if rows[column].isna().all():
        return "-", float("nan")
    row = rows.sort_values(column, ascending=False, na_position="last").iloc[0]
    name = str(row["proxy"]) if row["aggregate"] in ("", "sum") else f"{row['proxy']}, {row['aggregate']}"
    return name, float(row[column])
