"""What was predicted of programs on described hardware, as tables for a terminal and as pictures."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from surgeon.findings.drawing import bars, finish
from surgeon.findings.result import RunResult, TableFile
from surgeon.memory import show_size
from surgeon.words import aligned, hanging, plural, three_digits, times

AXES = ("ranks", "batch", "prompt", "new")
PARTS = ("compute", "launches", "exposed")  # of a pass's time
SPEEDUPS = ("first_token_speedup", "per_token_speedup", "tokens_per_second_speedup")
TOO_LARGE = "does not fit into memory"  # why a cell of a sweep is refused that has a prediction
_SPEEDS = ("first_token_ms", "per_token_ms", "tokens_per_second")
_PARTS = (("compute", "#33638d"), ("launches, gaps", "#b8c4ce"), ("waiting for collectives", "#f0a04b"))
_LINES = ("#33638d", "#f0a04b", "#4aa36c", "#c8553d", "#7b5ea7", "#8a8a8a", "#c9a227", "#2aa1b3")
_MOST_PANELS = 8


@dataclass(frozen=True, repr=False)
class PredictRun(RunResult):
    """The result of `predict`.

    Attributes:
        speeds: one row per program, ranks and load, as in `predict.csv`; speedups are over the first program on the
            same ranks for the same load.
    """

    COMMAND = "predict"
    RECORD = "predict.json"
    TABLES: ClassVar = {
        "speeds": TableFile(
            "predict.csv",
            (*AXES, *_SPEEDS, "communication_share", "needed_bytes", "there_bytes", "fits", *SPEEDUPS),
            ("program",),
        )
    }

    speeds: pd.DataFrame

    @property
    def swept(self) -> bool:
        """Whether they are a sweep's, in which some may not fit."""
        return bool(self.record["swept"])

    def __str__(self) -> str:
        """Tables of at most 80 columns; behind them how ranks share experts, where that was open."""
        return "\n".join([self._tables(), *(["", *lines] if (lines := self.record.get("experts")) else [])])

    def _tables(self) -> str:
        if self.swept:
            return f"{hanging('', self.heading)}\n\n{self._sweep()}"
        table = self.speeds
        parts = [hanging("", self.heading), ""]
        parts += ["Latency, throughput, and memory of the rank that needs most", self._latency()]
        parts += ["", "Where the time of a pass goes", self._passes()]
        if table["program"].nunique() > 1:
            lines = [["program", "batch", "first token", "per token", "tokens/s"]]
            for _, row in table.iterrows():
                lines.append([row["program"], str(row["batch"]), *(times(row[name]) for name in SPEEDUPS)])
            parts += ["", f"Times as fast as {table['program'].iloc[0]}", aligned(lines)]
        return "\n".join(parts)

    def _sweep(self) -> str:
        """A line for each cell, and what its marks stand for."""
        table, axes = self.speeds, swept_axes(self.speeds)
        lines = [["program", *axes, "first", "per token", "tokens/s", "speedup", "comm.", "memory"]]
        lines.append(["", *("" for _ in axes), "ms", "ms", "", "", "", ""])
        for _, row in table.iterrows():
            begin = [row["program"], *(str(row[name]) for name in axes)]
            if math.isnan(row["first_token_ms"]):
                lines.append([*begin, "-", "-", "-", "-", "-", "refused"])
                continue
            memory = show_size(row["needed_bytes"]) + ("" if row["fits"] else "!")
            lines.append([*begin, *_speeds(row), times(row["tokens_per_second_speedup"]), _share(row), memory])
        notes = []
        if not table["fits"].all() and (table["refused"] == TOO_LARGE).any():
            notes.append(f"!: does not fit into the {show_size(table['there_bytes'].max())} that there are for it.")
        refused = table[table["first_token_ms"].isna()]
        notes += [hanging("refused: ", reason) for reason in refused["refused"].drop_duplicates()]
        return "\n".join([aligned(lines), "", *notes]).rstrip()

    def _latency(self) -> str:
        lines = [["program", "batch", "first token", "per token", "tokens/s", "comm.", "memory", "fits"]]
        lines.append(["", "", "ms", "ms", "", "", "", ""])
        for _, row in self.speeds.iterrows():
            fits = "yes" if row["fits"] else "no"
            begin = [row["program"], str(row["batch"])]
            lines.append([*begin, *_speeds(row), _share(row), show_size(row["needed_bytes"]), fits])
        return aligned(lines)

    def _passes(self) -> str:
        lines = [["program", "batch", "pass", "compute", "launch", "comm.", "hidden", "collectives", "bytes"]]
        lines.append(["", "", "", "ms", "ms", "ms", "ms", "", ""])
        for _, row in self.speeds.iterrows():
            for phase in ("prefill", "decode"):
                if math.isnan(row[f"{phase}_compute_ms"]):
                    continue
                hidden = max(0.0, row[f"{phase}_communication_ms"] - row[f"{phase}_exposed_ms"])
                spent = [three_digits(value) for value in (*(row[f"{phase}_{part}_ms"] for part in PARTS), hidden)]
                calls = int(row[f"{phase}_all_reduces"] + row[f"{phase}_all_gathers"])
                counts = [f"{calls}+{int(row[f'{phase}_vocabulary_collectives'])}", show_size(row[f"{phase}_bytes"])]
                begin = [row["program"], str(row["batch"])] if phase == "prefill" else ["", ""]
                lines.append([*begin, phase, *spent, *counts])
        return aligned(lines)

    def pictures(self) -> dict[str, Figure]:
        """`predict`: where the time of every program's passes goes, or of a sweep its speeds."""
        figure = self._draw_sweep() if self.swept else self._draw_passes()
        figure.suptitle(self.heading, fontsize=11)
        return {"predict": figure}

    def _draw_passes(self) -> Figure:
        """Both passes of every program, by what their time goes to; a row for each batch."""
        table = self.speeds
        phases = [phase for phase in ("prefill", "decode") if table[f"{phase}_compute_ms"].notna().any()]
        batches = list(table["batch"].unique())
        programs = int(table["program"].nunique())
        size = (1.8 + 4.2 * len(phases), 1.2 + (0.7 + 0.36 * programs) * len(batches))
        figure = Figure(figsize=size, layout="constrained", dpi=160)
        panels = figure.subplots(len(batches), len(phases), squeeze=False, sharey="row")
        for row, batch in zip(panels, batches, strict=True):
            for panel, phase in zip(row, phases, strict=True):
                own = table[table["batch"] == batch]
                spent = [own[f"{phase}_{part}_ms"].to_numpy() for part in PARTS]
                speedups = own["per_token_speedup" if phase == "decode" else "first_token_speedup"]
                ends = zip(sum(spent), speedups, strict=True)
                parts = [(*part, values) for part, values in zip(_PARTS, spent, strict=True)]
                notes = [f"{three_digits(end)} ms, {speedup:.2f}x" for end, speedup in ends]
                bars(panel, own["program"], parts, notes, room=1.55)
                finish(panel, grid=False)
                panel.set_xlabel(f"ms of one {phase} pass", fontsize=9)
                panel.set_title(f"{phase}, batch {batch}", fontsize=10)
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
        return figure

    def _draw_sweep(self) -> Figure:
        """Tokens per second by batch, a panel for each number of ranks; speedups below.

        What does not fit into memory is hollow. Other axes have the place of those that are not swept; where more than
        two are, the picture is of the first value of the others.
        """
        along, panels_of, table = drawn_axes(self.speeds)
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
            labels.append(TOO_LARGE)
        ncols = min(6, len(labels))
        figure.legend(handles, labels, loc="outside lower center", ncols=ncols, fontsize=8, frameon=False)
        return figure


def _speeds(row: Any) -> list[str]:
    return [three_digits(row[name]) for name in _SPEEDS]


def _share(row: Any) -> str:
    return f"{row['communication_share']:.0%}"


def swept_axes(table: pd.DataFrame) -> list[str]:
    """The axes that take several values, ranks and batch if none does."""
    return [name for name in AXES if table[name].nunique() > 1] or ["ranks", "batch"]


def drawn_axes(table: pd.DataFrame) -> tuple[str, str, pd.DataFrame]:
    """The axis of a sweep along which lines go, that of which there are panels, and the first of all others."""
    along, panels_of, *others = sorted(("batch", "ranks", "prompt", "new"), key=lambda name: table[name].nunique() == 1)
    for name in others:
        table = table[table[name] == table[name].iloc[0]]
    return along, panels_of, table


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
    ticks = ticks[:: max(1, len(ticks) // 5)]
    axes.set_xticks(ticks, labels=[str(tick) for tick in ticks])
    axes.minorticks_off()
    finish(axes)
