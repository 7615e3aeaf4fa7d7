"""What was measured of programs on ranks, as tables for a terminal, as one table for a file, and as a picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from surgeon.language.program import Program
from surgeon.memory import show_size
from surgeon.processes.files import whole_file

if TYPE_CHECKING:
    from surgeon.benchmarks.measure import Measurement, Result, Split

MS = 1e3
COLUMNS = {
    "first_token_ms": lambda one: one.first_token * MS,
    "prefill_ms": lambda one: one.prefill * MS,
    "decode_ms": lambda one: one.decode * MS,
    "per_token_ms": lambda one: one.per_token * MS,
    "tokens_per_second": lambda one: one.rate,
}
RATIOS: dict[str, Callable[[Measurement, Measurement], float]] = {
    "first_token_speedup": lambda base, own: base.first_token / own.first_token,
    "per_token_speedup": lambda base, own: base.per_token / own.per_token,
    "tokens_per_second_speedup": lambda base, own: own.rate / base.rate,
}
_COMPUTE, _WAITING = "#33638d", "#f0a04b"


def bench_table(results: Sequence[Result]) -> pd.DataFrame:
    """One row per program and batch: medians over the rounds, of ratios too (each against the first, of its round)."""
    return pd.DataFrame([_row(result, _first_of(result, results)) for result in results])


def _first_of(result: Result, results: Sequence[Result]) -> Result:
    return next(other for other in results if other.load == result.load)


def _row(result: Result, first: Result) -> dict[str, object]:
    plan = result.plan
    program = Program.parse(plan.program)
    row: dict[str, object] = {
        "program": result.name,
        "batch": result.load.batch,
        "effective_depth": program.effective_depth(plan.family.steps_per_layer),
        "sync_points": program.sync_points(plan.ranks) if result.connected else 0,
    }
    row |= {name: median(map(value, result.rounds)) for name, value in COLUMNS.items()}
    row |= _split_columns("prefill", [one.prefill_pass for one in result.rounds])
    row |= _split_columns("decode", [one.decode_pass for one in result.rounds if one.decode_pass is not None])
    pairs = list(zip(first.rounds, result.rounds, strict=True))
    for name, ratio in RATIOS.items():
        ratios = [ratio(*pair) for pair in pairs]
        row |= {name: median(ratios), f"{name}_low": min(ratios), f"{name}_high": max(ratios)}
    return row


def _split_columns(phase: str, splits: Sequence[Split]) -> dict[str, object]:
    """Medians of one pass of a phase; what it sends is the same in every round."""
    if not splits:
        return {}
    last = splits[-1]
    return {
        f"{phase}_compute_ms": median(split.compute for split in splits) * MS,
        f"{phase}_waiting_ms": median(split.waiting for split in splits) * MS,
        f"{phase}_all_reduces": last.layers.all_reduces,
        f"{phase}_all_gathers": last.layers.all_gathers,
        f"{phase}_bytes": last.layers.bytes,
        f"{phase}_vocabulary_collectives": last.vocabulary.all_reduces + last.vocabulary.all_gathers,
        f"{phase}_vocabulary_bytes": last.vocabulary.bytes,
    }


def describe_bench(table: pd.DataFrame) -> str:
    """The tables of a terminal, at most 80 columns wide."""
    parts = ["Latency, medians over rounds", aligned(_latency_lines(table))]
    parts += ["", "One pass, on the rank that waits most", aligned(_pass_lines(table))]
    if table["program"].nunique() > 1:
        first = table["program"].iloc[0]
        parts += ["", f"Times as fast as {first} to the first token and per token"]
        parts.append(aligned(_ratio_lines(table)))
    return "\n".join(parts)


def _latency_lines(table: pd.DataFrame) -> list[list[str]]:
    lines = [["program", "batch", "first token", "prefill", "decode", "per token", "tokens/s"]]
    lines.append(["", "", "ms", "ms", "ms", "ms", ""])
    for _, row in table.iterrows():
        lines.append([row["program"], str(row["batch"]), *(three_digits(row[name]) for name in COLUMNS)])
    return lines


def _pass_lines(table: pd.DataFrame) -> list[list[str]]:
    lines = [["program", "batch", "pass", "compute", "waiting", "", "collectives", "bytes"]]
    lines.append(["", "", "", "ms", "ms", "", "", ""])
    for _, row in table.iterrows():
        for phase in ("prefill", "decode"):
            if f"{phase}_compute_ms" not in row:
                continue
            compute, waiting = row[f"{phase}_compute_ms"], row[f"{phase}_waiting_ms"]
            share = "" if math.isnan(waiting) else f"{waiting / (compute + waiting):.0%}"
            calls = row[f"{phase}_all_reduces"] + row[f"{phase}_all_gathers"]
            counts = [f"{calls}+{row[f'{phase}_vocabulary_collectives']}", show_size(row[f"{phase}_bytes"])]
            begin = [row["program"], str(row["batch"])] if phase == "prefill" else ["", ""]
            lines.append([*begin, phase, three_digits(compute), three_digits(waiting), share, *counts])
    return lines


def _ratio_lines(table: pd.DataFrame) -> list[list[str]]:
    lines = [["program", "batch", "depth", "syncs", "first", "per token", "range", "tokens/s"]]
    for _, row in table.iterrows():
        first, token, rate = (ratio(row[name]) for name in RATIOS)
        low, high = (row[f"per_token_speedup_{end}"] for end in ("low", "high"))
        extent = "" if low == high or math.isnan(low) else f"{low:.2f}-{high:.2f}"
        begin = [row["program"], str(row["batch"]), f"{row['effective_depth']:g}", str(row["sync_points"])]
        lines.append([*begin, first, token, extent, rate])
    return lines


def ratio(value: float) -> str:
    """Two decimals; a dash where there is none."""
    return "-" if math.isnan(value) else f"{value:.2f}"


def three_digits(value: float) -> str:
    """Three digits, or more before the point; a dash where there is no number."""
    if math.isnan(value):
        return "-"
    return f"{value:.0f}" if value >= 99.95 or value < 1e-6 else f"{value:#.3g}"


def aligned(lines: list[list[str]]) -> str:
    """Lines of cells as columns, the first on the left and the others on the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = []
    for first, *others in lines:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        shown.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(shown)


