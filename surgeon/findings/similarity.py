"""What a similarity has found: CKA by layer, angles of stretches, and how well each proxy predicts a scan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from surgeon.findings.drawing import finish, points, scale
from surgeon.findings.maps import colour_bar, draw_map, label_map, map_side
from surgeon.findings.result import RunResult, TableFile
from surgeon.words import aligned, number

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
_NOT_PRINTED = "_debiased"  # orders stretches almost as the biased one does


@dataclass(frozen=True, repr=False)
class Similarity(RunResult):
    """The result of `similarity`; layers count from 0.

    Attributes:
        layers: one row per layer, as in `similarity.csv`: `layer`; `cka_attention`, `cka_attention_debiased`,
            `cka_mlp`, `cka_mlp_debiased` (NaN where there is no layer before it, as for layer 0); `block_influence`;
            `attention_size` and `mlp_size`, the mean norm of a sublayer's output relative to the stream it reads.
        distances: one row per stretch of layers in a row, as in `distances.csv`: `first` and `last`, both included;
            `angular_distance` between the streams before and after it, averaged over all tokens, and
            `angular_distance_last_token`, over the last token of each window; `cosine_distance`, 1 - the mean cosine
            between them.
        proxies: how every measure is correlated with a scan's heatmaps, as in `proxies.csv`; empty without a scan.
    """

    COMMAND = "similarity"
    RECORD = "similarity.json"
    TABLES: ClassVar = {
        "layers": TableFile("similarity.csv", (*CKA, *SIZES), (), ("layer",)),
        "distances": TableFile(
            "distances.csv", ("angular_distance", "angular_distance_last_token"), (), ("first", "last"), optional=True
        ),
        "proxies": TableFile(
            "proxies.csv", ("rho",), ("operation", "damage", "proxy", "aggregate"), optional=True, digits=6
        ),
    }

    layers: pd.DataFrame
    distances: pd.DataFrame = field(default_factory=pd.DataFrame)
    proxies: pd.DataFrame = field(default_factory=pd.DataFrame)

    def pictures(self) -> dict[str, Figure]:
        """`similarity`, by layer, as figure 5 of the Layer Parallelism paper; `distances`, of every stretch."""
        found = {"similarity": self._by_layer()}
        return found | ({"distances": self._by_stretch()} if len(self.distances) else {})

    def _by_layer(self) -> Figure:
        layers = self.layers
        figure = Figure(figsize=(max(6.4, min(12, 0.22 * len(layers) + 3)), 5.4), layout="constrained", dpi=150)
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        draw_measures(above, layers, CKA)
        draw_measures(below, layers, SIZES, log=True)
        above.set(ylabel="CKA", title=f"{self.label}: outputs with and without the layer before")
        above.title.set_fontsize(11)
        if above.lines:  # a model of one layer has no layer before
            above.legend(fontsize=8, frameon=False)
        below.set(xlabel="layer", ylabel="size of the update")
        keys = below.get_legend_handles_labels()
        figure.legend(*keys, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
        for axes in (above, below):
            finish(axes, layers=True)
        return figure

    def _by_stretch(self) -> Figure:
        """First layer down, last layer across, as a scan's heatmaps."""
        values, colours, beyond = distance_map(self.distances)
        side = map_side(len(values))
        figure = Figure(figsize=(side + 1.0, side), layout="constrained", dpi=150)
        axes = figure.add_subplot()
        draw_map(axes, values, colours)
        label_map(axes, values, 24, 24, 8)
        axes.set_xlabel("last layer", fontsize=9)
        axes.set_ylabel("first layer", fontsize=9)
        what = "angle between the streams\nbefore the first and after the last layer"
        axes.set_title(f"{self.label}: {what}", fontsize=11)
        bar = colour_bar(figure, [axes], colours, beyond, shrink=0.85, pad=0.02)
        pale = f", pale: up to {float(self.distances['angular_distance'].max()):.2f}" if beyond else ""
        bar.set_label(f"angular distance (0.5: at right angles{pale})", fontsize=9)
        return figure

    def __str__(self) -> str:
        """Which proxy orders each operation's stretches best by divergence, and how well; in 80 columns."""
        if self.proxies.empty:
            return ""
        is_printed = ~self.proxies["proxy"].str.endswith(_NOT_PRINTED)
        lines = [["operation", "n", "best proxy", "rho", "length", "at equal length", "rho"]]
        for operation, rows in self.proxies[is_printed & (self.proxies["damage"] == "divergence")].groupby(
            "operation", sort=False
        ):
            length = rows.loc[rows["proxy"] == "length", "rho"].max()
            (best, rho), (equal, at_equal) = (_best_proxy(rows, name) for name in ("rho", "rho_at_equal_length"))
            lines.append(
                [str(operation), f"{rows['n'].max()}", best, f"{rho:.3f}", f"{length:.3f}", equal, f"{at_equal:.3f}"]
            )
        return (
            "What predicts the divergence of a stretch best: Spearman's rho over n stretches,\n"
            "beside that of its mere length; and among stretches of equal length. Proxies\n"
            "of single layers are summed over the stretch where max or mean is not said.\n"
            f"{aligned(lines, left=(0, 2, 5))}"
        )


def draw_measures(axes: Axes, layers: pd.DataFrame, measures: Mapping[str, tuple[str, int]], log: bool = False) -> None:
    """Draw columns of `similarity.csv` by layer: shares of the stream on a logarithmic axis, CKA up to 1."""
    values = layers[list(measures)].to_numpy(dtype=float).ravel().tolist()
    scale(axes, "y", values if log else [*values, 1.0], log, zero=not log)
    for column, (words, style) in measures.items():
        rows = zip(layers["layer"], layers[column], strict=True)
        tips = [f"layer {layer}, {words}: {number(value)}" for layer, value in rows]
        points(axes, layers["layer"], layers[column], tips, style, words)


def distance_map(distances: pd.DataFrame) -> tuple[pd.DataFrame, Normalize, bool]:
    """Angular distances by first and last layer, their scale, and whether some lie beyond it."""
    layers = range(int(distances["last"].max()) + 1)
    values = distances.pivot_table(index="first", columns="last", values="angular_distance", dropna=False)
    values = values.reindex(index=layers, columns=layers)
    # Layer 0 turns the embedding almost at a right angle: under one scale with it the others would look alike.
    rest = values.loc[1:].max().max()
    end = float(rest if rest > 0 else values.max().max())
    return values, Normalize(0, end or 1.0), bool((values > end).to_numpy().any())


def _best_proxy(rows: pd.DataFrame, column: str) -> tuple[str, float]:
    """The name of the proxy with the highest rank correlation, and that."""
    if rows[column].isna().all():
        return "-", math.nan
    row = rows.iloc[int(rows[column].argmax())]
    name = str(row["proxy"]) if row["aggregate"] in ("", "sum") else f"{row['proxy']}, {row['aggregate']}"
    return name, float(row[column])
