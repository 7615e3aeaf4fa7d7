"""What was predicted of programs, as tables for a terminal, as one table for a file, and as pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from surgeon.memory import show_size
from surgeon.processes.files import whole_file
from surgeon.reports.bench import aligned, ratio, three_digits
from surgeon.words import plural

if TYPE_CHECKING:
    from surgeon.cost.predict import PassCost
    from surgeon.cost.sweep import SweepCell

MS = 1e3
PARTS = ("compute", "launches", "exposed")  # of a pass's time
SPEEDUPS = {"first_token": "first_token_ms", "per_token": "per_token_ms"}
_COLOURS = ("#33638d", "#b8c4ce", "#f0a04b")
_LINES = ("#33638d", "#f0a04b", "#4aa36c", "#c8553d", "#7b5ea7", "#8a8a8a", "#c9a227", "#2aa1b3")
_MOST_PANELS = 8


def prediction_table(cells: Sequence[SweepCell]) -> pd.DataFrame:
    """One row per program, ranks and load; speedups are over the first program on the same ranks for the same load."""
    table = pd.DataFrame([_row(cell) for cell in cells])
    where = ["ranks", "batch", "prompt", "new"]
    first = table[table["program"] == table["program"].iloc[0]].set_index(where)
    own = first.reindex(pd.MultiIndex.from_frame(table[where]))
    for name, column in SPEEDUPS.items():
        table[f"{name}_speedup"] = own[column].to_numpy() / table[column].to_numpy()
    table["tokens_per_second_speedup"] = table["tokens_per_second"].to_numpy() / own["tokens_per_second"].to_numpy()
    return table


def _row(cell: SweepCell) -> dict[str, object]:
    load, found = cell.workload, cell.prediction
    row: dict[str, object] = {
        "program": cell.candidate.name,
        "ranks": cell.deployment.ranks,
        "batch": load.batch,
        "prompt": load.prompt,
        "new": load.new,
        "first_token_ms": math.nan if found is None else found.first_token * MS,
        "per_token_ms": math.nan if found is None else found.per_token * MS,
        "tokens_per_second": math.nan if found is None else found.rate,
        "communication_share": math.nan if found is None else found.share,
    }
    for phase in ("prefill", "decode"):
        row |= _split(phase, None if found is None else getattr(found, phase))
    sizes = ("weights", "cache", "activations", "needed", "there")
    row |= {f"{name}_bytes": math.nan if found is None else getattr(found.memory, name) for name in sizes}
    return row | {"fits": int(found is not None and found.memory.fits), "refused": cell.refused}


def _split(phase: str, cost: PassCost | None) -> dict[str, object]:
    values: dict[str, float] = {f"{part}_ms": math.nan for part in (*PARTS, "communication")}
    values |= dict.fromkeys(("all_reduces", "all_gathers", "bytes", "vocabulary_collectives"), math.nan)
    if cost is not None:
        values = {f"{part}_ms": getattr(cost, part) * MS for part in (*PARTS, "communication")}
        values |= asdict(cost.layers)
        values["vocabulary_collectives"] = cost.vocabulary.all_reduces + cost.vocabulary.all_gathers
    return {f"{phase}_{name}": value for name, value in values.items()}


def describe_predictions(table: pd.DataFrame) -> str:
    """The tables of a terminal, at most 80 columns wide."""
    parts = ["Latency, throughput, and memory of the rank that needs most", aligned(_latency_lines(table))]
    parts += ["", "Where the time of a pass goes", aligned(_pass_lines(table))]
    if table["program"].nunique() > 1:
        first = table["program"].iloc[0]
        parts += ["", f"Times as fast as {first}", aligned(_ratio_lines(table))]
    return "\n".join(parts)


def describe_sweep(table: pd.DataFrame) -> str:
    """A line for each cell of a sweep, at most 80 columns wide."""
    axes = swept_axes(table)
    lines = [["program", *axes, "first", "per token", "tokens/s", "speedup", "comm.", "memory"]]
    lines.append(["", *("" for _ in axes), "ms", "ms", "", "", "", ""])
    for _, row in table.iterrows():
        begin = [row["program"], *(str(row[name]) for name in axes)]
        if math.isnan(row["first_token_ms"]):
            lines.append([*begin, "-", "-", "-", "-", "-", "refused"])
            continue
        numbers = [three_digits(row[name]) for name in ("first_token_ms", "per_token_ms", "tokens_per_second")]
        memory = show_size(row["needed_bytes"]) + ("" if row["fits"] else "!")
        lines.append([*begin, *numbers, ratio(row["tokens_per_second_speedup"]), _share(row), memory])
    return f"{aligned(lines)}\n\n{_notes(table)}".rstrip()


def _notes(table: pd.DataFrame) -> str:
    """What the sweep's marks stand for."""
    from surgeon.cost.sweep import TOO_LARGE

    notes = []
    if not table["fits"].all() and (table["refused"] == TOO_LARGE).any():
        notes.append(f"!: does not fit into the {show_size(table['there_bytes'].max())} that there are for it.")
    refused = table[table["first_token_ms"].isna()]
    notes += [f"refused: {reason}" for reason in refused["refused"].drop_duplicates()]
    return "\n".join(notes)


