"""Bench: times of programs on ranks, as tables for a terminal and as a picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from surgeon.findings.drawing import Picture, bars_chart
from surgeon.findings.result import RunResult, Table, table_file
from surgeon.machine import show_size
from surgeon.words import hang_indent, number, times, with_intervals

COLUMNS = ("first_token_ms", "prefill_ms", "decode_ms", "per_token_ms", "tokens_per_second")
RATIOS = ("first_token_speedup", "per_token_speedup", "tokens_per_second_speedup")

LEAST_IMBALANCE = 1.005  # that is shown


@dataclass(frozen=True, repr=False)
class Benchmark(RunResult):
    """The result of `bench`.

    Attributes:
        speeds: one row per program and batch, as in `bench.csv`: medians over the rounds, of ratios too (each against
            the first program, of its round); `divergence` of compressed reductions from exact ones, nats per token.
        results: by load, of every program; of a bench just made.
        traces: files with timelines.
    """

    COMMAND = "bench"
    RECORD = "bench.json"

    speeds: pd.DataFrame = table_file("bench.csv", ("batch", *COLUMNS, *RATIOS), ("program",))
    results: Sequence[Any] = ()
    traces: tuple[Path, ...] = ()

    def __str__(self) -> str:
        parts = [hang_indent("", self.heading)]
        if "kernels" in self.record:  # not in older ones
            parts.append(hang_indent("kernels: ", self.record["kernels"]))
        table = self.speeds
        begin = ["program", "batch"]
        head = [*begin, "first token, ms", "prefill, ms", "decode, ms", "per token, ms", "tokens/s"]
        body = [
            [row["program"], str(row["batch"]), *(number(row[name], 3) for name in COLUMNS)]
            for _, row in table.iterrows()
        ]
        split = ("compute, ms", "waiting, ms", "")
        caption = "One pass, on the rank that waits most"
        tables = [
            Table("Latency, medians over rounds", head, body),
            passes_table(caption, table, split, _compute_and_waiting),
        ]
        if table["program"].nunique() > 1:
            body = []
            for _, row in table.iterrows():
                low, high = (row[f"per_token_speedup_{end}"] for end in ("low", "high"))
                first, token, rate = (times(row[name]) for name in RATIOS)
                extent = ""
                if high > low:
                    extent = f"{low:.2f}-{high:.2f}"
                depths = f"{row['effective_depth']:g}", str(row["sync_points"])
                body.append([row["program"], str(row["batch"]), *depths, first, token, extent, rate])
            caption = f"Times as fast as {table['program'].iloc[0]} to the first token and per token"
            head = [*begin, "depth", "syncs", "first", "per token", "range", "tokens/s"]
            tables.append(Table(caption, head, body))
        uneven = uneven_shares(table)
        if uneven is not None:
            tables.append(uneven)
        if "divergence" in table:
            measured = table.drop_duplicates("program").dropna(subset=["divergence"])
            body = [
                [row["program"], *with_intervals(row, ["divergence"])] for _, row in measured.iterrows()
            ]
            caption = f"What {self.record['compression']} changes in predictions, nats per token"
            tables.append(Table(caption, ["program", "divergence", "95% interval"], body))
        return "\n\n".join(["\n".join(parts), *map(str, tables)])

    def pictures(self) -> dict[str, Picture]:
        """`bench`: compute and waiting of a decoding pass of every program, or else of a prompt's; a panel a batch."""
        phase = "prefill"
        if "decode_compute_ms" in self.speeds:
            phase = "decode"
        charts = []
        for batch, table in self.speeds.groupby("batch", sort=False):
            compute = table[f"{phase}_compute_ms"].to_numpy()
            waiting = table[f"{phase}_waiting_ms"].to_numpy()
            if np.isnan(waiting).all():  # GPUs: the process does not see what they wait for
                compute = table["per_token_ms" if phase == "decode" else "prefill_ms"].to_numpy()
                waiting = np.zeros(len(table))
            speedups = table["per_token_speedup" if phase == "decode" else "first_token_speedup"]
            rates = zip(table["tokens_per_second"], speedups, strict=True)
            notes = [f"{number(rate, 3)} tok/s, {speedup:.2f}x" for rate, speedup in rates]
            parts = [("compute", 0, compute), ("waiting for collectives", 1, waiting)]
            x = f"ms of one {phase} pass"
            charts.append(bars_chart(f"batch {batch}", list(table["program"]), parts, notes, x))
        return {"bench": Picture(charts)}


def uneven_shares(speeds: pd.DataFrame) -> Table | None:
    """Table the share of a pass on the busiest rank, where ranks have unequal parts of a program."""
    if "imbalance" not in speeds:  # not in older files
        return None
    found = speeds.drop_duplicates(["program", "imbalance"]).dropna(subset=["imbalance"])
    rows = [
        [row["program"], f"{row['imbalance']:.2f}"]
        for _, row in found.iterrows()
        if row["imbalance"] >= LEAST_IMBALANCE
    ]
    if not rows:
        return None
    caption = "Weights that the busiest rank reads, which others wait for; 1 is an even share"
    return Table(caption, ["program", "times an even share"], rows)


def passes_table(
    caption: str, speeds: pd.DataFrame, parts: Sequence[str], spent: Callable[[Any, str], list[str]]
) -> Table:
    """Table the passes of programs: parts of their time, collectives (of steps + of the vocabulary) and bytes."""
    rows = []
    for _, row in speeds.iterrows():
        for phase in ("prefill", "decode"):
            reduces = row.get(f"{phase}_all_reduces", math.nan)
            if math.isnan(reduces):
                continue
            calls = int(reduces + row[f"{phase}_all_gathers"])
            counts = [
                f"{calls}+{int(row[f'{phase}_vocabulary_collectives'])}",
                show_size(row[f"{phase}_bytes"]),
            ]
            rows.append([row["program"], str(row["batch"]), phase, *spent(row, phase), *counts])
    return Table(caption, ["program", "batch", "pass", *parts, "collectives", "bytes"], rows)


def _compute_and_waiting(row: Any, phase: str) -> list[str]:
    compute = row[f"{phase}_compute_ms"]
    waiting = row[f"{phase}_waiting_ms"]
    share = ""
    if not math.isnan(waiting):
        share = f"{waiting / (compute + waiting):.0%}"
    return [number(compute, 3), number(waiting, 3), share]
