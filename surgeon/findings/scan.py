"""What a scan has found: its cells, its heatmaps and its curves.

Heatmaps are drawn like figure 4 of the Layer Parallelism paper, first layer down, last layer across; those over the
values of a parameter have the layers down and these values across. Curves are those of its figure 7: perplexity against
where a stretch ends, one line per length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, LinearSegmentedColormap, ListedColormap, Normalize, to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from surgeon.findings.drawing import ORDERED, SOFT, finish, points, rule, scale
from surgeon.findings.maps import (
    CAP,
    MARKED,
    colour_bar,
    damage,
    damage_scale,
    draw_map,
    label_map,
    largest_shown,
    map_side,
    ratio_of,
)
from surgeon.findings.result import RunResult, TableFile, base_of
from surgeon.language.operations.declare import HEATMAPS
from surgeon.words import allowance

MOST_LINES = 16
_PANELS_IN_A_ROW = 5
_ENDS, _KNOWN = ("first", "last"), {"operation": HEATMAPS}


@dataclass(frozen=True, repr=False)
class Scan(RunResult):
    """The result of a scan.

    Attributes:
        cells: one row per cell, with the columns of `cells.csv`: first and last layer are both included, from 0; then
            the parameters that maps vary, where some do, each with its value in the cells of its maps;
            perplexity with its 95% interval; divergence in nats per token, likewise; greedy_acceptance, the share of
            tokens at which the original's likeliest one is the cell's, too (empty in scans of before that was
            measured): how often what the cell drafts is accepted; sampled_acceptance, where it was asked for, the mean
            over tokens of sum_v min(p_v, q_v): the same of tokens that are drawn; tokens are those of the text whose
            prediction the row rests on; sublayers_run counts what ran for this cell and not already for one before it
            (a sublayer that ran on half of the windows counts a half).
        base_perplexity: of the unedited model.
        permutations: one row per random order, as in `permutations.csv`; empty if there are none.
        experts: one row per expert of the model's mixtures where its map was asked for, as in `experts.csv`: load, the
            share of tokens that it gets; of these the mean weight, size of what it makes of them, and saliency
            (`surgeon.analysis.experts`).
        loads: for each expert that is left out (`without`), the loads of the others of its layer, as in `loads.csv`.
        cap: colours of maps end at this multiple of the base perplexity, at the latest.
    """

    COMMAND = "scan"
    RECORD = "scan.json"
    TABLES: ClassVar = {
        "cells": TableFile(
            "cells.csv", ("perplexity", "divergence", "tokens"), ("operation",), _ENDS, _KNOWN, missing=""
        ),
        "permutations": TableFile(
            "permutations.csv", ("perplexity",), ("operation", "order"), _ENDS, _KNOWN, optional=True, missing=""
        ),
        "experts": TableFile(
            "experts.csv", ("expert", "load", "weight", "size", "saliency"), layers=("layer",), optional=True
        ),
        "loads": TableFile("loads.csv", ("without", "expert", "load"), layers=("layer",), optional=True),
    }

    cells: pd.DataFrame
    base_perplexity: float
    permutations: pd.DataFrame = field(default_factory=pd.DataFrame)
    experts: pd.DataFrame = field(default_factory=pd.DataFrame)
    loads: pd.DataFrame = field(default_factory=pd.DataFrame)
    cap: float = CAP

    @classmethod
    def facts(cls, record: dict[str, Any], file: Path) -> dict[str, Any]:
        return {"base_perplexity": base_of(record, file, cls.COMMAND)}

    def pictures(self) -> dict[str, Figure]:
        """`heatmaps`, of all operations over stretches; `heatmap-<operation>` and `curves-<operation>` of each.

        A map of its own has a scale of its own, so that small damage can be told apart; side by side they share one.
        """
        names = list(self.cells["operation"].unique())
        over_stretches = [name for name in names if varied_by(name) is None]
        found = {"heatmaps": self._overview(over_stretches)} if len(over_stretches) > 1 else {}
        found |= {f"heatmap-{name}": self._heatmap(name) for name in names}
        found |= {"experts": self._experts()} if len(self.experts) else {}
        drawn = ((name, self._curves(name)) for name, heatmap in HEATMAPS.items() if heatmap.curves)
        return found | {f"curves-{name}": figure for name, figure in drawn if figure is not None}

    def _experts(self) -> Figure:
        """What each expert gets and gives, layers down and experts across."""
        figure = Figure(figsize=(9.6, 4.2), layout="constrained", dpi=160)
        figure.suptitle(f"Experts: {self.label}", fontsize=12)
        names = {"load": "load: share of tokens", "saliency": "share of the layer's saliency (REAP)"}
        for panel, (column, title) in zip(figure.subplots(1, len(names)), names.items(), strict=True):
            values = self.experts.pivot(index="layer", columns="expert", values=column)
            if column == "saliency":  # of which some layers have many times as much as others
                values = values.div(values.sum(axis=1), axis=0)
            colours = Normalize(0.0, float(values.to_numpy().max()) or 1.0)
            draw_map(panel, values, colours, aspect="auto")
            label_map(panel, values, 16, 24, 8)
            panel.set(xlabel="expert", ylabel="layer")
            panel.set_title(title, fontsize=10)
            colour_bar(figure, [panel], colours, above=False)
        return figure

    def _of(self, name: str) -> pd.DataFrame:
        return self.cells[self.cells["operation"] == name]

    def _heatmap(self, name: str) -> Figure:
        values = grid(self._of(name), varied_by(name))
        size = map_side(max(values.shape))
        figure = Figure(figsize=(size + 1.0, size), layout="constrained", dpi=160)
        axes = figure.add_subplot()
        colours, capped = scale_of([values], self.base_perplexity, self.cap)
        _draw_heatmap(axes, values, colours, self.base_perplexity, named_across(name), ticks=24)
        _colour_bar(figure, [axes], colours, capped)
        axes.set_title(f"{title_of(name)}: {self._of_what}", fontsize=11)
        return figure

    @property
    def _of_what(self) -> str:
        return f"{self.label}, base perplexity {self.base_perplexity:.4g}"

    def _overview(self, names: Sequence[str]) -> Figure:
        """The maps of some operations side by side, in as few rows as fit, under one colour scale."""
        same = grid(self.cells[self.cells["operation"].isin(names)])
        grids = {name: grid(self._of(name)).reindex_like(same) for name in names}
        rows = math.ceil(len(grids) / _PANELS_IN_A_ROW)
        columns = math.ceil(len(grids) / rows)
        figure = Figure(figsize=(2.3 * columns + 0.9, 2.5 * rows + 0.5), layout="constrained", dpi=200)
        colours, capped = scale_of(list(grids.values()), self.base_perplexity, self.cap)
        panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
        for place, (panel, (name, values)) in enumerate(zip(panels, grids.items(), strict=False)):
            _draw_heatmap(panel, values, colours, self.base_perplexity, None, ticks=8)
            panel.set_title(f"({chr(ord('a') + place)}) {title_of(name)}", fontsize=11)
            if place % columns:
                panel.set_ylabel("")
            if place + columns < len(grids):
                panel.set_xlabel("")
            else:
                panel.tick_params(labelbottom=True)
        for panel in panels[len(grids) :]:
            panel.set_visible(False)
        _colour_bar(figure, list(panels), colours, capped)
        figure.suptitle(self._of_what, fontsize=12)
        return figure

    def _curves(self, name: str) -> Figure | None:
        """Perplexity over the last layer of a stretch; the colour of a line is the number of layers."""
        cells = self._of(name)
        length = cells["last"] - cells["first"] + 1
        # Layers that fill no group stay as they were, so that other lengths say nothing new.
        cells = cells.assign(length=length)[length % HEATMAPS[name].group == 0]
        if cells.empty:
            return None
        figure = Figure(figsize=(7.2, 4.4), layout="constrained", dpi=160)
        axes = figure.add_subplot(title=f"{title_of(name)}: {self._of_what}")
        axes.title.set_fontsize(11)
        end = largest_shown(cells["perplexity"], self.base_perplexity, self.cap)
        hues = draw_lengths(axes, cells, self.base_perplexity, end)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=16, integer=True))
        axes.set_xlabel("last layer of the stretch (end index)", fontsize=9)
        axes.set_ylabel("perplexity (dashed: base)", fontsize=9)
        finish(axes)
        beyond = int((cells["perplexity"] > end).sum())
        if beyond:
            text = f"{beyond} of {len(cells)} stretches lie above (hollow)"
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
            where: Any = {"ha": "right", "va": "top", "transform": axes.transAxes, "bbox": box, "zorder": 5}
            axes.text(0.99, 0.95, text, fontsize=8, color=SOFT, **where)
        lengths = BoundaryNorm(np.arange(len(hues) + 1) - 0.5, len(hues))
        bar = figure.colorbar(ScalarMappable(lengths, ListedColormap([*hues.values()])), ax=axes, pad=0.02)
        bar.set_ticks(list(range(len(hues))), labels=[str(length) for length in hues])
        bar.minorticks_off()
        bar.ax.tick_params(labelsize=8, length=0)
        bar.set_label("layers in the stretch (Δ)", fontsize=9)
        return figure


def title_of(operation: str) -> str:
    """As pictures name an operation."""
    return HEATMAPS[operation].title if operation in HEATMAPS else operation


def varied_by(operation: str) -> str | None:
    """The parameter whose values are the columns of an operation's map, if these are not last layers."""
    return HEATMAPS[operation].varied if operation in HEATMAPS else None