def _latency_lines(table: pd.DataFrame) -> list[list[str]]:
    lines = [["program", "batch", "first token", "per token", "tokens/s", "comm.", "memory", "fits"]]
    lines.append(["", "", "ms", "ms", "", "", "", ""])
    for _, row in table.iterrows():
        numbers = [three_digits(row[name]) for name in ("first_token_ms", "per_token_ms", "tokens_per_second")]
        fits = "yes" if row["fits"] else "no"
        begin = [row["program"], str(row["batch"])]
        lines.append([*begin, *numbers, _share(row), show_size(row["needed_bytes"]), fits])
    return lines


def _share(row: Any) -> str:
    return f"{row['communication_share']:.0%}"


def _pass_lines(table: pd.DataFrame) -> list[list[str]]:
    lines = [["program", "batch", "pass", "compute", "launch", "comm.", "hidden", "collectives", "bytes"]]
    lines.append(["", "", "", "ms", "ms", "ms", "ms", "", ""])
    for _, row in table.iterrows():
        for phase in ("prefill", "decode"):
            if math.isnan(row[f"{phase}_compute_ms"]):
                continue
            hidden = max(0.0, row[f"{phase}_communication_ms"] - row[f"{phase}_exposed_ms"])
            times = [three_digits(value) for value in (*(row[f"{phase}_{part}_ms"] for part in PARTS), hidden)]
            calls = int(row[f"{phase}_all_reduces"] + row[f"{phase}_all_gathers"])
            counts = [f"{calls}+{int(row[f'{phase}_vocabulary_collectives'])}", show_size(row[f"{phase}_bytes"])]
            begin = [row["program"], str(row["batch"])] if phase == "prefill" else ["", ""]
            lines.append([*begin, phase, *times, *counts])
    return lines


def _ratio_lines(table: pd.DataFrame) -> list[list[str]]:
    lines = [["program", "batch", "first token", "per token", "tokens/s"]]
    for _, row in table.iterrows():
        ratios = [ratio(row[f"{name}_speedup"]) for name in (*SPEEDUPS, "tokens_per_second")]
        lines.append([row["program"], str(row["batch"]), *ratios])
    return lines


def draw_predictions(table: pd.DataFrame, path: Path, title: str) -> Path:
    """Write a picture of both passes of every program, by what their time goes to; a row for each batch."""
    phases = [phase for phase in ("prefill", "decode") if table[f"{phase}_compute_ms"].notna().any()]
    batches = list(table["batch"].unique())
    programs = int(table["program"].nunique())
    size = (1.8 + 4.2 * len(phases), 1.2 + (0.7 + 0.36 * programs) * len(batches))
    figure = Figure(figsize=size, layout="constrained", dpi=160)
    panels = figure.subplots(len(batches), len(phases), squeeze=False, sharey="row")
    for row, batch in zip(panels, batches, strict=True):
        for panel, phase in zip(row, phases, strict=True):
            _draw_bars(panel, table[table["batch"] == batch], phase)
            panel.set_title(f"{phase}, batch {batch}", fontsize=10)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return _saved(figure, path, title)


