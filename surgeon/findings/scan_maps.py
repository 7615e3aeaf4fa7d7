"""The maps of a scan: a heatmap for each operation, what each layer tolerates, and what experts get and give."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import pandas as pd
from matplotlib.colors import Normalize

from surgeon.findings.blocks import Block, Table
from surgeon.findings.drawing import Picture
from surgeon.findings.maps import CAP, HALF, MARKED, WIDE, Legend, Map, map_cells, scale_of
from surgeon.findings.tolerance import (
    ScanTable,
    changed_layers,
    cheapest_with,
    group_size,
    named_across,
    shown_stretch,
    title_of,
    varied_by,
)
from surgeon.language.operations.declare import HEATMAPS
from surgeon.words import allowance, change, number, stretch

_ORDERS_SHOWN = 12  # layers of a random order, before it is cut short
_FIELDS = {"perplexity": "perplexity", "divergence": "divergence"}


@dataclass(frozen=True)
class ScanMaps:
    """The maps of a scan; tables as in `Scan`."""

    table: pd.DataFrame
    scan: ScanTable
    orders: pd.DataFrame
    experts: pd.DataFrame
    loads: pd.DataFrame
    cap: float = CAP

    @cached_property
    def _cells(self) -> dict[str, pd.DataFrame]:
        """The cells of each operation's map, each once."""
        return {
            str(name): own.drop_duplicates(["first", varied_by(str(name)) or "last"])
            for name, own in self.table.groupby("operation", sort=False)
        }

    def _names(self, over_stretches: bool) -> list[str]:
        return [name for name in self._cells if (varied_by(name) is None) == over_stretches]

    def _legend(self, names: list[str]) -> Legend:
        """The scale of some maps."""
        base = self.scan.base
        colours, capped = scale_of([self._cells[name][["perplexity"]] for name in names], base, self.cap)
        title = f"Colours: perplexity over that of the unedited model, {number(base)}"
        return Legend(colours, title, base, capped)

    @property
    def heatmaps(self) -> dict[str, Picture]:
        """The picture of several operations over stretches side by side, by its name."""
        names = self._names(over_stretches=True)
        if len(names) > 1:
            return {"heatmaps": self._side_by_side(names)}
        return {}

    @property
    def each(self) -> dict[str, Picture]:
        """A picture of each operation, with a scale of its own."""
        found = {}
        for name in self._cells:
            legend = self._legend([name])
            found[f"heatmap-{name}"] = Picture([self._map(name, legend.scale)], self._colours, legend=legend)
        return found

    @property
    def _colours(self) -> str:
        return (
            f"Colour: perplexity over that of the unedited model, {number(self.scan.base)}. The line fences in the "
            f"cells within {allowance(MARKED)}."
        )

    def _side_by_side(self, names: list[str]) -> Picture:
        legend = self._legend(names)
        maps = [self._map(name, legend.scale) for name in names]
        axes = "First layer of the stretch down, last layer across; the diagonal is single layers."
        shared = ""
        if len(names) > 1:
            shared = " These maps share one scale, that of heatmaps.png."
        return Picture(maps, f"{axes} {self._colours}{shared}", legend=legend)

    def galleries(self) -> Iterator[Block]:
        """Draw maps over stretches on one scale, then the others on another one, and what experts get and give."""
        if names := self._names(over_stretches=True):
            yield self._side_by_side(names)
        if names := self._names(over_stretches=False):
            legend = self._legend(names)
            maps = [self._map(name, legend.scale) for name in names]
            yield Picture(maps, f"Each layer alone, with every value of a parameter. {self._colours}", legend=legend)
        if len(self.experts):
            share = {"load": "Load of experts: share of tokens", "saliency": "Share of the layer's saliency (REAP)"}
            yield Picture([self._expert_map(column, title) for column, title in share.items()], name="experts")

    def _map(self, name: str, colours: Normalize) -> Map:
        if varied_by(name) is None:
            return self._over_stretches(name, colours)
        return self._of_values(name, colours)

    def _over_stretches(self, operation: str, colours: Normalize) -> Map:
        cells = self._cells[operation]
        title = title_of(operation)
        values = grid(cells)
        data = map_cells(
            values, cells["first"], cells["last"], cells, _FIELDS, "layers {row} to {column}", "layer {row}",
            self.scan.base,
        )  # fmt: skip
        random = operation in HEATMAPS and HEATMAPS[operation].seeded
        if steps := self.scan.steps_per_layer:
            spans = zip(cells["first"], cells["last"], strict=True)
            lengths = sorted({changed_layers(operation, first, last) for first, last in spans} - {0})
            data["group"] = group_size(operation)
            # The changed part of the program by its number of layers, written for layers from 0.
            data["programs"] = {str(n): shown_stretch(operation, n, steps) for n in lengths if not random}
        if random and len(self.orders):
            data["notes"] = _orders(cells, self.orders[self.orders["operation"] == operation])
        extent = [number(float(getattr(cells["perplexity"], end)())) for end in ("min", "max")]
        described = f"{title}: {len(cells)} stretches, perplexity {' to '.join(extent)}"
        axes = ("last layer", "first layer")
        what = "perplexity of every stretch"
        return Map(title, values, colours, axes, data, what, described=described, limit=self.scan.base * MARKED)

    def _of_values(self, operation: str, colours: Normalize) -> Map:
        """Single layers down, the values of a parameter across."""
        cells = self._cells[operation]
        varied = str(varied_by(operation))
        across = str(named_across(operation))
        values = grid(cells, varied).reindex(sorted(set(cells["first"])))
        values.index = pd.Index([f"layer {row}" for row in values.index])
        down = [f"layer {layer}" for layer in cells["first"]]
        title = f"{{row}}, {across} {{column}}"
        data = map_cells(values, down, cells[varied], cells, _FIELDS, title, base=self.scan.base)
        if operation == "experts" and len(self.experts):
            data["notes"] = self._loads(cells)
        rows, columns = values.shape
        title = title_of(operation)
        what = f"perplexity of every layer with every value of {across}"
        described = f"{title}: perplexity of {rows} layers, each alone with {columns} values of {across}"
        limit = self.scan.base * MARKED
        return Map(title, values, colours, (across, ""), data, what, described=described, limit=limit, flat=HALF)

    def _loads(self, cells: pd.DataFrame) -> list[str]:
        """What each expert gets, and who gets most of its layer where it is left out."""
        load = self.experts.set_index(["layer", "expert"])["load"]
        rest = self.loads.sort_values("load").drop_duplicates(["layer", "without"], keep="last")
        most = rest.set_index(["layer", "without"])
        notes = []
        for place in zip(cells["first"], cells["drop"].astype(int), strict=True):
            heir = most.loc[place]
            share = f"without it expert {heir['expert']:g} gets {heir['load']:.0%}"
            notes.append(f"gets {load[place]:.0%} of tokens; {share}")
        return notes

    def _expert_map(self, column: str, title: str) -> Map:
        """What each expert gets or gives, layers down and experts across."""
        values = self.experts.pivot(index="layer", columns="expert", values=column)
        if column == "saliency":  # of which some layers have many times as much as others
            values = values.div(values.sum(axis=1), axis=0)
        values.index = pd.Index([f"layer {layer}" for layer in values.index])
        colours = Normalize(0.0, float(values.to_numpy().max()) or 1.0)
        down = [f"layer {layer}" for layer in self.experts["layer"]]
        data = map_cells(values, down, self.experts["expert"], self.experts, {column: column}, "{row}, expert {column}")
        return Map(title, values, colours, ("expert", ""), data, legend=Legend(colours, title), flat=HALF)

    def ribbon(self) -> Map:
        """For every operation and layer, the cheapest measured change that includes the layer."""
        scan = self.scan
        legend = self._legend(self._names(over_stretches=True))
        found = {title_of(operation): cheapest_with(scan, operation) for operation in scan.operations}
        rows = {name: cells.set_index("layer")["perplexity"] for name, cells in found.items()}
        values = pd.DataFrame(rows).reindex(range(scan.num_layers)).T
        cells = pd.concat(found.values(), ignore_index=True)
        down = [name for name, own in found.items() for _ in range(len(own))]
        data = map_cells(values, down, cells["layer"], cells, _FIELDS, "{row}, layer {column}", base=scan.base)
        data["notes"] = [
            f"cheapest with it: {stretch(int(f), int(e))}" for f, e in zip(cells["first"], cells["last"], strict=True)
        ]
        title = "What each layer tolerates"
        caption = (
            "The cheapest measured change of each kind that includes the layer. Bright columns are layers that no "
            "change spares: leave them alone."
        )
        ratios = (values / scan.base).iterrows()
        body = [[str(name), *("" if math.isnan(r) else change(r) for r in row)] for name, row in ratios]
        head = ["", *map(str, values.columns)]
        against = Table(f"{title}: perplexity against the base", head, body, folded=True, printed=False)
        return Map(title, values, legend.scale, ("layer", ""), data, caption=caption, legend=legend, flat=WIDE,
                   numbers=against)  # fmt: skip


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


def _orders(cells: pd.DataFrame, orders: pd.DataFrame) -> list[str]:
    """The random order of each cell, or how many it is the mean over."""
    by_stretch = orders.groupby(["first", "last"])["order"].agg(list)
    notes = []
    for span in zip(cells["first"], cells["last"], strict=True):
        here = by_stretch.get(span, [])
        layers = []
        if here:
            layers = here[0].split()
        more = ""
        if len(layers) > _ORDERS_SHOWN:
            more = " …"
        single = "order: " + " ".join(layers[:_ORDERS_SHOWN]) + more
        notes.append(single if len(here) == 1 else f"mean over {len(here)} random orders")
    return notes
