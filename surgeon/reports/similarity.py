"""Pictures and tables of similarity: CKA against layer, angular distances, and how well each proxy predicts a scan."""

from __future__ import annotations

from collections.abc import Mapping
from io import StringIO
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.table import Table

from surgeon.reports.drawing import COLOURS, points, save, scale
from surgeon.reports.maps import colour_bar, draw_map, label_map
from surgeon.words import number

BLUE, ORANGE = COLOURS[:2]
# What is drawn of each column: its words and its style.
CKA = {
    "cka_attention": ("attention", 0),
    "cka_mlp": ("MLP", 1),
    "cka_attention_debiased": ("attention, debiased", 2),
    "cka_mlp_debiased": ("MLP, debiased", 3),
}
SIZES = {
    "block_influence": ("block influence", 4),
    "attention_size": ("attention's output / stream", 0),
    "mlp_size": ("MLP's output / stream", 1),
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
    draw_measures(above, layers, CKA)
    draw_measures(below, layers, SIZES, log=True)
    above.set(ylabel="CKA", title=f"{label}: outputs with and without the layer before")
    above.title.set_fontsize(11)
    if above.lines:  # a model of one layer has no layer before
        above.legend(fontsize=8, frameon=False)
    below.set(xlabel="layer", ylabel="size of the update")
    figure.legend(*below.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    for axes in (above, below):
        finish_axes(axes)
    return save(figure, path)


def draw_measures(axes: Axes, layers: pd.DataFrame, measures: Mapping[str, tuple[str, int]], log: bool = False) -> None:
    """Draw columns of `similarity.csv` by layer: shares of the stream on a logarithmic axis, CKA up to 1."""
    values = layers[list(measures)].to_numpy(dtype=float).ravel().tolist()
    scale(axes, "y", values if log else [*values, 1.0], log, zero=not log)
    for column, (words, style) in measures.items():
        rows = zip(layers["layer"], layers[column], strict=True)
        tips = [f"layer {layer}, {words}: {number(value)}" for layer, value in rows]
        points(axes, layers["layer"], layers[column], tips, style, words)


def draw_distances(distances: pd.DataFrame, path: Path, label: str) -> Path:
    """Draw the angular distance of every stretch: first layer down, last layer across, as a scan's heatmaps.

    Args:
        distances: with the columns of `distances.csv`.
    """
    values, scale, beyond = distance_map(distances)
    side = min(7.5, max(4.6, 0.24 * len(values) + 1.0))
    figure = Figure(figsize=(side + 1.0, side), layout="constrained", dpi=150)
    axes = figure.add_subplot()
    draw_map(axes, values, scale)
    label_map(axes, values, 24, 24, 8)
    axes.set_xlabel("last layer", fontsize=9)
    axes.set_ylabel("first layer", fontsize=9)
    axes.set_title(f"{label}: angle between the streams\nbefore the first and after the last layer", fontsize=11)
    bar = colour_bar(figure, [axes], scale, beyond, shrink=0.85, pad=0.02)
    pale = f", pale: up to {float(distances['angular_distance'].max()):.2f}" if beyond else ""
    bar.set_label(f"angular distance (0.5: at right angles{pale})", fontsize=9)
    return save(figure, path)


def distance_map(distances: pd.DataFrame) -> tuple[pd.DataFrame, Normalize, bool]:
    """Angular distances by first and last layer, their scale, and whether some lie beyond it."""
    layers = range(int(distances["last"].max()) + 1)
    values = distances.pivot_table(index="first", columns="last", values="angular_distance", dropna=False)
    values = values.reindex(index=layers, columns=layers)
    # Layer 0 turns the embedding almost at a right angle: under one scale with it the others would look alike.
    rest = values.loc[1:].max().max()
    end = float(rest if rest > 0 else values.max().max())
    return values, Normalize(0, end or 1.0), bool((values > end).to_numpy().any())


def finish_axes(axes: Axes) -> None:
    """Whole layers on the x axis, a faint grid, no box."""
    axes.xaxis.set_major_locator(MaxNLocator(nbins=20, integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(which="both", labelsize=8)


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
