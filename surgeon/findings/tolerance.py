"""Tolerance of layers by a scan's cells: every claim of the page's summary comes from here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from surgeon.findings.result import RunResult, table_file
from surgeon.language.operations.base import HEATMAPS
from surgeon.language.program import Program

# What the summary asks about by name.
PAIRS = "lp"
PAIRS_OF_STREAMS = "2-parallel"
PRUNE = "prune"
CAP = 3.0  # colours of maps end at this multiple of the base perplexity, at the latest
TOLERANCES = (1.05, 1.10, 1.25)  # of the base perplexity, that tables and maps speak of
_ENDS = ("first", "last")
_KNOWN = {"operation": HEATMAPS}
_SAME = 1e-6  # relative; perplexities this close are one


@dataclass(frozen=True, repr=False)
class ScanTable(RunResult):
    """A scan's cells, ready for questions; its fields are those of `surgeon.findings.scan.Scan`."""

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
    cap: float = CAP

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
        known = self.record.get("num_layers") or self.record.get("sublayers_run", {}).get("base", 0) // 2
        return max(int(known), int(self.cells["last"].max()) + 1)

    @property
    def edited(self) -> bool:
        """True if the model runs a program of its own; its effective depths are not given."""
        return "program" in self.record

    @property
    def operations(self) -> list[str]:
        return list(dict.fromkeys(self.changes["operation"]))

    def of_operation(self, name: str) -> pd.DataFrame:
        return self.changes[self.changes["operation"] == name]

    def depth(self, operation: str, changed: int) -> float | None:
        """Effective depth with an operation on so many layers; None if it cannot be told."""
        if self.edited:
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

    def never_to_touch(self, operation: str, tolerance: float) -> list[int]:
        """Layers on which an operation was tried, and always cost more than a multiple of the base perplexity."""
        return [
            int(cell["layer"])
            for _, cell in self.cheapest_with(operation).iterrows()
            if not cell["ratio"] <= tolerance
        ]

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


def changed_layers(operation: str, first: int, last: int) -> int:
    """Count the layers of a stretch that an operation changes: all, or those in whole groups."""
    size = HEATMAPS[operation].group
    return (last - first + 1) // size * size


def depth_saved(operation: str, layers: int, steps_per_layer: int | None) -> float | None:
    """The effective depth that an operation on so many layers saves; None if it cannot be told."""
    if layers < 1:
        return None
    known = [steps_per_layer] if steps_per_layer in (1, 2) else [1, 2]
    edited = {
        steps: HEATMAPS[operation](Program.dense(layers, steps), layers=range(layers)) for steps in known
    }
    saved = {layers - program.effective_depth(steps) for steps, program in edited.items()}
    if len(saved) == 1:
        return saved.pop()
    return None