def named_across(operation: str) -> str | None:
    """What pictures call the values of that parameter."""
    return HEATMAPS[operation].across or varied_by(operation) if operation in HEATMAPS else None


def grid(cells: pd.DataFrame, varied: str | None = None) -> pd.DataFrame:
    """Perplexity by first layer (index) and last layer (columns); NaN where there is no such stretch.

    Layers between those of the stretches that were measured are left out where all stretches leave them out.

    Args:
        varied: the column whose values are the columns instead, in their order there.
    """
    across = varied or "last"
    values = cells.drop_duplicates(["first", across]).pivot(index="first", columns=across, values="perplexity")
    columns = cells[varied].unique() if varied else _evenly(cells["last"])
    return values.reindex(index=_evenly(cells["first"]), columns=columns)


def _evenly(layers: pd.Series[int]) -> range:
    """The layers there are, and those that are missing for them to be evenly spaced."""
    present = sorted(set(layers))
    return range(present[0], present[-1] + 1, math.gcd(*(b - a for a, b in pairwise(present))) or 1)


def scale_of(grids: Sequence[pd.DataFrame], base: float, cap: float = CAP) -> tuple[Normalize, bool]:
    """The scale of these maps, from the base perplexity to the largest that is shown, and whether some lie beyond."""
    cells = pd.Series(np.concatenate([values.to_numpy().ravel() for values in grids]))
    end = largest_shown(cells, base, cap)
    return damage_scale(base, end), bool((cells > end).any())


