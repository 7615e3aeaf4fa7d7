"""Scan: the damage of changing every stretch of layers, as cells, heatmaps, curves and in words.

Heatmaps are drawn like figure 4 of the Layer Parallelism paper, first layer down, last layer across; those over the
values of a parameter have the layers down and these values across. Curves are those of its figure 7: perplexity against
the end of a stretch, one line per length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from surgeon.findings.drawing import Picture
from surgeon.findings.result import Block, Finding, Record, base_of
from surgeon.findings.scan_pictures import ScanMaps, charts, reach_table
from surgeon.findings.tolerance import (
    PAIRS,
    PAIRS_OF_STREAMS,
    TOLERANCES,
    ScanTable,
)
from surgeon.language.operations.base import HEATMAPS
from surgeon.words import (
    allowance,
    change,
    interval,
    join_words,
    layer_list,
    number,
    plural,
    stretch,
)

_NAMED = 3  # layers that the summary names as the cheapest and as the dearest
_LIMIT = TOLERANCES[-1]


@dataclass(frozen=True, repr=False)
class Scan(ScanMaps):
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
        cap: colours of maps end at this multiple of the base perplexity, at the latest.
    """

    COMMAND = "scan"
    RECORD = "scan.json"
    TITLE = "Scan"
    WITHOUT = "No scan: what stretches of layers tolerate is not known (surgeon scan)."

    @classmethod
    def facts(cls, record: Record, file: Path) -> Record:
        return {"base_perplexity": base_of(record, file, cls.COMMAND)}

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
        return self.heatmaps() | super().pictures()

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
            yield self.ribbon()
            yield reach_table(self)
            yield from charts(self)
        yield from self.galleries()
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
        known = self.record.get("base_interval")
        ends = ""
        if isinstance(known, list) and len(known) == 2:
            ends = f", 95% interval {interval(*known)}"
        tokens = self.record.get("tokens_predicted") or int(self.cells["tokens"].max())
        what = "unedited model"
        if self.edited:
            what = "model as it runs"
        base = number(self.base_perplexity)
        text = (
            f"The {what} has {self.num_layers} layers and a perplexity of {base}{ends}, over "
            f"{plural(tokens, 'token')} of {self.record.get('data', 'the text')}."
        )
        yield Finding("As it is", text, base, f"perplexity, unedited, {self.num_layers} layers")
        pairs = next((name for name in (PAIRS, PAIRS_OF_STREAMS) if len(self.of_operation(name))), None)
        if pairs is not None and not self.edited:  # which is about effective depths
            yield _pairs(self, pairs)
        cells = self.single_layers()
        if len(cells) > 1:
            count = min(_NAMED, len(cells) // 2)
            least = cells.head(count)
            most = cells.tail(count).iloc[::-1]

            def named(rows: pd.DataFrame) -> str:
                return join_words(
                    f"layer {int(row['first'])} ({change(row['ratio'])})" for _, row in rows.iterrows()
                )

            text = f"It costs least perplexity to leave out {named(least)}, and most {named(most)}."
            cheapest = cells.iloc[0]
            label = f"perplexity without layer {int(cheapest['first'])}, the cheapest to remove"
            yield Finding("Removing one layer", text, change(cheapest["ratio"]), label)
        if len(self.changes):
            yield _untouchable(self)

    def missing(self) -> Iterator[str]:
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
            parts.append(f"stretches have at most {longest} layers")
        text = "; ".join(filter(None, parts))
        if text:
            return text[:1].upper() + text[1:] + "."
        return ""


def _pairs(scan: ScanTable, operation: str) -> Finding:
    name = "two by two"
    if operation == PAIRS:
        name = "as LP pairs"
    by_tolerance = {tolerance: scan.longest_within(operation, tolerance) for tolerance in TOLERANCES}
    found: dict[Any, tuple[list[float], pd.Series[Any] | None]] = {}
    for tolerance, within in by_tolerance.items():
        found.setdefault(None if within is None else within.name, ([], within))[0].append(tolerance)
    sentences = []
    for allowed, cell in found.values():
        if cell is None:
            sentences.append(
                f"No stretch stays within {join_words(map(allowance, allowed), 'or')} of the unedited perplexity."
            )
            continue
        further = ""
        if allowed[1:]:
            further = f"; allowing {join_words(map(allowance, allowed[1:]), 'or')} reaches no further"
        sentences.append(
            f"Within {allowance(allowed[0])} of the perplexity: {stretch(int(cell['first']), int(cell['last']))}, for "
            f"an effective depth of {scan.depth(operation, int(cell['changed'])):g} of {scan.num_layers}{further}."
        )
    text = " ".join(sentences)
    if operation == PAIRS_OF_STREAMS:
        text += " This is 2-Parallel, each layer with a stream of its own; LP pairs themselves were not scanned."
    middle = scan.longest_within(operation, TOLERANCES[1])
    depth = None
    if middle is not None:
        depth = scan.depth(operation, int(middle["changed"]))
    figure = "no pairs"
    if depth is not None:
        figure = f"{depth:g} of {scan.num_layers}"
    label = (
        f"effective depth with layers run {name}, within {allowance(TOLERANCES[1])} of the perplexity"
    )
    return Finding(f"Running layers {name}", text, figure, label)


def _untouchable(scan: ScanTable) -> Finding:
    kinds: dict[int, list[str]] = {}
    for name in scan.operations:
        for layer in scan.never_to_touch(name, _LIMIT):
            kinds.setdefault(layer, []).append(HEATMAPS[name].title)
    by_kinds: dict[tuple[str, ...], list[int]] = {}
    for layer, names in sorted(kinds.items()):
        by_kinds.setdefault(tuple(names), []).append(layer)
    sentences = []
    for kinds_of, layers in by_kinds.items():
        one = len(layers) == 1
        changes = "measured change"
        if len(kinds_of) != len(scan.operations):
            changes = join_words(kinds_of, "or")
        sentences.append(
            f"{_layers(layers).capitalize()}: no {changes} that includes {'it' if one else 'one of them'} stays within "
            f"{allowance(_LIMIT)} of the perplexity."
        )
    if not kinds:
        within = f"within {allowance(_LIMIT)} of the perplexity"
        every = f"Every layer is part of some change of every scanned kind {within}."
        return Finding("Layers never to touch", every, "no layer", "is never to be touched")
    # A layer that allows none of the ways to a shorter model that most people ask for first is to be left alone.
    verbs = {name: heatmap.verb for name, heatmap in HEATMAPS.items() if heatmap.verb}
    tried = [name for name in scan.operations if name in verbs] or scan.operations
    alone = sorted(
        layer for layer, names in kinds.items() if {HEATMAPS[name].title for name in tried} <= set(names)
    )
    how = join_words((verbs.get(name, HEATMAPS[name].title) for name in tried), "or")
    it = "them"
    if len(alone) == 1:
        it = "it"
    what = "no measured change"
    if set(tried) & set(verbs):
        what = f"no measured way to {how} {it}"
    figure = "no layer"
    if alone:
        figure = _layers(alone)
    label = f"{'is' if len(alone) < 2 else 'are'} never to be touched: {what} within {allowance(_LIMIT)}"
    return Finding("Layers never to touch", " ".join(sentences), figure, label)


def _layers(layers: list[int]) -> str:
    return f"{'layer' if len(layers) == 1 else 'layers'} {layer_list(layers)}"
