"""The charts of a scan: single layers, depths, and figure 7 of the Layer Parallelism paper; and its tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import Normalize

from surgeon.findings.drawing import ORDERED, Chart, Picture, layers_across, points, rule, scale
from surgeon.findings.maps import (
    HALF,
    LEAST_CAP,
    MARKED,
    WIDE,
    Legend,
    Map,
    damage_legend,
    map_cells,
)
from surgeon.findings.result import Block, Table
from surgeon.findings.tolerance import (
    CAP,
    PAIRS,
    TOLERANCES,
    ScanTable,
)
from surgeon.language.operations.base import HEATMAPS
from surgeon.words import allowance, change, number, plural, stretch, value_with_interval

_MOST_POINTS = 0.8  # of the points of a chart lie well inside it


def charts(scan: ScanTable) -> Iterator[Block]:
    """Draw all charts that the scanned operations allow."""
    best = {name: cells for name in scan.operations if len(cells := scan.best_by_depth(name))}
    side_by_side = []
    if removed := _removing_one(scan):
        side_by_side.append(removed)
    if best:
        side_by_side.append(_by_depth(scan, best))
    if side_by_side:
        yield Picture(side_by_side)
    drawn = sorted(
        (name for name, heatmap in HEATMAPS.items() if heatmap.curves), key=lambda name: name != PAIRS
    )
    curves = [_by_end(scan, name) for name in drawn if len(scan.of_operation(name))]
    if curves:
        caption = (
            "One line for each length of the stretch (eight of them where there are more), by where it ends: figure 7 "
            "of the Layer Parallelism paper. Dashed: the unedited model."
        )
        yield Picture(curves, caption)


def _tip(cell: Any) -> str:
    quality = ", ".join(
        f"{name} {value_with_interval(cell, name)}" for name in ("perplexity", "divergence")
    )
    return f"{stretch(int(cell['first']), int(cell['last']))}: {change(cell['ratio'])}, {quality}"


def _scale_from_base(
    scan: ScanTable, axes: Axes, shown: Sequence[float], every: Sequence[float]
) -> None:
    """End beyond most of the points; the few that are far off would press the others together."""
    base = scan.base_perplexity
    typical = float(np.quantile([value / base for value in every], _MOST_POINTS, method="lower"))
    end = base * min(CAP, max(LEAST_CAP, 1 + 2.5 * (typical - 1)))
    scale(axes, "y", [base, *shown], log=True, end=end)
    rule(axes, base)


def _removing_one(scan: ScanTable) -> Chart | None:
    removing = [name for name, heatmap in HEATMAPS.items() if heatmap.removes]
    found = {operation: scan.single_layers(operation).sort_values("first") for operation in removing}
    cells = pd.concat(found.values())
    if cells.empty:
        return None
    names = ["divergence", *(name for name in ("divergence_low", "divergence_high") if name in cells)]

    def draw(axes: Axes) -> None:
        layers_across(axes, int(cells["first"].min()), int(cells["first"].max()))
        scale(axes, "y", cells[names].to_numpy().ravel().tolist(), log=True)
        for place, (operation, own) in enumerate(found.items()):
            aside = (place - (len(removing) - 1) / 2) * 0.18  # so that bars do not hide each other
            shown = own.assign(place=own["first"] + aside)
            look = HEATMAPS[operation].style, HEATMAPS[operation].title
            points(axes, shown, "place", "divergence", _tip, *look, line=False, intervals=True)

    caption = "How far the predictions move with one layer, or a part of it, left out."
    if len(names) == 3 and np.isfinite(cells[names[1:]].to_numpy(dtype=float)).any():
        caption += " Bars: 95% intervals."
    return Chart("Removing one layer", draw, "layer", "divergence (nats per token)", caption)


def _by_depth(scan: ScanTable, best: dict[str, pd.DataFrame]) -> Chart:
    every = pd.concat(best.values())
    values = every["perplexity"].tolist()

    def draw(axes: Axes) -> None:
        layers_across(
            axes, math.floor(every["depth"].min()), max(scan.num_layers, math.ceil(every["depth"].max()))
        )
        _scale_from_base(scan, axes, values, values)
        for name, cells in best.items():
            look = HEATMAPS[name].style, HEATMAPS[name].title
            points(axes, cells, "depth", "perplexity", _tip, *look)

    caption = "The least perplexity that each kind of change has at a depth. Dashed: the unedited model."
    x = "effective depth (layers one after the other)"
    return Chart("The best stretch for every depth", draw, x, "perplexity", caption)


def _by_end(scan: ScanTable, operation: str) -> Chart:
    cells = scan.of_operation(operation)
    lengths = sorted(int(length) for length in cells["changed"].unique())
    if len(lengths) > len(ORDERED):
        lengths = [
            lengths[place]
            for place in np.linspace(0, len(lengths) - 1, len(ORDERED)).round().astype(int)
        ]
    shown = cells[cells["changed"].isin(lengths)]

    def draw(axes: Axes) -> None:
        layers_across(axes, int(shown["last"].min()), int(shown["last"].max()))
        _scale_from_base(scan, axes, shown["perplexity"].tolist(), cells["perplexity"].tolist())
        for place, length in enumerate(lengths):
            line = shown[shown["changed"] == length].sort_values("last")
            hue = ORDERED[round(place * (len(ORDERED) - 1) / max(1, len(lengths) - 1))]
            name = plural(length, "layer")
            if HEATMAPS[operation].group == 2:
                name += f" ({plural(length // 2, 'pair')})"
            points(axes, line, "last", "perplexity", _tip, label=name, colour=hue)

    title = f"{HEATMAPS[operation].title}: where the stretch ends"
    return Chart(title, draw, "last layer of the stretch", "perplexity", name=f"curves-{operation}")


def reach_table(scan: ScanTable) -> Table:
    """Table the reach of each operation within each tolerance."""
    rows = []
    for operation in scan.operations:
        row = [HEATMAPS[operation].title]
        for tolerance in TOLERANCES:
            cell = scan.longest_within(operation, tolerance)
            if cell is None:
                row.append("none")
                continue
            depth = scan.depth(operation, int(cell["changed"]))
            ends = ""
            if depth is not None:
                ends = f", depth {depth:g}"
            row.append(
                f"{stretch(int(cell['first']), int(cell['last']))} ({number(cell['perplexity'])}{ends})"
            )
        rows.append(row)
    head = ["change", *(f"within {allowance(tolerance)}" for tolerance in TOLERANCES)]
    note = (
        "The stretch with the most changed layers whose perplexity stays within this much of the unedited model's "
        f"{number(scan.base_perplexity)}; in brackets its perplexity and the effective depth, of {scan.num_layers} "
        "layers."
    )
    return Table("How far each change goes", head, rows, note, left=range(len(head)))


_FIELDS = {"perplexity": "perplexity", "divergence": "divergence"}
_STRETCHES = "First layer of the stretch down, last layer across; the diagonal is single layers."


class ScanMaps(ScanTable):
    """A scan's cells and experts as maps, whose colours end at `cap` times the base perplexity at the latest."""

    @cached_property
    def _of_maps(self) -> dict[str, pd.DataFrame]:
        return {
            str(name): own.drop_duplicates(["first", HEATMAPS[str(name)].varied or "last"])
            for name, own in self.cells.groupby("operation", sort=False)
        }

    def _names(self, over_stretches: bool) -> list[str]:
        return [name for name in self._of_maps if (HEATMAPS[name].varied is None) == over_stretches]

    def _legend(self, names: list[str]) -> Legend:
        grids = [self._of_maps[name][["perplexity"]] for name in names]
        title = f"Colours: perplexity over that of the unedited model, {number(self.base_perplexity)}"
        return damage_legend(title, grids, self.base_perplexity, self.cap)

    def heatmaps(self) -> dict[str, Picture]:
        found = {}
        names = self._names(over_stretches=True)
        if len(names) > 1:
            found["heatmaps"] = self._picture(names, _STRETCHES)
        return found | {f"heatmap-{name}": self._picture([name]) for name in self._of_maps}

    def _picture(self, names: list[str], caption: str = "", shared: str = "") -> Picture:
        legend = self._legend(names)
        maps = [self._map(name, legend.scale) for name in names]
        colours = (
            f"Colour: perplexity over that of the unedited model, {number(self.base_perplexity)}. The line fences in "
            f"the cells within {allowance(MARKED)}."
        )
        return Picture(maps, f"{caption} {colours} {shared}".strip(), legend=legend)

    def galleries(self) -> Iterator[Block]:
        if names := self._names(over_stretches=True):
            shared = "These maps share one scale, that of heatmaps.png." if len(names) > 1 else ""
            yield self._picture(names, _STRETCHES, shared)
        if names := self._names(over_stretches=False):
            yield self._picture(names, "Each layer alone, with every value of a parameter.")
        if len(self.experts):
            share = {
                "load": "Load of experts: share of tokens",
                "saliency": "Share of the layer's saliency (REAP)",
            }
            maps = []
            for column, title in share.items():
                values = self.experts.pivot(index="layer", columns="expert", values=column)
                if column == "saliency":  # of which some layers have many times as much as others
                    values = values.div(values.sum(axis=1), axis=0)
                values.index = pd.Index([f"layer {layer}" for layer in values.index])
                colours = Normalize(0.0, float(values.to_numpy().max()) or 1.0)
                down = [f"layer {layer}" for layer in self.experts["layer"]]
                across = self.experts["expert"]
                fields = {column: column}
                data = map_cells(values, down, across, self.experts, fields, "{row}, expert {column}")
                legend = Legend(colours, title)
                maps.append(Map(title, values, colours, ("expert", ""), data, legend=legend, flat=HALF))
            yield Picture(maps, name="experts")

    def _map(self, operation: str, colours: Normalize) -> Map:
        cells = self._of_maps[operation]
        heatmap = HEATMAPS[operation]
        if heatmap.varied is None:
            values = grid(cells)
            data = map_cells(
                values, cells["first"], cells["last"], cells, _FIELDS, "layers {row} to {column}", "layer {row}",
                self.base_perplexity,
            )  # fmt: skip
            extent = [number(float(getattr(cells["perplexity"], end)())) for end in ("min", "max")]
            described = f"{len(cells)} stretches, perplexity {' to '.join(extent)}"
            titles = ("last layer", "first layer")
            what = "every stretch"
            flat = 0.0
        else:
            across = heatmap.across or heatmap.varied
            values = grid(cells, heatmap.varied).reindex(sorted(set(cells["first"])))
            values.index = pd.Index([f"layer {row}" for row in values.index])
            down = [f"layer {layer}" for layer in cells["first"]]
            title = f"{{row}}, {across} {{column}}"
            data = map_cells(
                values, down, cells[heatmap.varied], cells, _FIELDS, title, base=self.base_perplexity
            )
            rows, columns = values.shape
            described = f"perplexity of {rows} layers, each alone with {columns} values of {across}"
            titles = (across, "")
            what = f"every layer with every value of {across}"
            flat = HALF
        return Map(
            heatmap.title,
            values,
            colours,
            titles,
            data,
            f"perplexity of {what}",
            described=f"{heatmap.title}: {described}",
            limit=self.base_perplexity * MARKED,
            flat=flat,
        )

    def ribbon(self) -> Map:
        """For every operation and layer, the cheapest measured change that includes the layer."""
        legend = self._legend(self._names(over_stretches=True))
        found = {
            HEATMAPS[operation].title: self.cheapest_with(operation) for operation in self.operations
        }
        rows = {name: cells.set_index("layer")["perplexity"] for name, cells in found.items()}
        values = pd.DataFrame(rows).reindex(range(self.num_layers)).T
        cells = pd.concat(found.values(), ignore_index=True)
        down = [name for name, own in found.items() for _ in range(len(own))]
        data = map_cells(
            values,
            down,
            cells["layer"],
            cells,
            _FIELDS,
            "{row}, layer {column}",
            base=self.base_perplexity,
        )
        data["notes"] = [
            f"cheapest with it: {stretch(int(f), int(e))}"
            for f, e in zip(cells["first"], cells["last"], strict=True)
        ]
        title = "What each layer tolerates"
        caption = (
            "The cheapest measured change of each kind that includes the layer. Bright columns are layers that no "
            "change spares: leave them alone."
        )
        return Map(
            title, values, legend.scale, ("layer", ""), data, caption=caption, legend=legend, flat=WIDE
        )


def grid(cells: pd.DataFrame, varied: str | None = None) -> pd.DataFrame:
    """Perplexity by first layer (index) and last layer (columns), evenly spaced; NaN where there is no such stretch.

    Args:
        varied: the column whose values are the columns instead, in their order there.
    """
    across = varied or "last"
    values = cells.drop_duplicates(["first", across]).pivot(
        index="first", columns=across, values="perplexity"
    )
    columns = cells[varied].unique() if varied else _evenly(cells["last"])
    return values.reindex(index=_evenly(cells["first"]), columns=columns)


def _evenly(layers: pd.Series[int]) -> range:
    present = sorted(set(layers))
    return range(present[0], present[-1] + 1, math.gcd(*(b - a for a, b in pairwise(present))) or 1)
