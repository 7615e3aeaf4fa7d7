"""Spectrum: the rank that each matrix needs, and the damage of cutting it down."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pandas as pd
from matplotlib.colors import Normalize

from surgeon.findings.blocks import Block, Finding, Gallery, Legend, Map, Paragraph, Table
from surgeon.findings.page_maps import HALF, cell_table, legend_figure, map_cells, map_figure
from surgeon.findings.runs import Kind, Run
from surgeon.findings.scan import scale_of
from surgeon.findings.spectrum import METHODS, Spectrum, by_layer
from surgeon.words import change, listed, number


def _show(run: Run[Spectrum]) -> Iterator[Block]:
    yield Paragraph(
        "The rank that holds 95% of a matrix's energy (the sum of its squared singular values), as a share of its full "
        "rank. Two factors of rank r have fewer parameters than the matrix only below about half of the full rank of a "
        "square one."
    )
    yield _ranks(run.found)
    if len(run.found.damage):
        yield _damage_maps(run.found)


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
    values = by_layer(table, column).T
    cells = map_cells(values, table["weight"], table["layer"], table, fields, "layer {column}, {row}", base=base)
    figure = map_figure(values, scale, ("layer", ""), flat=HALF)
    return Map(figure, title, "", cells, cell_table(f"{title}: {what}", "", values), wide=True)


def _ranks(spectrum: Spectrum) -> Gallery:
    scale, maps = Normalize(0, 1), []
    for method, ending in METHODS.items():
        fields = {"share": "share of the full rank", f"rank95{ending}": "rank", f"kept95{ending}": "parameters kept"}
        title = (
            f"Rank with 95% of the energy of the matrix {'itself' if method == 'plain' else 'on its inputs'} ({method})"
        )
        maps.append(_map(spectrum.shares(method), "share", scale, fields, title, "share of the full rank"))
    return Gallery(maps, legend=Legend(legend_figure(scale), "Colours: share of the full rank"), wide=True)


def _by_rank(spectrum: Spectrum) -> Iterator[tuple[str, pd.DataFrame]]:
    """The truncations with the name of their rank."""
    for rank, part in spectrum.truncations():
        name = f"{rank} of the rank" if rank.is_share else f"rank {rank}"
        yield f"{name} ({part['method'].iloc[0]})", part


def _damage_maps(spectrum: Spectrum) -> Gallery:
    base = spectrum.base_perplexity
    scale, capped = scale_of([spectrum.damage[["perplexity"]]], base)
    fields = {"perplexity": "perplexity", "divergence": "divergence", "kept": "parameters kept"}
    maps = [
        _map(part, "perplexity", scale, fields, f"One matrix cut down to {name}", "perplexity", base)
        for name, part in _by_rank(spectrum)
    ]
    caption = f"Perplexity with one matrix alone at a lower rank, over that of the unedited model, {number(base)}."
    legend = Legend(legend_figure(scale, base, capped), f"Colours: perplexity over {number(base)}")
    return Gallery(maps, caption, legend, wide=True)


def _findings(run: Run[Spectrum]) -> Iterator[Finding]:
    share = run.found.shares("whitened").groupby("weight", sort=False)["share"].mean().sort_values()
    text = (
        f"On the inputs it gets, {share.index[0]} needs least rank for 95% of its energy "
        f"({share.iloc[0]:.0%} of the full rank on average), {share.index[-1]} most ({share.iloc[-1]:.0%})."
    )
    yield Finding("Low rank", text)
    if len(run.found.damage):
        yield _cutting_down(run.found)


def _cutting_down(spectrum: Spectrum) -> Finding:
    rows, sentences = [], []
    for name, part in _by_rank(spectrum):
        ratio = (part["perplexity"] / spectrum.base_perplexity).to_numpy()
        worst = part.iloc[int(ratio.argmax())]
        where = f"layer {int(worst['layer'])}, {worst['weight']}"
        rows.append([name, change(float(np.median(ratio))), change(float(ratio.max())), where])
        sentences.append(f"{name} {change(float(np.median(ratio)))}")
    text = f"In the median over all matrices, the perplexity with one of them cut down changes by: {listed(sentences)}."
    table = Table("Perplexity with one matrix cut down", ["to", "median", "worst", "which"], rows, left=frozenset({3}))
    return Finding("Cutting one matrix down", text, table=table)


def _missing(run: Run[Spectrum]) -> Iterator[str]:
    if run.found.damage.empty:
        yield "What lower ranks cost was not measured (surgeon spectrum without --no-damage)."
    else:
        yield "Each matrix was cut down alone: what several at once cost is not known."


SPECTRUM = Kind(
    Spectrum,
    "Spectrum",
    _show,
    _findings,
    _missing,
    without="No spectrum: how low the rank of matrices can be is not known (surgeon spectrum).",
)