def _draw_bars(axes: Axes, table: pd.DataFrame, phase: str) -> None:
    places, left = np.arange(len(table)), np.zeros(len(table))
    words = ("compute", "launches, gaps", "waiting for collectives")
    for part, name, colour in zip(PARTS, words, _COLOURS, strict=True):
        own = table[f"{phase}_{part}_ms"].to_numpy()
        axes.barh(places, own, left=left, color=colour, label=name, height=0.62)
        left = left + own
    speedups = table["per_token_speedup" if phase == "decode" else "first_token_speedup"]
    for place, end, speedup in zip(range(len(table)), left, speedups, strict=True):
        axes.text(end, place, f"  {three_digits(end)} ms, {speedup:.2f}x", va="center", fontsize=8)
    axes.set_yticks(places, labels=list(table["program"]), fontsize=9)
    axes.set_ylim(len(table) - 0.4, -0.6)
    axes.set_xlim(0, 1.55 * float(np.nanmax(left)))
    _finish(axes)
    axes.set_xlabel(f"ms of one {phase} pass", fontsize=9)


def draw_sweep(table: pd.DataFrame, path: Path, title: str) -> Path:
    """Write a picture of a sweep: tokens per second by batch, a panel for each number of ranks; speedups below.

    What does not fit into memory is hollow. Other axes have the place of those that are not swept; where more than two
    are, the picture is of the first value of the others.
    """
    along, panels_of, *others = drawn_axes(table)
    for name in others:
        table = table[table[name] == table[name].iloc[0]]
    values = list(table[panels_of].unique())[:_MOST_PANELS]
    several = table["program"].nunique() > 1
    figure = Figure(figsize=(1.4 + 2.5 * len(values), 5.4 if several else 3.4), layout="constrained", dpi=160)
    rows = figure.subplots(1 + several, len(values), squeeze=False, sharex=True, sharey="row")
    for number, value in enumerate(values):
        own = table[table[panels_of] == value]
        _draw_lines(rows[0][number], own, along, "tokens_per_second")
        rows[0][number].set_title(words_of(panels_of, int(value)), fontsize=10)
        if table["tokens_per_second"].notna().any():  # nothing at all has no logarithm
            rows[0][number].set_yscale("log")
        if several:
            _draw_lines(rows[1][number], own, along, "tokens_per_second_speedup")
        rows[-1][number].set_xlabel(along, fontsize=9)
    rows[0][0].set_ylabel("tokens/s", fontsize=9)
    if several:
        rows[1][0].set_ylabel(f"times {table['program'].iloc[0]}", fontsize=9)
    handles, labels = rows[0][0].get_legend_handles_labels()
    if not table["fits"].all():
        handles.append(Line2D([], [], marker="o", ms=3.6, ls="", color="#444444", markerfacecolor="white"))
        labels.append("does not fit into memory")
    figure.legend(handles, labels, loc="outside lower center", ncols=min(6, len(labels)), fontsize=8, frameon=False)
    return _saved(figure, path, title)


def swept_axes(table: pd.DataFrame) -> list[str]:
    """The axes that take several values, ranks and batch if none does."""
    return [name for name in ("ranks", "batch", "prompt", "new") if table[name].nunique() > 1] or ["ranks", "batch"]


def drawn_axes(table: pd.DataFrame) -> list[str]:
    """The axes of a sweep: along which lines go, of which there are panels, and the others."""
    axes = ["batch", "ranks", "prompt", "new"]
    return sorted(axes, key=lambda name: table[name].nunique() == 1)


def words_of(axis: str, value: int) -> str:
    """A value of an axis: 8 ranks, batch 16, prompt 1024, 512 new."""
    if axis == "ranks":
        return plural(value, "rank")
    return f"{value} new" if axis == "new" else f"{axis} {value}"


def _draw_lines(axes: Axes, table: pd.DataFrame, along: str, column: str) -> None:
    for number, (name, own) in enumerate(table.groupby("program", sort=False)):
        colour = _LINES[number % len(_LINES)]
        axes.plot(own[along], own[column], "-", lw=1.4, color=colour, label=str(name))
        for fits, face in ((1, colour), (0, "white")):
            some = own[own["fits"] == fits]
            axes.plot(some[along], some[column], "o", ms=3.6, color=colour, markerfacecolor=face)
    axes.set_xscale("log", base=2)
    ticks = sorted(table[along].unique())
    axes.set_xticks(ticks[:: max(1, len(ticks) // 5)], labels=[str(tick) for tick in ticks[:: max(1, len(ticks) // 5)]])
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    _finish(axes)


def _finish(axes: Axes) -> None:
    axes.tick_params(labelsize=8, length=2)
    axes.spines[["top", "right"]].set_visible(False)


def _saved(figure: Figure, path: Path, title: str) -> Path:
    figure.suptitle(title, fontsize=11)
    with whole_file(path) as beside:
        figure.savefig(beside, format="png")
    return path
