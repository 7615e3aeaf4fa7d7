"""Bench: times of programs on ranks, as tables for a terminal and as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from surgeon.findings.drawing import Chart, Picture, bars
from surgeon.findings.result import RunResult, TableFile
from surgeon.memory import show_size
from surgeon.words import aligned, hanging, three_digits, times

COLUMNS = ("first_token_ms", "prefill_ms", "decode_ms", "per_token_ms", "tokens_per_second")
RATIOS = ("first_token_speedup", "per_token_speedup", "tokens_per_second_speedup")


@dataclass(frozen=True, repr=False)
class Benchmark(RunResult):
    """The result of `bench`.

    Attributes:
        speeds: one row per program and batch, as in `bench.csv`: medians over the rounds, of ratios too (each against
            the first program, of its round); of compressed reductions `divergence` from exact ones, nats per token.
        results: by load, of every program; of a bench just made.
        traces: files with timelines, if there are any.
    """

    COMMAND = "bench"
    RECORD = "bench.json"
    TABLES: ClassVar = {"speeds": TableFile("bench.csv", ("batch", *COLUMNS, *RATIOS), ("program",))}

    speeds: pd.DataFrame
    results: Sequence[Any] = ()
    traces: tuple[Path, ...] = ()

    def __str__(self) -> str:
        """Tables of at most 80 columns."""
        table = self.speeds
        parts = [hanging("", self.heading)]
        if "kernels" in self.record:  # not in older ones
            parts.append(hanging("kernels: ", self.record["kernels"]))
        parts += [hanging(f"{name}: ", line) for name, line in self.record.get("experts", {}).items()]
        parts += ["", "Latency, medians over rounds", self._latency()]
        parts += ["", "One pass, on the rank that waits most", self._passes()]
        if "decode_launching_ms" in table:
            lines = [["program", "batch", "launched", "pass"], ["", "", "ms", "ms"]]
            for _, row in self.speeds.iterrows():
                times = row["decode_launching_ms"], row["decode_compute_ms"] + row["decode_waiting_ms"]
                lines.append([row["program"], str(row["batch"]), *map(three_digits, times)])
            parts += ["", "Until all of a decoding pass was launched, and the whole of it", aligned(lines)]
        if table["program"].nunique() > 1:
            parts += ["", f"Times as fast as {table['program'].iloc[0]} to the first token and per token"]
            parts.append(self._ratios())
        if "divergence" in table:
            lines = [["program", "divergence", "95% interval"]]
            for _, row in table.drop_duplicates("program").dropna(subset=["divergence"]).iterrows():
                ends = "-"
                if not math.isnan(row["divergence_high"]):
                    ends = f"{row['divergence_low']:.3g} to {row['divergence_high']:.3g}"
                lines.append([row["program"], f"{row['divergence']:.3g}", ends])
            parts += ["", f"What {self.record['compression']} changes in predictions, nats per token", aligned(lines)]
        return "\n".join(parts)

    def _latency(self) -> str:
        lines = [["program", "batch", "first token", "prefill", "decode", "per token", "tokens/s"]]
        lines.append(["", "", "ms", "ms", "ms", "ms", ""])
        for _, row in self.speeds.iterrows():
            lines.append([row["program"], str(row["batch"]), *(three_digits(row[name]) for name in COLUMNS)])
        return aligned(lines)

    def _passes(self) -> str:
        lines = [["program", "batch", "pass", "compute", "waiting", "", "collectives", "bytes"]]
        lines.append(["", "", "", "ms", "ms", "", "", ""])
        for _, row in self.speeds.iterrows():
            for phase in ("prefill", "decode"):
                if f"{phase}_compute_ms" not in row:
                    continue
                compute = row[f"{phase}_compute_ms"]
                waiting = row[f"{phase}_waiting_ms"]
                share = ""
                if not math.isnan(waiting):
                    share = f"{waiting / (compute + waiting):.0%}"
                calls = row[f"{phase}_all_reduces"] + row[f"{phase}_all_gathers"]
                counts = [f"{calls}+{row[f'{phase}_vocabulary_collectives']}", show_size(row[f"{phase}_bytes"])]
                if phase == "prefill":
                    begin = [row["program"], str(row["batch"])]
                else:
                    begin = ["", ""]
                lines.append([*begin, phase, three_digits(compute), three_digits(waiting), share, *counts])
        return aligned(lines)

    def _ratios(self) -> str:
        lines = [["program", "batch", "depth", "syncs", "first", "per token", "range", "tokens/s"]]
        for _, row in self.speeds.iterrows():
            first, token, rate = (times(row[name]) for name in RATIOS)
            low, high = (row[f"per_token_speedup_{end}"] for end in ("low", "high"))
            extent = ""
            if not (low == high or math.isnan(low)):
                extent = f"{low:.2f}-{high:.2f}"
            begin = [row["program"], str(row["batch"]), f"{row['effective_depth']:g}", str(row["sync_points"])]
            lines.append([*begin, first, token, extent, rate])
        return aligned(lines)

    def pictures(self) -> dict[str, Picture]:
        """`bench`: a decoding pass of every program, one panel per batch, what it computes and what it waits.

        Without decoding passes it is of the pass with the prompts.
        """
        phase = "prefill"
        if "decode_compute_ms" in self.speeds:
            phase = "decode"
        return {
            "bench": Picture([_chart(f"batch {n}", own, phase) for n, own in self.speeds.groupby("batch", sort=False)])
        }


def _chart(title: str, table: pd.DataFrame, phase: str) -> Chart:
    compute = table[f"{phase}_compute_ms"].to_numpy()
    waiting = table[f"{phase}_waiting_ms"].to_numpy()
    if np.isnan(waiting).all():  # GPUs: the process does not see what they wait for
        compute = table["per_token_ms" if phase == "decode" else "prefill_ms"].to_numpy()
        waiting = np.zeros(len(table))
    speedups = table["per_token_speedup" if phase == "decode" else "first_token_speedup"]
    rates = zip(table["tokens_per_second"], speedups, strict=True)
    notes = [f"{three_digits(rate)} tok/s, {speedup:.2f}x" for rate, speedup in rates]

    def draw(axes: Axes) -> None:
        parts = [("compute", 0, compute), ("waiting for collectives", 1, waiting)]
        bars(axes, list(table["program"]), parts, notes)

    return Chart(title, draw, f"ms of one {phase} pass", height=70.0 + 26.0 * len(table))
