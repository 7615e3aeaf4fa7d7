"""Spectrum: the rank that each matrix needs, and the damage of cutting it down."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction

import numpy as np
import pandas as pd
from matplotlib.colors import Normalize

from surgeon.reports.blocks import Block, Finding, Gallery, Legend, Map, Paragraph, Table
from surgeon.reports.heatmap import scale_of
from surgeon.reports.maps import HALF, cell_table, legend_figure, map_cells, map_figure
from surgeon.reports.runs import Kind, Run, TableFile
from surgeon.words import change, listed, number

MATRICES, DAMAGE = "spectrum.csv", "damage.csv"
_METHODS = {"": "of the matrix itself (plain)", "_whitened": "of the matrix on its inputs (whitened)"}


def _show(run: Run) -> Iterator[Block]:
    matrices = run.tables[MATRICES]
    yield Paragraph(
        "The rank that holds 95% of a matrix's energy (the sum of its squared singular values), as a share of its full "
        "rank. Two factors of rank r have fewer parameters than the matrix only below about half of the full rank of a "
        "square one."
    )
    yield _ranks(matrices)
    damage = run.tables.get(DAMAGE)
    if damage is not None and len(damage):
        yield _damage_maps(damage, _base_of(run))


def _base_of(run: Run) -> float:
    base = run.record.get("base_perplexity")
    if not isinstance(base, int | float) or not base > 0:
        raise ValueError(f"{run.file} has no base_perplexity above 0; run surgeon spectrum again")
    return float(base)


def _map(
    table: pd.DataFrame,
    column: str,
    scale: Normalize,
    fields: Mapping[str, str],
    title: str,
    what: str,
    base: float | None = None,
) -> Map:
    """Weights down, layers across."""
    weights, layers = list(dict.fromkeys(table["weight"])), sorted(table["layer"].unique())
    places = [(weights.index(w), layers.index(k)) for w, k in zip(table["weight"], table["layer"], strict=True)]
    values = pd.DataFrame(np.nan, index=weights, columns=layers)
    for (row, across), value in zip(places, table[column], strict=True):
        values.iloc[row, across] = value
    cells = map_cells(values, places, table, fields, "layer {column}, {row}", base=base)
    figure = map_figure(values, scale, ("layer", ""), flat=HALF)
    return Map(figure, title, "", cells, cell_table(f"{title}: {what}", "", values), wide=True)


def _ranks(matrices: pd.DataFrame) -> Gallery:
    scale, maps = Normalize(0, 1), []
    for ending, words in _METHODS.items():
        share = f"share{ending}"
        table = matrices.assign(**{share: matrices[f"rank95{ending}"] / matrices["full_rank"]})
        fields = {share: "share of the full rank", f"rank95{ending}": "rank", f"kept95{ending}": "parameters kept"}
        title = f"Rank with 95% of the energy {words}"
        maps.append(_map(table, share, scale, fields, title, "share of the full rank"))
    return Gallery(maps, legend=Legend(legend_figure(scale), "Colours: share of the full rank"), wide=True)


def _by_rank(damage: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """The truncations, from the lowest rank to the highest: one of each matrix in every part."""
    order = damage.groupby(["layer", "weight", "method"])["rank"].rank(method="first").astype(int)
    parts = []
    for method in dict.fromkeys(damage["method"]):
        for place in sorted(order.unique()):
            part = damage[(order == place) & (damage["method"] == method)]
            if len(part):
                parts.append((f"{_rank_name(part)} ({method})", part))
    return parts


def _rank_name(part: pd.DataFrame) -> str:
    shares, ranks = (part["rank"] / part["full_rank"]).unique(), sorted({int(rank) for rank in part["rank"]})
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    share = Fraction(float(shares[0])).limit_denominator(64)
    same = all(abs(float(other) - share) < 1e-9 for other in shares)
    return f"{share} of the rank" if same else f"ranks {ranks[0]} to {ranks[-1]}"


def _damage_maps(damage: pd.DataFrame, base: float) -> Gallery:
    scale, capped = scale_of([damage[["perplexity"]]], base)
    fields = {"perplexity": "perplexity", "divergence": "divergence", "kept": "parameters kept"}
    maps = [
        _map(part, "perplexity", scale, fields, f"One matrix cut down to {name}", "perplexity", base)
        for name, part in _by_rank(damage)
    ]
    caption = f"Perplexity with one matrix alone at a lower rank, over that of the unedited model, {number(base)}."
    legend = Legend(legend_figure(scale, base, capped), f"Colours: perplexity over {number(base)}")
    return Gallery(maps, caption, legend, wide=True)


def _findings(run: Run) -> Iterator[Finding]:
    matrices = run.tables[MATRICES]
    share = (
        (matrices["rank95_whitened"] / matrices["full_rank"])
        .groupby(matrices["weight"], sort=False)
        .mean()
        .sort_values()
    )
    text = (
        f"On the inputs it gets, {share.index[0]} needs least rank for 95% of its energy "
        f"({share.iloc[0]:.0%} of the full rank on average), {share.index[-1]} most ({share.iloc[-1]:.0%})."
    )
    yield Finding("Low rank", text)
    damage = run.tables.get(DAMAGE)
    if damage is not None and len(damage):
        yield _cutting_down(damage, _base_of(run))


def _cutting_down(damage: pd.DataFrame, base: float) -> Finding:
    rows, sentences = [], []
    for name, part in _by_rank(damage):
        ratio = (part["perplexity"] / base).to_numpy()
        worst = part.iloc[int(ratio.argmax())]
        where = f"layer {int(worst['layer'])}, {worst['weight']}"
        rows.append([name, change(float(np.median(ratio))), change(float(ratio.max())), where])
        sentences.append(f"{name} {change(float(np.median(ratio)))}")
    text = f"In the median over all matrices, the perplexity with one of them cut down changes by: {listed(sentences)}."
    table = Table("Perplexity with one matrix cut down", ["to", "median", "worst", "which"], rows, left=frozenset({3}))
    return Finding("Cutting one matrix down", text, table=table)


def _missing(run: Run) -> Iterator[str]:
    damage = run.tables.get(DAMAGE)
    if damage is None or damage.empty:
        yield "What lower ranks cost was not measured (surgeon spectrum without --no-damage)."
    else:
        yield "Each matrix was cut down alone: what several at once cost is not known."


_RANKS = tuple(f"{name}95{ending}" for ending in _METHODS for name in ("rank", "kept"))
SPECTRUM = Kind(
    name="spectrum",
    title="Spectrum",
    record="spectrum.json",
    show=lambda run: list(_show(run)),
    tables=(
        TableFile(MATRICES, ("full_rank", *_RANKS), ("weight",), ("layer",)),
        TableFile(
            DAMAGE,
            ("rank", "full_rank", "kept", "perplexity", "divergence", "tokens"),
            ("weight", "method"),
            ("layer",),
            optional=True,
            may_be_empty=True,
        ),
    ),
    findings=lambda run: list(_findings(run)),
    missing=lambda run: list(_missing(run)),
    without="No spectrum: how low the rank of matrices can be is not known (surgeon spectrum).",
)
