"""Prediction: what programs would cost on described hardware, as tables for a terminal, charts and a section."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from surgeon.findings.blocks import Block, Finding, Paragraph, Table
from surgeon.findings.drawing import Chart, Picture, bars, points, scale
from surgeon.findings.result import RunResult, TableFile
from surgeon.memory import show_size
from surgeon.words import NO_VALUE, TIMES, aligned, hanging, number, plural, three_digits, times

AXES = ("ranks", "batch", "prompt", "new")
PARTS = ("compute", "launches", "exposed")  # of a pass's time
SPEEDUPS = ("first_token_speedup", "per_token_speedup", "tokens_per_second_speedup")
TOO_LARGE = "does not fit into memory"  # why a cell of a sweep is refused that has a prediction
_SPEEDS = ("first_token_ms", "per_token_ms", "tokens_per_second")
_PARTS = (("compute", 0), ("launches, gaps", 7), ("waiting for collectives", 1))  # words and colour
_MOST_CHARTS = 8
_GIB = 1 << 30


@dataclass(frozen=True, repr=False)
class Predictions(RunResult):
    """The result of `predict`.

    Attributes:
        speeds: one row per program, ranks and load, as in `predict.csv`; speedups are over the first program on the
            same ranks for the same load.
        cells: by ranks and load, of every program; of predictions just made.
    """

    COMMAND = "predict"
    RECORD = "predict.json"
    TITLE = "Predictions"
    TABLES: ClassVar = {
        "speeds": TableFile(
            "predict.csv",
            (*AXES, *_SPEEDS, "communication_share", "needed_bytes", "there_bytes", "fits", *SPEEDUPS),
            ("program",),
        )
    }

    speeds: pd.DataFrame
    cells: Sequence[Any] = ()

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
        table = self.speeds
        axes = swept_axes(self.speeds)
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
            fits = "no"
            if row["fits"]:
                fits = "yes"
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
                if phase == "prefill":
                    begin = [row["program"], str(row["batch"])]
                else:
                    begin = ["", ""]
                lines.append([*begin, phase, *spent, *counts])
        return aligned(lines)

    @property
    def picture_title(self) -> str:
        return self.heading

    def section(self) -> Iterator[Block]:
        table = self.speeds
        first = table["program"].iloc[0]
        yield Paragraph(
            f"What programs would cost on {self.record.get('hardware', 'hardware that has no name')}, from its figures "
            f"and the model's shapes: nothing was run. Speedups are over {first} on the same ranks for the same load."
        )
        charts = []
        if not self.record.get("swept"):
            charts += _passes(table)
        if table[[*AXES]].nunique().max() > 1:
            charts += _lines(table)
        if charts:  # none where nothing can be shared out
            yield Picture(charts, name="predict")
        yield _cells(table)

    def summary(self) -> Iterator[Finding]:
        table = self.speeds
        fitting = table[(table["fits"] == 1) & (table["program"] != table["program"].iloc[0])]
        hardware = self.record.get("hardware", "hardware")
        if fitting["tokens_per_second_speedup"].notna().any():
            best = fitting.loc[fitting["tokens_per_second_speedup"].idxmax()]
            where = f"{plural(int(best['ranks']), 'rank')} with batch {int(best['batch'])}"
            speedup = f"{number(float(best['tokens_per_second_speedup']), 3)}{TIMES}"
            text = f"On {hardware}, {best['program']} should win most on {where}: {speedup} the tokens per second."
            yield Finding("Predicted", text, speedup, f"predicted on {hardware}")


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
    if axis == "new":
        return f"{value} new"
    return f"{axis} {value}"


def _passes(table: pd.DataFrame) -> list[Chart]:
    """Both passes of every program, by what their time goes to."""
    return [_pass(table, phase) for phase in ("prefill", "decode") if table[f"{phase}_compute_ms"].notna().any()]


def _pass(table: pd.DataFrame, phase: str) -> Chart:
    names = [str(program) for program in table["program"]]
    if table["batch"].nunique() > 1:
        names = [f"{program}, {batch}" for program, batch in zip(names, table["batch"], strict=True)]
    spent = [table[f"{phase}_{part}_ms"].to_numpy() for part in PARTS]
    speedups = table["per_token_speedup" if phase == "decode" else "first_token_speedup"]
    notes = [
        f"{three_digits(end)} ms, {speedup:.2f}x" for end, speedup in zip(np.sum(spent, axis=0), speedups, strict=True)
    ]

    def draw(axes: Axes) -> None:
        bars(axes, names, [(*part, own) for part, own in zip(_PARTS, spent, strict=True)], notes)

    height = 70.0 + 26.0 * len(table)
    return Chart(f"One {phase} pass", draw, "ms", "", "Where its time goes.", height=height, left=150.0)


def _lines(table: pd.DataFrame) -> Iterator[Chart]:
    """Tokens per second along an axis of a sweep, a chart for each value of another; speedups where there are several.

    Where more than two axes are swept, the charts are of the first value of the others.
    """
    several = table["program"].nunique() > 1
    column = "tokens_per_second"
    if several:
        column = "tokens_per_second_speedup"
    title = "new tokens per second"
    if several:
        title = f"tokens/s, times {table['program'].iloc[0]}"
    along, by, table = drawn_axes(table)
    for value in list(table[by].unique())[:_MOST_CHARTS]:
        own = table[(table[by] == value) & table[column].notna()]
        if len(own):
            yield _line_chart(own, column, along, title, words_of(by, int(value)))


def _line_chart(own: pd.DataFrame, column: str, along: str, y: str, title: str) -> Chart:
    def draw(axes: Axes) -> None:
        ticks = sorted(set(own[along]))
        shown = ticks[:: max(1, math.ceil(len(ticks) / 8))]
        axes.set_xscale("log")
        axes.set_xlim(ticks[0] / 1.1, max(ticks[-1], ticks[0] * 2) * 1.1)
        axes.set_xticks(shown, labels=[str(int(tick)) for tick in shown])
        axes.minorticks_off()
        scale(axes, "y", own[column].tolist(), log=not column.endswith("speedup"))
        for style, (program, rows) in enumerate(own.groupby("program", sort=False)):
            tips = [_tip(row, along, column) for _, row in rows.iterrows()]
            points(axes, rows[along], rows[column], tips, style, str(program))

    return Chart(title, draw, along, y, described=f"{y}, {title}")


def _tip(row: pd.Series[float], along: str, column: str) -> str:
    room = ", does not fit into memory"
    if row["fits"]:
        room = ""
    return f"{row['program']}, {along} {int(row[along])}: {number(row[column], 3)}{room}"


def _cells(table: pd.DataFrame) -> Table:
    axes = swept_axes(table)
    head = ["program", *axes, "first token, ms", "per token, ms", "tokens/s", "speedup", "waiting", "GiB"]
    rows = []
    for _, row in table.iterrows():
        begin = [str(row["program"]), *(str(int(row[name])) for name in axes)]
        if math.isnan(row["first_token_ms"]):
            rows.append([*begin, NO_VALUE, NO_VALUE, NO_VALUE, NO_VALUE, NO_VALUE, "cannot be shared"])
            continue
        numbers = [number(row[name], 3) for name in ("first_token_ms", "per_token_ms", "tokens_per_second")]
        speedup = number(row["tokens_per_second_speedup"], 3)
        waiting = f"{row['communication_share']:.0%}"
        memory = number(row["needed_bytes"] / _GIB, 3) + ("" if row["fits"] else ": too much")
        rows.append([*begin, *numbers, speedup, waiting, memory])
    note = (
        "Waiting: the part of the time in which ranks wait for collectives. GiB: of the rank that needs most; there "
        f"are {number(float(table['there_bytes'].max()) / _GIB, 3)} for it."
    )
    return Table("Every prediction", head, rows, note, folded=len(rows) > 24)
