"""Speeds of programs on ranks, measured (bench) or predicted for described hardware: tables, charts and a section."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import Normalize

from surgeon.findings.drawing import COLOURS, INK, Chart, Legend, Map, Picture, points, scale
from surgeon.findings.result import Block, Finding, RunResult, Table, table_file
from surgeon.machine import show_size
from surgeon.words import NO_VALUE, TIMES, hang_indent, number, plural, times, with_intervals

RATIOS = ("first_token_speedup", "per_token_speedup", "tokens_per_second_speedup")
COLUMNS = ("first_token_ms", "prefill_ms", "decode_ms", "per_token_ms", "tokens_per_second")
LEAST_IMBALANCE = 1.005  # that is shown
AXES = ("ranks", "batch", "prompt", "new")
PARTS = ("compute", "launches", "exposed")  # of a pass's time
TOO_LARGE = "does not fit into memory"  # why a cell of a sweep is refused that has a prediction
_SPEEDS = ("first_token_ms", "per_token_ms", "tokens_per_second")
# Words and colours of the parts of a pass.
_LOOKS = {
    "compute": ("compute", 0),
    "launches": ("launches, gaps", 7),
    "exposed": ("waiting for collectives", 1),
    "waiting": ("waiting for collectives", 1),
}
_MOST_CHARTS = 8
DRAFT_COLUMNS = (
    *("ranks", "batch", "prompt", "new", "acceptance", "ahead", "draft_ms", "verify_ms", "per_token_ms"),
    *("dense", "drafted", "alone", "speedup", "alone_speedup"),
)


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
        is_seen = "prefill_hidden_ms" in table and table["prefill_hidden_ms"].notna().any()
        split = ("compute, ms", "waiting, ms", "hidden, ms" if is_seen else "")
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
        tables += _uneven_shares(table)
        if "divergence" in table:
            measured = table.drop_duplicates("program").dropna(subset=["divergence"])
            body = [
                [row["program"], *with_intervals(row, ["divergence"])] for _, row in measured.iterrows()
            ]
            caption = f"What {self.record['compression']} changes in predictions, nats per token"
            tables.append(Table(caption, ["program", "divergence", "95% interval"], body))
        return "\n\n".join(["\n".join(parts), *map(str, tables)])

    def pictures(self) -> dict[str, Picture]:
        """`bench`: compute and waiting of a decoding pass of every program, or else of a prompt's."""
        speeds = self.speeds
        phase = "prefill"
        whole = "prefill_ms"
        if "decode_compute_ms" in speeds:
            phase = "decode"
            whole = "per_token_ms"
        parts = ["compute", "waiting"]
        # The process does not see what GPUs wait for.
        if speeds[f"{phase}_waiting_ms"].isna().all():
            speeds = speeds.assign(**{f"{phase}_compute_ms": speeds[whole]})
            parts = ["compute"]
        return {"bench": Picture([_pass_chart(speeds, phase, parts)])}


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
        (*AXES, *_SPEEDS, "communication_share", "needed_bytes", "there_bytes", "fits", *RATIOS),
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
                    [row["program"], str(row["batch"]), *(times(row[name]) for name in RATIOS)]
                    for _, row in speeds.iterrows()
                ]
                head = ["program", "batch", "first token", "per token", "tokens/s"]
                tables.append(Table(f"Times as fast as {speeds['program'].iloc[0]}", head, ratios))
        tables += _uneven_shares(speeds)
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
        charts: list[Chart] = []
        if not self.record.get("swept"):
            charts = [
                _pass_chart(table, phase, PARTS)
                for phase in ("prefill", "decode")
                if table[f"{phase}_compute_ms"].notna().any()
            ]
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


def _uneven_shares(speeds: pd.DataFrame) -> Iterator[Table]:
    """Table the share of a pass on the busiest rank, where ranks have unequal parts of a program."""
    if "imbalance" in speeds:  # not in older files
        about = [name for name in ("program", "ranks") if name in speeds]
        uneven = speeds[speeds["imbalance"] >= LEAST_IMBALANCE].drop_duplicates([*about, "imbalance"])
        if len(uneven):
            rows = [[*map(str, row[about]), f"{row['imbalance']:.2f}"] for _, row in uneven.iterrows()]
            caption = "Weights that the busiest rank reads, which others wait for; 1 is an even share"
            yield Table(caption, [*about, "times an even share"], rows)


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
    hidden = row.get(f"{phase}_hidden_ms", math.nan)
    last = ""
    if not math.isnan(hidden):
        last = number(hidden, 3)
    elif not math.isnan(waiting):
        last = f"{waiting / (compute + waiting):.0%}"
    return [number(compute, 3), number(waiting, 3), last]


def _pass_chart(speeds: pd.DataFrame, phase: str, parts: Sequence[str]) -> Chart:
    """Draw where the time of a pass of every program goes: a bar for each, the first on top, of parts end to end."""
    names = [str(program) for program in speeds["program"]]
    if speeds["batch"].nunique() > 1:
        names = [f"{one}, {batch}" for one, batch in zip(names, speeds["batch"], strict=True)]
    columns = speeds[[f"{phase}_{part}_ms" for part in parts]].fillna(0.0)
    speedups = speeds["per_token_speedup" if phase == "decode" else "first_token_speedup"]

    def draw(axes: Axes) -> None:
        places = np.arange(len(names))
        ends = np.zeros(len(names))
        for part, column in zip(parts, columns, strict=True):
            words, colour = _LOOKS[part]
            lengths = columns[column].to_numpy()
            axes.barh(places, lengths, left=ends, color=COLOURS[colour], label=words, height=0.62)
            ends = ends + lengths
        for place, end, speedup in zip(places.tolist(), ends, speedups, strict=True):
            note = f"  {number(end, 3)} ms, {speedup:.2f}x"
            axes.text(end, place, note, va="center", fontsize=9, color=INK)
        axes.set_yticks(places, labels=names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_xlim(0, 1.6 * float(np.nanmax(ends)))
        axes.grid(visible=False)

    height = 70.0 + 26.0 * len(names)
    caption = "Where its time goes."
    return Chart(f"One {phase} pass", draw, "ms", caption=caption, height=height, left=150.0)