def _draw_heatmap(
    axes: Axes, values: pd.DataFrame, colours: Normalize, base: float, across: str | None, ticks: int
) -> None:
    """A map with names of its axes and a line around the cells within `MARKED`."""
    draw_map(axes, values, colours, base * MARKED, "equal" if across is None else "auto")
    label_map(axes, values, ticks, ticks, 8)
    axes.set_xlabel("last layer $e$" if across is None else across, fontsize=9)
    axes.set_ylabel("first layer $s$" if across is None else "layer", fontsize=9)


def _colour_bar(figure: Figure, axes: list[Axes], colours: Normalize, capped: bool) -> None:
    base, end = float(colours.vmin or 0), float(colours.vmax or 0)
    bar = colour_bar(figure, axes, colours, capped, shrink=0.85, pad=0.02)
    ticks = [base * float(ratio_of(damage(end / base) * part / 4)) for part in range(5)]
    bar.set_ticks(ticks, labels=[f"{tick:.3g}" for tick in ticks])
    bar.minorticks_off()
    beyond = f"; pale: beyond {end / base:.3g} times the base" if capped else ""
    bar.set_label(f"perplexity\nline: {allowance(MARKED)}{beyond}", fontsize=8)


def draw_lengths(
    axes: Axes,
    cells: pd.DataFrame,
    base: float,
    end: float,
    names: Any = None,
    tips: Any = None,
    most: int = MOST_LINES,
) -> dict[int, str]:
    """A line for each length of a stretch, or evenly chosen ones, and the base, dashed.

    Args:
        cells: with `length`, `last` and `perplexity`.
        end: where the vertical axis ends; what lies beyond is hollow, on the edge.
        names: of a length, for a legend.
        tips: what is said of each of some cells.

    Returns:
        The colour of each length.
    """
    lengths = sorted(int(length) for length in cells["length"].unique())
    if len(lengths) > most:
        lengths = [lengths[place] for place in np.linspace(0, len(lengths) - 1, most).round().astype(int)]
    places = [place * (len(ORDERED) - 1) / max(1, len(lengths) - 1) for place in range(len(lengths))]
    if len(lengths) <= len(ORDERED):  # each has one of the named colours, which the page has in light and dark
        hues = [ORDERED[round(place)] for place in places]
    else:
        blend = LinearSegmentedColormap.from_list("ordered", ORDERED)
        hues = [to_hex(blend(place / (len(ORDERED) - 1))) for place in places]
    scale(axes, "y", [base, *cells["perplexity"][cells["length"].isin(lengths)]], log=True, end=end)
    rule(axes, base)
    for length, hue in zip(lengths, hues, strict=True):
        line = cells[cells["length"] == length].sort_values("last")
        said = () if tips is None else tips(line)
        points(axes, line["last"], line["perplexity"], said, label=names(length) if names else "", colour=hue)
    return dict(zip(lengths, hues, strict=True))
