"""Similarity: how little each layer depends on the one before it, and which cheap measure predicts damage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from surgeon.findings.blocks import Block, Finding, Gallery, Legend, Map, Paragraph, Table
from surgeon.findings.drawing import Chart, chart, layers_across
from surgeon.findings.page_maps import MANY_LAYERS, cell_table, legend_figure, map_cells, map_figure
from surgeon.findings.runs import Kind, Run
from surgeon.findings.scan import title_of
from surgeon.findings.similarity import CKA, SIZES, Similarity, distance_map, draw_measures
from surgeon.words import MINUS, layer_list, listed, number

_DAMAGE = "divergence"
_SHOWN = 5  # proxies in the short table that are there for their average
_NAMED = 3  # layers that the summary names


def _show(run: Run[Similarity]) -> Iterator[Block]:
    layers = run.found.layers
    yield Paragraph(
        "CKA compares what a sublayer adds with what it adds when the contribution of the layer before is taken out of "
        "its input: near 1, the layer hardly needs the one before it (Layer Parallelism, figure 5). Layer 0 has no "
        "layer before it. Debiased CKA corrects for having few tokens."
    )
    influence = "Block influence is 1 minus the mean cosine between the streams before and after the layer."
    yield Gallery(
        [
            _chart(layers, CKA, "CKA", "CKA with and without the layer before", "Near 1: the layer hardly needs it."),
            _chart(layers, SIZES, "share of the stream", "How much a layer changes the stream", influence),
        ]
    )
    if len(run.found.distances):
        distances = _distances(run.found.distances)
        yield Gallery([distances], many=len(distances.cells["rows"]) > MANY_LAYERS)
    if len(run.found.proxies):
        yield from _proxies(run.found.proxies)


def _chart(layers: pd.DataFrame, measures: Mapping[str, tuple[str, int]], y: str, title: str, caption: str) -> Chart:
    figure, axes = chart("layer", y)
    layers_across(axes, int(layers["layer"].min()), int(layers["layer"].max()))
    draw_measures(axes, layers, measures, log=measures is SIZES)
    rows = [[str(int(row["layer"])), *(number(row[name]) for name in measures)] for _, row in layers.iterrows()]
    table = Table(f"{title}: values", ["layer", *(words for words, _ in measures.values())], rows, folded=True)
    return Chart(figure, title, caption, table=table)


def _distances(table: pd.DataFrame) -> Map:
    """Angular distance between the streams before and after every stretch."""
    values, scale, capped = distance_map(table)
    title = "Angle between the streams before and after a stretch"
    caption = "Angular distance over all tokens; dark stretches hardly turn the stream. 0.5 is at right angles."
    fields = {"angular_distance": "angle", "angular_distance_last_token": "angle at the last tokens"}
    cells = map_cells(values, table["first"], table["last"], table, fields, "layers {row} to {column}", "layer {row}")
    drawn = map_figure(values, scale, ("last layer", "first layer"))
    legend = Legend(legend_figure(scale, capped=capped), "Colours: angular distance")
    return Map(drawn, title, caption, cells, cell_table(f"{title}: values", "first \\ last", values), legend)


def _ranked(table: pd.DataFrame) -> pd.DataFrame:
    """Rank correlations with the divergence: a row per proxy and aggregate, a column per operation, the best first."""
    rows = table[table["damage"] == _DAMAGE]
    rho = rows.pivot_table(index=["proxy", "aggregate"], columns="operation", values="rho", sort=False)
    return rho.loc[rho.mean(axis=1).sort_values(ascending=False, kind="stable").index]


def _name(key: Any) -> str:
    proxy, aggregate = key
    words = proxy.replace("_", " ").replace("cka", f"1 {MINUS} CKA,")
    return f"{words} ({aggregate})" if aggregate else words


def _proxies(table: pd.DataFrame) -> Iterator[Block]:
    rho = _ranked(table)
    if rho.empty:
        return
    # The best on average, the best of each kind of change, and the length, which all of them have to beat.
    short = {*rho[~rho.index.get_level_values("proxy").duplicated()].head(_SHOWN).index, *rho.idxmax()}
    kept = [key for key in rho.index if key in short or _name(key) == "length"]
    yield _rho_table("Which cheap measure predicts the damage", rho.loc[kept], rho, folded=False)
    yield _rho_table("Every measure", rho, rho, folded=True)


def _rho_table(caption: str, shown: pd.DataFrame, every: pd.DataFrame, folded: bool) -> Table:
    best = every.max()
    rows, marked = [], set[tuple[int, int]]()
    for row, (key, values) in enumerate(shown.iterrows()):
        rows.append([_name(key), number(float(values.mean()), 3), *(number(v, 3) for v in values)])
        marked.update((row, column) for column, name in enumerate(shown.columns, start=2) if values[name] == best[name])
    note = (
        "Spearman's rank correlation of each measure with the divergence of the stretches in the scan; 1 would be the "
        "same order. The length of the stretch is what any measure has to beat. Marked: the best for each kind of "
        "change."
    )
    head = ["measure", "mean", *map(title_of, shown.columns)]
    return Table(caption, head, rows, "" if folded else note, folded=folded, marked=frozenset(marked))


def _findings(run: Run[Similarity]) -> Iterator[Finding]:
    layers = run.found.layers.dropna(subset=["cka_attention_debiased", "cka_mlp_debiased"])
    if len(layers) > 1:
        least = layers.set_index("layer")[["cka_attention_debiased", "cka_mlp_debiased"]].min(axis=1)
        order = least.sort_values(ascending=False, kind="stable")
        count = min(_NAMED, len(order) // 2)
        named = [(layer_list(part.index), number(float(part.iloc[-1]), 3)) for part in (order[:count], order[-count:])]
        text = (
            f"Layers {named[0][0]} depend least on the layer before them (debiased CKA of attention and MLP at least "
            f"{named[0][1]}), layers {named[1][0]} most (down to {named[1][1]})."
        )
        yield Finding("Who needs the layer before", text)
    if len(run.found.proxies) and len(rho := _ranked(run.found.proxies)):
        yield _best_proxy(rho)


def _best_proxy(rho: pd.DataFrame) -> Finding:
    means = rho.mean(axis=1)
    name = _name(means.index[0])
    kinds = listed(title_of(name) for name in rho.columns)
    text = (
        f"Of the measures that need no scan, {name} orders the stretches most like their measured "
        f"divergence: rank correlation {number(float(means.iloc[0]), 3)} on average over {kinds}"
    )
    length = [float(mean) for key, mean in means.items() if _name(key) == "length"]
    text += f"; the mere length of the stretch has {number(length[0], 3)}." if length else "."
    return Finding(
        "Which cheap measure agrees best",
        text,
        number(float(means.iloc[0]), 3),
        f"rank correlation of the best cheap measure, {name}",
    )


def _missing(run: Run[Similarity]) -> Iterator[str]:
    if run.found.proxies.empty:
        yield "Which cheap measure predicts a scan is not known: surgeon similarity --scan compares them."


SIMILARITY = Kind(
    Similarity,
    "Similarity",
    _show,
    _findings,
    _missing,
    without="No similarity: how much layers depend on each other is not known (surgeon similarity).",
)
