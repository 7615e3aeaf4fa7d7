"""Similarity: dependence of each layer on the one before it, and cheap measures that predict damage."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd
from matplotlib.colors import Normalize

from surgeon.findings.drawing import Legend, Map, Picture, columns_chart
from surgeon.findings.result import Block, Finding, RunResult, Table, table_file
from surgeon.language.operations.base import HEATMAPS
from surgeon.words import MINUS, join_words, layer_list, number

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
_DAMAGE = "divergence"
_NAMED = 3  # layers that the summary names


@dataclass(frozen=True, repr=False)
class Similarity(RunResult):
    """The result of `similarity`; layers count from 0.

    Attributes:
        layers: one row per layer, as in `similarity.csv`: `layer`; `cka_attention`, `cka_attention_debiased`,
            `cka_mlp`,
            `cka_mlp_debiased` (NaN for layer 0); `block_influence`; `attention_size` and `mlp_size`, the mean norm of a
            sublayer's output relative to the stream it reads.
        distances: one row per stretch, as in `distances.csv`: `first` and `last`, both included; `angular_distance`
            between the streams before and after it, averaged over all tokens, and `angular_distance_last_token`, over
            the last token of each window; `cosine_distance`, 1 - the mean cosine between them.
        proxies: correlations of every measure with a scan's heatmaps, as in `proxies.csv`; empty without a scan.
    """

    COMMAND = "similarity"
    RECORD = "similarity.json"
    TITLE = "Similarity"
    WITHOUT = "No similarity: how much layers depend on each other is not known (surgeon similarity)."

    layers: pd.DataFrame = table_file("similarity.csv", (*CKA, *SIZES), (), ("layer",))
    distances: pd.DataFrame = table_file(
        "distances.csv",
        ("angular_distance", "angular_distance_last_token"),
        (),
        ("first", "last"),
        optional=True,
    )
    proxies: pd.DataFrame = table_file(
        "proxies.csv",
        ("rho",),
        ("operation", "damage", "proxy", "aggregate"),
        optional=True,
        digits=6,
    )

    def section(self) -> Iterator[Block]:
        yield (
            "CKA compares what a sublayer adds with what it adds when the contribution of the layer before is taken "
            "out of its input: near 1, the layer hardly needs the one before it (Layer Parallelism, figure 5). Layer 0 "
            "has no layer before it. Debiased CKA corrects for having few tokens."
        )
        influence = (
            "Block influence is 1 minus the mean cosine between the streams before and after the layer."
        )
        near = "Near 1: the layer hardly needs it."
        titles = ("CKA with and without the layer before", "layer", "CKA")
        cka = columns_chart(
            self.layers, CKA, lambda row: f"layer {row['layer']:g}", titles, near, log=False
        )
        titles = ("How much a layer changes the stream", "layer", "share of the stream")
        sizes = columns_chart(
            self.layers, SIZES, lambda row: f"layer {row['layer']:g}", titles, influence
        )
        yield Picture([cka, sizes], name="similarity")
        if len(self.distances):
            angles = self.distances["angular_distance"]
            # Layer 0 turns the embedding almost at a right angle: under one scale with it the others would look alike.
            end = float(angles[self.distances["first"] > 0].max())
            if not end > 0:
                end = float(angles.max())
            colours = Normalize(0, end or 1.0)
            legend = Legend(colours, "Colours: angular distance", capped=bool((angles > end).any()))
            fields = {
                "angular_distance": "angle",
                "angular_distance_last_token": "angle at the last tokens",
            }
            title = "Angle between the streams before and after a stretch"
            caption = "Angular distance over all tokens; dark stretches hardly turn the stream. 0.5 is at right angles."
            drawn = Map(title, self.distances, "first", "last", fields, legend, caption)
            yield Picture([drawn], name="distances")
        if len(self.proxies):
            yield self._best_proxies()

    def summary(self) -> Iterator[Finding]:
        layers = self.layers.dropna(subset=["cka_attention_debiased", "cka_mlp_debiased"])
        if len(layers) > 1:
            lower = layers.set_index("layer")[["cka_attention_debiased", "cka_mlp_debiased"]].min(axis=1)
            order = lower.sort_values(ascending=False, kind="stable")
            count = min(_NAMED, len(order) // 2)
            least = order[:count]
            most = order[-count:]
            text = (
                f"Layers {layer_list(least.index)} depend least on the layer before them (debiased CKA of attention "
                f"and MLP at least {number(float(least.iloc[-1]), 3)}), layers {layer_list(most.index)} most (down to "
                f"{number(float(most.iloc[-1]), 3)})."
            )
            yield Finding("Who needs the layer before", text)
        if len(self.proxies):
            rows = self.proxies[self.proxies["damage"] == _DAMAGE]
            rho = rows.pivot_table(
                index=["proxy", "aggregate"], columns="operation", values="rho", sort=False
            )
            if len(rho):
                means = rho.mean(axis=1).sort_values(ascending=False, kind="stable")
                proxy, aggregate = means.index[0]
                name = str(proxy).replace("_", " ").replace("cka", f"1 {MINUS} CKA,")
                if aggregate:
                    name += f" ({aggregate})"
                best = number(float(means.iloc[0]), 3)
                kinds = join_words(HEATMAPS[name].title for name in rho.columns)
                agreed = (
                    f"Of the measures that need no scan, {name} orders the stretches most like their measured "
                    f"divergence: rank correlation {best} on average over {kinds}."
                )
                label = f"rank correlation of the best cheap measure, {name}"
                yield Finding("Which cheap measure agrees best", agreed, best, label)

    def list_missing(self) -> Iterator[str]:
        if self.proxies.empty:
            yield "Which cheap measure predicts a scan is not known: surgeon similarity --scan compares them."

    def __str__(self) -> str:
        if self.proxies.empty:
            return ""
        return str(self._best_proxies())

    def _best_proxies(self) -> Table:
        table = self.proxies
        shown = table[~table["proxy"].str.endswith(_NOT_PRINTED) & (table["damage"] == _DAMAGE)]
        rows = []
        for operation, own in shown.groupby("operation", sort=False):
            length = own.loc[own["proxy"] == "length", "rho"].max()
            best, rho = _highest(own, "rho")
            equal, at_equal = _highest(own, "rho_at_equal_length")
            found = [best, f"{rho:.3f}", f"{length:.3f}", equal, f"{at_equal:.3f}"]
            rows.append([str(operation), f"{own['n'].max()}", *found])
        note = (
            "Spearman's rho over n stretches, beside that of their mere length; and among stretches of equal length. "
            "Measures of single layers are summed over the stretch where max or mean is not said. All of them are in "
            "proxies.csv (stretches overlap, so that its p is too small)."
        )
        head = ["operation", "n", "best measure", "rho", "length", "at equal length", "rho"]
        caption = "What predicts the divergence of a stretch best"
        return Table(caption, head, rows, note, left=(2, 5))


def _highest(rows: pd.DataFrame, column: str) -> tuple[str, float]:
    if rows[column].isna().all():
        return "-", math.nan
    row = rows.iloc[int(rows[column].argmax())]
    if row["aggregate"] in ("", "sum"):
        name = str(row["proxy"])
    else:
        name = f"{row['proxy']}, {row['aggregate']}"
    return name, float(row[column])