def draw_bench(table: pd.DataFrame, path: Path, title: str) -> Path:
    """Write a picture of a decoding pass of every program, one panel per batch: what it computes and what it waits.

    Without decoding passes it is of the pass with the prompts.
    """
    phase = "decode" if "decode_compute_ms" in table else "prefill"
    batches = list(table["batch"].unique())
    rows = int(table["program"].nunique())
    figure = Figure(figsize=(1.6 + 3.6 * len(batches), 1.3 + 0.42 * rows), layout="constrained", dpi=160)
    panels = np.atleast_1d(figure.subplots(1, len(batches), sharey=True, squeeze=True))
    for panel, batch in zip(panels, batches, strict=True):
        _draw(panel, table[table["batch"] == batch], phase)
        panel.set_title(f"batch {batch}", fontsize=10)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=11)
    with whole_file(path) as beside:
        figure.savefig(beside, format="png")
    return path


def _draw(axes: Axes, table: pd.DataFrame, phase: str) -> None:
    places = np.arange(len(table))
    compute = table[f"{phase}_compute_ms"].to_numpy()
    waiting = table[f"{phase}_waiting_ms"].to_numpy()
    if np.isnan(waiting).all():  # GPUs: the process does not see what they wait for
        compute, waiting = table["per_token_ms" if phase == "decode" else "prefill_ms"].to_numpy(), np.zeros(len(table))
    axes.barh(places, compute, color=_COMPUTE, label="compute", height=0.62)
    axes.barh(places, waiting, left=compute, color=_WAITING, label="waiting for collectives", height=0.62)
    speedups = table["per_token_speedup" if phase == "decode" else "first_token_speedup"].to_numpy()
    ends = compute + waiting
    for place, end, rate, speedup in zip(range(len(table)), ends, table["tokens_per_second"], speedups, strict=True):
        axes.text(end, place, f"  {three_digits(rate)} tok/s, {speedup:.2f}x", va="center", fontsize=8)
    axes.set_yticks(places, labels=list(table["program"]), fontsize=9)
    axes.set_ylim(len(table) - 0.4, -0.6)
    axes.set_xlim(0, 1.6 * float(ends.max()))
    axes.set_xlabel(f"ms of one {phase} pass", fontsize=9)
    axes.tick_params(labelsize=8, length=2)
    axes.spines[["top", "right"]].set_visible(False)


def bench_record(results: Sequence[Result]) -> list[dict[str, object]]:
    """Every round of every program and batch, as JSON holds it: seconds, tokens per second, counts."""
    return [
        {
            "program": result.name,
            "text": result.plan.program,
            "checkpoint": str(result.plan.folder),
            "dtype": result.plan.dtype,
            "connected": result.connected,
            **asdict(result.load),
            "rounds": [_finite(asdict(one)) for one in result.rounds],
        }
        for result in results
    ]


def _finite(value: Any) -> Any:
    """The same with None in place of NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and math.isnan(value) else value
