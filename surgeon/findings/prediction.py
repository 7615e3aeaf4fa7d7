"""Prediction: costs of programs on described hardware, as tables for a terminal, charts and a section."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import Normalize

from surgeon.findings.bench import passes_table, uneven_shares
from surgeon.findings.drawing import Chart, Legend, Map, Picture, bars_chart, points, scale
from surgeon.findings.result import Block, Finding, RunResult, Table, table_file
from surgeon.machine import show_size
from surgeon.words import NO_VALUE, TIMES, hang_indent, number, plural, times

AXES = ("ranks", "batch", "prompt", "new")
PARTS = ("compute", "launches", "exposed")  # of a pass's time
SPEEDUPS = ("first_token_speedup", "per_token_speedup", "tokens_per_second_speedup")
TOO_LARGE = "does not fit into memory"  # why a cell of a sweep is refused that has a prediction
_SPEEDS = ("first_token_ms", "per_token_ms", "tokens_per_second")
_PARTS = (("compute", 0), ("launches, gaps", 7), ("waiting for collectives", 1))  # words and colour
_MOST_CHARTS = 8
DRAFT_COLUMNS = (
    *("ranks", "batch", "prompt", "new", "acceptance", "ahead", "draft_ms", "verify_ms", "per_token_ms"),
    *("dense", "drafted", "alone", "speedup", "alone_speedup"),
)


@dataclass(frozen=True, repr=False)
class Predictions(RunResult):
    """The result of `predict`.

    Attributes:
        speeds: one row per program, ranks and load, as in `predict.csv`; speedups are over the first program on the
            same ranks for the same load.
        drafts: where the second program drafts for the first, one row per ranks, load and acceptance, as in
            `drafts.csv`: times in ms; tokens per second without drafts (`dense`), with them (`drafted`) and of the
            draft alone (`alone`), and the ratios of the latter two to the first.
        cells: by ranks and load, of every program; of predictions just made.
    """

    COMMAND = "predict"
    RECORD = "predict.json"
    TITLE = "Predictions"

    speeds: pd.DataFrame = table_file(
        "predict.csv",
        (*AXES, *_SPEEDS, "communication_share", "needed_bytes", "there_bytes", "fits", *SPEEDUPS),
        ("program",),
    )
    drafts: pd.DataFrame = table_file("drafts.csv", DRAFT_COLUMNS, optional=True)
    cells: Sequence[Any] = ()

    def __str__(self) -> str:
        tables = [self._cells()]
        speeds = self.speeds
        if not self.record["swept"]:
            parts = ("compute, ms", "launch, ms", "comm., ms", "hidden, ms")
            tables.append(passes_table("Where the time of a pass goes", speeds, parts, _pass_times))
            if speeds["program"].nunique() > 1:
                ratios = [
                    [row["program"], str(row["batch"]), *(times(row[name]) for name in SPEEDUPS)]
                    for _, row in speeds.iterrows()
                ]
                head = ["program", "batch", "first token", "per token", "tokens/s"]
                tables.append(Table(f"Times as fast as {speeds['program'].iloc[0]}", head, ratios))
        uneven = uneven_shares(speeds)
        if uneven is not None:
            tables.append(uneven)
        if "refused" in self.record:
            tables.append(self._drafting_table())
        return "\n\n".join([hang_indent("", self.heading), *map(str, tables)])

    def _cells(self) -> Table:
        table = self.speeds
        axes = [name for name in AXES if table[name].nunique() > 1] or ["ranks", "batch"]
        rows = []
        for _, row in table.iterrows():
            begin = [str(row["program"]), *(str(int(row[name])) for name in axes)]
            if math.isnan(row["first_token_ms"]):
                rows.append([*begin, *[NO_VALUE] * (len(_SPEEDS) + 2), "refused"])
                continue
            memory = show_size(row["needed_bytes"])
            if not row["fits"]:
                memory += "!"
            speeds = (number(row[name], 3) for name in (*_SPEEDS, "tokens_per_second_speedup"))
            rows.append([*begin, *speeds, f"{row['communication_share']:.0%}", memory])
        there = show_size(table["there_bytes"].max())
        notes = [
            f"Comm.: the share of time that ranks wait. Memory: of the rank that needs most, of {there} for it."
        ]
        if not table["fits"].all() and (table["refused"] == TOO_LARGE).any():
            notes.append(f"!: does not fit into the {there} that there are for it.")
        refused = table[table["first_token_ms"].isna()]
        notes += [f"refused: {reason}" for reason in refused["refused"].drop_duplicates()]
        head = [
            "program",
            *axes,
            "first token, ms",
            "per token, ms",
            "tokens/s",
            "speedup",
            "comm.",
            "memory",
        ]
        return Table("Every prediction", head, rows, "\n".join(notes), folded=len(rows) > 24)

    def _drafting_table(self) -> Table:
        asked = ("ranks", "batch", "acceptance", "ahead")
        found = ("draft_ms", "verify_ms", "drafted", "dense", "speedup", "alone_speedup")
        rows = [
            [*(f"{row[name]:g}" for name in asked), *(number(row[name], 3) for name in found)]
            for _, row in self.drafts.iterrows()
        ]
        head = [
            "ranks",
            "batch",
            "accepted",
            "ahead",
            "draft, ms",
            "verify, ms",
            "tokens/s",
            "dense",
            "times",
        ]
        notes = "\n".join(f"refused: {reason}" for reason in self.record["refused"])
        return Table("Where drafts pay", [*head, "alone, times"], rows, notes)

    def section(self) -> Iterator[Block]:
        table = self.speeds
        first = table["program"].iloc[0]
        yield (
            f"What programs would cost on {self.record.get('hardware', 'hardware that has no name')}, from its figures "
            f"and the model's shapes: nothing was run. Speedups are over {first} on the same ranks for the same load."
        )
        charts = []
        if not self.record.get("swept"):
            phases = (
                phase for phase in ("prefill", "decode") if table[f"{phase}_compute_ms"].notna().any()
            )
            names = [str(program) for program in table["program"]]
            if table["batch"].nunique() > 1:
                names = [f"{one}, {batch}" for one, batch in zip(names, table["batch"], strict=True)]
            for phase in phases:
                spent = [table[f"{phase}_{part}_ms"].to_numpy() for part in PARTS]
                speedups = table["per_token_speedup" if phase == "decode" else "first_token_speedup"]
                notes = [
                    f"{number(end, 3)} ms, {speedup:.2f}x"
                    for end, speedup in zip(np.sum(spent, axis=0), speedups, strict=True)
                ]
                parts = [(*part, own) for part, own in zip(_PARTS, spent, strict=True)]
                looks: Any = {"caption": "Where its time goes.", "left": 150.0}
                charts.append(bars_chart(f"One {phase} pass", names, parts, notes, "ms", **looks))
        if table[[*AXES]].nunique().max() > 1:
            charts += _lines(table)
        if charts:  # none where nothing can be shared out
            yield Picture(charts, name="predict")
        if len(self.drafts):
            yield drafts_picture({"": self.drafts})
            yield self._drafting_table()
        yield self._cells()

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


def words_of(axis: str, value: int) -> str:
    """Name a value of an axis: 8 ranks, batch 16, prompt 1024, 512 new."""
    if axis == "ranks":
        return plural(value, "rank")
    if axis == "new":
        return f"{value} new"
    return f"{axis} {value}"


def _pass_times(row: Any, phase: str) -> list[str]:
    communication = row[f"{phase}_communication_ms"]
    hidden = communication - row[f"{phase}_exposed_ms"]
    if hidden < 1e-9 * communication:  # what rounding leaves of nothing
        hidden = 0.0
    return [number(value, 3) for value in (*(row[f"{phase}_{part}_ms"] for part in PARTS), hidden)]


def _lines(table: pd.DataFrame) -> Iterator[Chart]:
    """Tokens per second along an axis of a sweep, a chart for each value of another; of several programs speedups.

    Of further axes the charts have the first value.
    """
    column = "tokens_per_second"
    title = "new tokens per second"
    if table["program"].nunique() > 1:
        column = "tokens_per_second_speedup"
        title = f"tokens/s, times {table['program'].iloc[0]}"
    along, by, *others = sorted(
        ("batch", "ranks", "prompt", "new"), key=lambda name: table[name].nunique() == 1
    )
    for name in others:
        table = table[table[name] == table[name].iloc[0]]
    for value in list(table[by].unique())[:_MOST_CHARTS]:
        own = table[(table[by] == value) & table[column].notna()]
        if len(own):
            yield _line_chart(own, column, along, title, words_of(by, int(value)))


def _line_chart(own: pd.DataFrame, column: str, along: str, y: str, title: str) -> Chart:
    def tip(row: Any) -> str:
        fits = "" if row["fits"] else ", does not fit into memory"
        return f"{row['program']}, {along} {int(row[along])}: {number(row[column], 3)}{fits}"

    def draw(axes: Axes) -> None:
        ticks = sorted(set(own[along]))
        shown = ticks[:: max(1, math.ceil(len(ticks) / 8))]
        axes.set_xscale("log")
        axes.set_xlim(ticks[0] / 1.1, max(ticks[-1], ticks[0] * 2) * 1.1)
        axes.set_xticks(shown, labels=[str(int(tick)) for tick in shown])
        axes.minorticks_off()
        scale(axes, "y", own[column].tolist(), log=not column.endswith("speedup"))
        for style, (program, rows) in enumerate(own.groupby("program", sort=False)):
            points(axes, rows, along, column, tip, style, str(program))

    return Chart(title, draw, along, y, described=f"{y}, {title}")


def drafts_picture(found: dict[str, pd.DataFrame]) -> Picture:
    """Map each draft by its name: ranks down, batches across, of the first prompt and number of tokens."""
    legend = Legend(Normalize(1.0, 2.0), "Times as fast as without drafts")
    panels = []

    def add(title: str, rows: pd.DataFrame, column: str) -> None:
        fields = {column: "times as fast", "ahead": "tokens ahead"}
        panels.append(Map(title.strip(), rows, "ranks", "batch", fields, legend))

    for name, speeds in found.items():
        drawn = speeds[
            (speeds[["prompt", "new"]] == speeds[["prompt", "new"]].iloc[0]).all(axis="columns")
        ]
        for chance, cells in drawn.groupby("acceptance"):
            add(f"{name} {chance:g} accepted", cells, "speedup")
        add(f"{name} alone (lossy)", drawn.drop_duplicates(["ranks", "batch"]), "alone_speedup")
    return Picture(panels, "Where drafts pay; refused cells stay empty.", "drafts")
