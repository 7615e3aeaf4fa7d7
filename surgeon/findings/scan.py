"""Scan: the damage of changing every stretch of layers, as cells, heatmaps, curves, and what layers tolerate in words.

Heatmaps are drawn like figure 4 of the Layer Parallelism paper, first layer down, last layer across; those over the
values of a parameter have the layers down and these values across. Curves are those of its figure 7: perplexity against
the end of a stretch, one line per length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import Normalize

from surgeon.findings.drawing import (
    CAP,
    HALF,
    LEAST_CAP,
    MARKED,
    ORDERED,
    WIDE,
    Chart,
    Legend,
    Map,
    Picture,
    damage_legend,
    layers_across,
    points,
    rule,
    scale,
)
from surgeon.findings.result import Block, Finding, Record, RunResult, Table, base_of, table_file
from surgeon.language.operations.base import HEATMAPS
from surgeon.language.program import Program
from surgeon.words import (
    allowance,
    change,
    interval,
    join_words,
    layer_list,
    number,
    plural,
    stretch,
    value_with_interval,
)

# What the summary asks about by name.
PAIRS = "lp"
PAIRS_OF_STREAMS = "2-parallel"
PRUNE = "prune"
TOLERANCES = (1.05, 1.10, 1.25)  # of the base perplexity, that tables and maps speak of
_ENDS = ("first", "last")
_KNOWN = {"operation": HEATMAPS}
_SAME = 1e-6  # relative; perplexities this close are one
_NAMED = 3  # layers that the summary names as the cheapest and as the dearest
_MOST_POINTS = 0.8  # of the points of a chart lie well inside it
_FIELDS = {"perplexity": "perplexity", "divergence": "divergence"}
_STRETCHES = "First layer of the stretch down, last layer across; the diagonal is single layers."


@dataclass(frozen=True, repr=False)
class Scan(RunResult):
    """The result of a scan.

    Attributes:
        cells: one row per cell, as in `cells.csv`: first and last layer, both included; the parameters that maps vary;
            perplexity and divergence (nats per token) with 95% intervals; greedy_acceptance, the share of tokens whose
            likeliest successor is the original's, too (empty in old scans); sampled_acceptance, where it was asked for,
            the mean of sum_v min(p_v, q_v); tokens, that the row rests on; sublayers_run, that ran for this cell and
            not already for one before it (on half of the windows counts a half).
        base_perplexity: of the unedited model.
        permutations: one row per random order, as in `permutations.csv`.
        experts: one row per expert where its map was asked for, as in `experts.csv`: load, the share of tokens that it
            gets; mean weight, output size and saliency of these (`surgeon.analysis.importance`).
    """

    COMMAND = "scan"
    RECORD = "scan.json"
    TITLE = "Scan"
    WITHOUT = "No scan: what stretches of layers tolerate is not known (surgeon scan)."

    cells: pd.DataFrame = table_file(
        "cells.csv",
        ("perplexity", "divergence", "tokens"),
        ("operation",),
        _ENDS,
        one_of=_KNOWN,
        missing="",
    )
    base_perplexity: float = math.nan
    permutations: pd.DataFrame = table_file(
        "permutations.csv",
        ("perplexity",),
        ("operation", "order"),
        _ENDS,
        one_of=_KNOWN,
        optional=True,
        missing="",
    )
    experts: pd.DataFrame = table_file(
        "experts.csv",
        ("expert", "load", "weight", "size", "saliency"),
        layers=("layer",),
        optional=True,
    )

    @classmethod
    def facts(cls, record: Record, file: Path) -> Record:
        return {"base_perplexity": base_of(record, file, cls.COMMAND)}

    @cached_property
    def changes(self) -> pd.DataFrame:
        """Cells of the maps over stretches that an operation changes, with `ratio` (perplexity over the base's).

        `changed` counts the layers that run in another way, of which `last` is the last.
        """
        over_stretches = self.cells[
            [HEATMAPS[str(name)].varied is None for name in self.cells["operation"]]
        ]
        cells = over_stretches.assign(ratio=over_stretches["perplexity"] / self.base_perplexity)
        spans = zip(cells["operation"], cells["first"], cells["last"], strict=True)
        cells["changed"] = [changed_layers(name, int(first), int(last)) for name, first, last in spans]
        # An order drawn at random may be the order there was.
        same = (cells["divergence"] == 0) & np.isclose(cells["ratio"], 1, rtol=_SAME)
        cells = cells[~same & (cells["changed"] > 0)]
        cells = cells.assign(last=cells["first"] + cells["changed"] - 1)
        # Of an odd stretch and the one that is a layer shorter, the same program, the one with more text.
        most_text_first = cells.sort_values("tokens", ascending=False, kind="stable")
        return most_text_first.drop_duplicates(["operation", "first", "last"]).sort_index()

    @property
    def num_layers(self) -> int:
        # A model runs each of its layers' two sublayers once.
        recorded_layers = (
            self.record.get("num_layers") or self.record.get("sublayers_run", {}).get("base", 0) // 2
        )
        return max(int(recorded_layers), int(self.cells["last"].max()) + 1)

    @property
    def is_edited(self) -> bool:
        """True if the model runs a program of its own; its effective depths are not given."""
        return "program" in self.record

    @property
    def operations(self) -> list[str]:
        return list(dict.fromkeys(self.changes["operation"]))

    def of_operation(self, name: str) -> pd.DataFrame:
        return self.changes[self.changes["operation"] == name]

    def depth(self, operation: str, changed: int) -> float | None:
        """Effective depth with an operation on so many layers; None if it cannot be told."""
        if self.is_edited:
            return None
        saved = depth_saved(operation, changed, self.record.get("steps_per_layer"))
        return None if saved is None else self.num_layers - saved

    def longest_within(self, operation: str, tolerance: float) -> pd.Series[Any] | None:
        """The cell with the most changed layers within a multiple of the base perplexity; the best of equals."""
        cells = self.of_operation(operation)
        within = cells[cells["ratio"] <= tolerance]
        ordered = within.sort_values(["changed", "ratio", "first"], ascending=[False, True, True])
        if ordered.empty:
            return None
        return ordered.iloc[0]

    def single_layers(self, operation: str = PRUNE) -> pd.DataFrame:
        """Take the cells of single layers, the cheapest first."""
        cells = self.of_operation(operation)
        return cells[cells["first"] == cells["last"]].sort_values("ratio", kind="stable")

    def cheapest_with(self, operation: str) -> pd.DataFrame:
        """For every layer that an operation was tried on, the cheapest of the cells that change it, by `layer`."""
        cells = self.of_operation(operation).sort_values("ratio", kind="stable")
        rows = []
        for layer in range(self.num_layers):
            here = cells[(cells["first"] <= layer) & (layer <= cells["last"])]
            if len(here):
                rows.append(here.iloc[0].to_dict() | {"layer": layer})
        return pd.DataFrame(rows)

    def best_by_depth(self, operation: str) -> pd.DataFrame:
        """The best cell for each effective depth that an operation reaches, deepest first; empty if it keeps it."""
        cells = self.of_operation(operation)
        depths = {changed: self.depth(operation, changed) for changed in cells["changed"].unique()}
        if any(depth is None for depth in depths.values()) or set(depths.values()) <= {self.num_layers}:
            return cells.iloc[:0].assign(depth=0.0)
        cells = cells.assign(depth=cells["changed"].map(depths).astype(float))
        every = cells.sort_values("ratio", kind="stable").drop_duplicates("depth")
        best: pd.DataFrame = every[np.isfinite(every["perplexity"])]
        return best.sort_values("depth", ascending=False)

    @property
    def picture_title(self) -> str:
        return f"{self.label}, base perplexity {self.base_perplexity:.4g}"

    def __str__(self) -> str:
        record = self.record
        ran, loop, predicted = (
            record[key] for key in ("sublayers_run", "sublayers_of_a_loop", "tokens_predicted")
        )
        lines = [
            f"base perplexity {self.base_perplexity:.4g} over {predicted:,} predicted tokens",
            f"{plural(len(self.cells), 'cell')}",
            f"sublayers run: {ran['total']:,}; a loop over cells would have run {loop['total']:,}",
        ]
        if record.get("screen") is not None:
            share = self.cells["tokens"].mean() / predicted
            lines.append(f"screened: a cell rests on {share:.0%} of the tokens on average")
        return "\n".join(lines)

    def pictures(self) -> dict[str, Picture]:
        """`heatmaps`, of all operations over stretches; `heatmap-<operation>` of each, and those of the section.

        A single map has a scale of its own, so that small damage can be told apart; side by side they share one.
        """
        stretches, varied = self._scanned_maps
        found = {}
        if len(stretches) > 1:
            found["heatmaps"] = self._maps(stretches, _STRETCHES)
        own = {f"heatmap-{name}": self._maps([name]) for name in (*stretches, *varied)}
        return found | own | super().pictures()

    def section(self) -> Iterator[Block]:
        table = self.cells
        record = self.record
        tokens = record.get("tokens_predicted") or int(table["tokens"].max())
        source = record.get("data", "text")
        text = f"{plural(tokens, 'predicted token')} of {source}"
        scanned = [HEATMAPS[str(name)] for name in table["operation"].unique()]
        varied = dict.fromkeys(heatmap.across or heatmap.varied for heatmap in scanned)
        kinds = [
            "a stretch of layers" if one is None else f"a layer and a value of {one}" for one in varied
        ]
        parts = [f"{plural(len(table), 'cell')}, each {join_words(kinds, 'or')}; {text}."]
        least = int(table["tokens"].min())
        if least < table["tokens"].max():
            parts.append(
                f"Screened: a cell rests on {least:,} to {int(table['tokens'].max()):,} of them."
            )
        if record.get("cells_missing"):
            parts.append(f"The time was over before {plural(record['cells_missing'], 'other cell')}.")
        if part := self._only_part():
            parts.append(part)
        parts.append(
            "Perplexity intervals are 95%, over windows of text: how far another text of the same kind could differ. "
            "Divergence is KL(original || changed) in nats per token."
        )
        yield " ".join(parts)
        if len(self.changes):
            # For every operation and layer, the cheapest measured change that includes the layer.
            cheapest = pd.concat(
                [
                    self.cheapest_with(name).assign(change=HEATMAPS[name].title)
                    for name in self.operations
                ],
                ignore_index=True,
            )
            spans = zip(cheapest["first"], cheapest["last"], strict=True)
            cheapest["note"] = [
                f"cheapest with it: {stretch(int(first), int(last))}" for first, last in spans
            ]
            caption = (
                "The cheapest measured change of each kind that includes the layer. Bright columns are layers that no "
                "change spares: leave them alone."
            )
            yield Map(
                "What each layer tolerates",
                cheapest,
                "change",
                "layer",
                _FIELDS,
                self._legend(self._scanned_maps[0]),
                caption,
                columns=range(self.num_layers),
                flat=WIDE,
            )
            yield self._reach()
            yield from self._charts()
        yield from self._galleries()
        orders = self.permutations
        if orders.empty:
            return
        spread = orders.groupby(["operation", "first", "last"])["perplexity"].agg(
            ["min", "max", "count"]
        )
        spread = spread[spread["count"] > 1]
        if len(spread):
            ratio = float((spread["max"] / spread["min"]).median())
            count = int(spread["count"].max())
            random = join_words(
                (HEATMAPS[name].title for name in dict.fromkeys(orders["operation"])), "or"
            )
            yield (
                f"A cell of {random} is the mean over {count} random orders; in half of the cells the worst order's "
                f"perplexity is more than {number(ratio, 3)} times the best one's."
            )

    def summary(self) -> Iterator[Finding]:
        base_interval = self.record.get("base_interval")
        ends = ""
        if isinstance(base_interval, list) and len(base_interval) == 2:
            ends = f", 95% interval {interval(*base_interval)}"
        tokens = self.record.get("tokens_predicted") or int(self.cells["tokens"].max())
        what = "unedited model"
        if self.is_edited:
            what = "model as it runs"
        base = number(self.base_perplexity)
        text = (
            f"The {what} has {self.num_layers} layers and a perplexity of {base}{ends}, over "
            f"{plural(tokens, 'token')} of {self.record.get('data', 'the text')}."
        )
        yield Finding("As it is", text, base, f"perplexity, unedited, {self.num_layers} layers")
        pairs = next((name for name in (PAIRS, PAIRS_OF_STREAMS) if len(self.of_operation(name))), None)
        if pairs is not None and not self.is_edited:  # which is about effective depths
            tolerance = TOLERANCES[1]
            within = f"within {allowance(tolerance)} of the perplexity"
            name = "two by two"
            if pairs == PAIRS:
                name = "as LP pairs"
            cell = self.longest_within(pairs, tolerance)
            if cell is None:
                text = f"No stretch stays {within}."
                figure = "no pairs"
            else:
                figure = f"{self.depth(pairs, int(cell['changed'])):g} of {self.num_layers}"
                reached = stretch(int(cell["first"]), int(cell["last"]))
                text = f"{within.capitalize()}: {reached}, for an effective depth of {figure}."
            if pairs == PAIRS_OF_STREAMS:
                text += (
                    " This is 2-Parallel, each layer with a stream of its own; LP pairs themselves were not "
                    "scanned."
                )
            label = f"effective depth with layers run {name}, {within}"
            yield Finding(f"Running layers {name}", text, figure, label)
        cells = self.single_layers()
        if len(cells) > 1:
            count = min(_NAMED, len(cells) // 2)
            least = cells.head(count)
            most = cells.tail(count).iloc[::-1]

            def list_layers(rows: pd.DataFrame) -> str:
                return join_words(
                    f"layer {int(row['first'])} ({change(row['ratio'])})" for _, row in rows.iterrows()
                )

            text = f"It costs least perplexity to leave out {list_layers(least)}, and most {list_layers(most)}."
            cheapest = cells.iloc[0]
            label = f"perplexity without layer {int(cheapest['first'])}, the cheapest to remove"
            yield Finding("Removing one layer", text, change(cheapest["ratio"]), label)
        if len(self.changes):
            yield self._untouchable()

    def list_missing(self) -> Iterator[str]:
        scanned = set(self.cells["operation"])
        # Maps whose columns follow from the model are not of every model.
        absent = [
            one.title
            for name, one in HEATMAPS.items()
            if name not in scanned and not callable(one.values)
        ]
        if absent:
            yield f"Not scanned, so nothing is said about it: {join_words(absent)} (surgeon scan --operation)."
        if part := self._only_part():
            yield f"The scan has not every stretch: {part[:1].lower() + part[1:]}"

    def _only_part(self) -> str:
        record = self.record
        if record.get("earlier"):
            return ""
        parts = []
        layers, every, longest = (record.get(name) for name in ("layers", "every", "max_length"))
        if isinstance(layers, str) and layers != f"0:{self.num_layers}":
            first, _, end = layers.partition(":")
            parts.append(
                f"only layers {first} to {int(end) - 1} were scanned" if end.isdecimal() else ""
            )
        if isinstance(every, int) and every > 1:
            parts.append(
                f"stretches begin every {every} layers only, and their lengths are multiples of {every}"
            )
        if isinstance(longest, int) and longest < self.num_layers and not parts:
            parts.append(f"stretches have at most {plural(longest, 'layer')}")
        text = "; ".join(filter(None, parts))
        if text:
            return text[:1].upper() + text[1:] + "."
        return ""

    @cached_property
    def _scanned_maps(self) -> tuple[list[str], list[str]]:
        """The scanned maps: those over stretches, and those over the values of a parameter."""
        names = list(map(str, self.cells["operation"].unique()))
        stretches = [name for name in names if HEATMAPS[name].varied is None]
        return stretches, [name for name in names if name not in stretches]

    def _legend(self, names: Sequence[str]) -> Legend:
        title = f"Colours: perplexity over that of the unedited model, {number(self.base_perplexity)}"
        cells = self.cells[self.cells["operation"].isin(names)]
        return damage_legend(title, cells["perplexity"], self.base_perplexity)

    def _maps(self, names: Sequence[str], caption: str = "", shared: str = "") -> Picture:
        legend = self._legend(names)
        colours = (
            f"Colour: perplexity over that of the unedited model, {number(self.base_perplexity)}. The line fences in "
            f"the cells within {allowance(MARKED)}."
        )
        maps = []
        for name in names:
            heatmap = HEATMAPS[name]
            table = self.cells[self.cells["operation"] == name]
            axes: dict[str, Any] = {"down": "first", "across": "last"}
            if heatmap.varied is not None:
                across = heatmap.across or heatmap.varied
                axes = {"down": "row", "across": across, "flat": HALF}
                axes["columns"] = list(table[heatmap.varied].unique())
                table = _name_layers(table.rename(columns={heatmap.varied: across}), "first")
            limit = self.base_perplexity * MARKED
            maps.append(Map(heatmap.title, table, fields=_FIELDS, legend=legend, limit=limit, **axes))
        return Picture(maps, f"{caption} {colours} {shared}".strip())

    def _galleries(self) -> Iterator[Picture]:
        stretches, varied = self._scanned_maps
        if stretches:
            shared = "These maps share one scale, that of heatmaps.png." if len(stretches) > 1 else ""
            yield self._maps(stretches, _STRETCHES, shared)
        if varied:
            yield self._maps(varied, "Each layer alone, with every value of a parameter.")
        if len(self.experts):
            table = _name_layers(self.experts, "layer")
            # Of saliency some layers have many times as much as others.
            table["share"] = table["saliency"] / table.groupby("layer")["saliency"].transform("sum")
            maps = []
            for title, fields in (
                ("Load of experts: share of tokens", {"load": "load"}),
                (
                    "Share of the layer's saliency (REAP)",
                    {"share": "share of the layer's", "saliency": "saliency"},
                ),
            ):
                colours = Normalize(0.0, float(table[next(iter(fields))].max()) or 1.0)
                legend = Legend(colours, title)
                maps.append(Map(title, table, "row", "expert", fields, legend, flat=HALF))
            yield Picture(maps, name="experts")

    def _reach(self) -> Table:
        """Table the reach of each operation within each tolerance."""
        rows = []
        for operation in self.operations:
            row = [HEATMAPS[operation].title]
            for tolerance in TOLERANCES:
                cell = self.longest_within(operation, tolerance)
                if cell is None:
                    row.append("none")
                    continue
                depth = self.depth(operation, int(cell["changed"]))
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
            f"{number(self.base_perplexity)}; in brackets its perplexity and the effective depth, of {self.num_layers} "
            "layers."
        )
        return Table("How far each change goes", head, rows, note, left=range(len(head)))

    def _charts(self) -> Iterator[Block]:
        """Draw all charts that the scanned operations allow."""
        best = {name: cells for name in self.operations if len(cells := self.best_by_depth(name))}
        side_by_side = []
        if removed := self._removing_one():
            side_by_side.append(removed)
        if best:
            side_by_side.append(self._by_depth(best))
        if side_by_side:
            yield Picture(side_by_side)
        drawn = sorted(
            (name for name, heatmap in HEATMAPS.items() if heatmap.curves),
            key=lambda name: name != PAIRS,
        )
        curves = [self._by_end(name) for name in drawn if len(self.of_operation(name))]
        if curves:
            caption = (
                "One line for each length of the stretch (eight of them where there are more), by where it ends: "
                "figure 7 of the Layer Parallelism paper. Dashed: the unedited model."
            )
            yield Picture(curves, caption)

    def _scale_from_base(self, axes: Axes, shown: Sequence[float], every: Sequence[float]) -> None:
        """End beyond most of the points; the few that are far off would press the others together."""
        base = self.base_perplexity
        typical = float(np.quantile([value / base for value in every], _MOST_POINTS, method="lower"))
        end = base * min(CAP, max(LEAST_CAP, 1 + 2.5 * (typical - 1)))
        scale(axes, "y", [base, *shown], log=True, end=end)
        rule(axes, base)

    def _removing_one(self) -> Chart | None:
        removing = [name for name, heatmap in HEATMAPS.items() if heatmap.removes]
        found = {operation: self.single_layers(operation).sort_values("first") for operation in removing}
        cells = pd.concat(found.values())
        if cells.empty:
            return None
        names = [
            "divergence",
            *(name for name in ("divergence_low", "divergence_high") if name in cells),
        ]

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

    def _by_depth(self, best: dict[str, pd.DataFrame]) -> Chart:
        every = pd.concat(best.values())
        values = every["perplexity"].tolist()

        def draw(axes: Axes) -> None:
            layers_across(
                axes,
                math.floor(every["depth"].min()),
                max(self.num_layers, math.ceil(every["depth"].max())),
            )
            self._scale_from_base(axes, values, values)
            for name, cells in best.items():
                look = HEATMAPS[name].style, HEATMAPS[name].title
                points(axes, cells, "depth", "perplexity", _tip, *look)

        caption = (
            "The least perplexity that each kind of change has at a depth. Dashed: the unedited model."
        )
        x = "effective depth (layers one after the other)"
        return Chart("The best stretch for every depth", draw, x, "perplexity", caption)

    def _by_end(self, operation: str) -> Chart:
        cells = self.of_operation(operation)
        lengths = sorted(int(length) for length in cells["changed"].unique())
        if len(lengths) > len(ORDERED):
            lengths = [
                lengths[place]
                for place in np.linspace(0, len(lengths) - 1, len(ORDERED)).round().astype(int)
            ]
        shown = cells[cells["changed"].isin(lengths)]

        def draw(axes: Axes) -> None:
            layers_across(axes, int(shown["last"].min()), int(shown["last"].max()))
            self._scale_from_base(axes, shown["perplexity"].tolist(), cells["perplexity"].tolist())
            for place, length in enumerate(lengths):
                line = shown[shown["changed"] == length].sort_values("last")
                hue = ORDERED[round(place * (len(ORDERED) - 1) / max(1, len(lengths) - 1))]
                name = plural(length, "layer")
                if HEATMAPS[operation].group == 2:
                    name += f" ({plural(length // 2, 'pair')})"
                points(axes, line, "last", "perplexity", _tip, label=name, colour=hue)

        title = f"{HEATMAPS[operation].title}: where the stretch ends"
        return Chart(title, draw, "last layer of the stretch", "perplexity", name=f"curves-{operation}")

    def _untouchable(self) -> Finding:
        """Layers that allow none of the ways to a shorter model that most people ask for first."""
        within = f"within {allowance(TOLERANCES[-1])}"
        verbs = {name: heatmap.verb for name, heatmap in HEATMAPS.items() if heatmap.verb}
        tried = [name for name in self.operations if name in verbs] or self.operations
        # Those on which each of the ways was tried, and always cost more.
        alone = set(range(self.num_layers))
        for name in tried:
            cheapest = self.cheapest_with(name)
            alone &= {*cheapest["layer"][~(cheapest["ratio"] <= TOLERANCES[-1])]}
        what = "measured change of"
        if set(tried) & set(verbs):
            what = f"measured way to {join_words((verbs[name] for name in tried), 'or')}"
        if not alone:
            text = f"Every layer has a {what} it {within} of the perplexity."
            return Finding("Layers never to touch", text, "no layer", "is never to be touched")
        layers = f"{'layer' if len(alone) == 1 else 'layers'} {layer_list(alone)}"
        it = "it" if len(alone) == 1 else "one of them"
        text = f"{layers.capitalize()}: no {what} {it} stays {within} of the perplexity."
        verb = "is" if len(alone) == 1 else "are"
        label = f"{verb} never to be touched: no {what} {it} {within}"
        return Finding("Layers never to touch", text, layers, label)


def _tip(cell: Any) -> str:
    quality = ", ".join(
        f"{name} {value_with_interval(cell, name)}" for name in ("perplexity", "divergence")
    )
    return f"{stretch(int(cell['first']), int(cell['last']))}: {change(cell['ratio'])}, {quality}"


def _name_layers(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """Name the rows of a flat map by their layers."""
    ordered = table.sort_values(column, kind="stable")
    return ordered.assign(row=[f"layer {layer}" for layer in ordered[column]])


def changed_layers(operation: str, first: int, last: int) -> int:
    """Count the layers of a stretch that an operation changes: all, or those in whole groups."""
    size = HEATMAPS[operation].group
    return (last - first + 1) // size * size


def depth_saved(operation: str, layers: int, steps_per_layer: int | None) -> float | None:
    """The effective depth that an operation on so many layers saves; None if it cannot be told."""
    if layers < 1:
        return None
    step_counts = [steps_per_layer] if steps_per_layer in (1, 2) else [1, 2]
    edited = {
        steps: HEATMAPS[operation](Program.dense(layers, steps), layers=range(layers))
        for steps in step_counts
    }
    saved = {layers - program.effective_depth(steps) for steps, program in edited.items()}
    if len(saved) == 1:
        return saved.pop()
    return None
