"""Predictions: what programs would cost on described hardware."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pandas as pd

from surgeon.findings.blocks import Block, Finding, Gallery, Paragraph, Table
from surgeon.findings.drawing import Chart, chart, points, scale
from surgeon.findings.prediction import PredictRun, drawn_axes, swept_axes, words_of
from surgeon.findings.runs import Kind, Run
from surgeon.words import NO_VALUE, TIMES, number, plural

_GIB = 1 << 30
_MOST_CHARTS = 8


def _show(run: Run[PredictRun]) -> Iterator[Block]:
    table = run.found.speeds
    hardware = run.record.get("hardware", "hardware that has no name")
    yield Paragraph(
        f"What programs would cost on {hardware}, from its figures and the model's shapes: nothing was run. Speedups "
        f"are over {table['program'].iloc[0]} on the same ranks for the same load."
    )
    if table[["ranks", "batch", "prompt", "new"]].nunique().max() > 1:
        several = table["program"].nunique() > 1
        column = "tokens_per_second_speedup" if several else "tokens_per_second"
        title = f"tokens/s, times {table['program'].iloc[0]}" if several else "new tokens per second"
        charts = _charts(table, column, title)
        yield from [Gallery(charts)] if charts else []  # none where nothing can be shared out
    yield _cells(table)


def _charts(table: pd.DataFrame, column: str, title: str) -> list[Chart]:
    along, by, table = drawn_axes(table)
    charts = []
    for value in list(table[by].unique())[:_MOST_CHARTS]:
        own = table[(table[by] == value) & table[column].notna()]
        if own.empty:
            continue
        figure, axes = chart(along, title)
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
        charts.append(Chart(figure, words_of(by, int(value)), described=f"{title}, {words_of(by, int(value))}"))
    return charts


def _tip(row: pd.Series[float], along: str, column: str) -> str:
    room = "" if row["fits"] else ", does not fit into memory"
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
        speedup, waiting = number(row["tokens_per_second_speedup"], 3), f"{row['communication_share']:.0%}"
        memory = number(row["needed_bytes"] / _GIB, 3) + ("" if row["fits"] else ": too much")
        rows.append([*begin, *numbers, speedup, waiting, memory])
    note = (
        "Waiting: the part of the time in which ranks wait for collectives. GiB: of the rank that needs most; there "
        f"are {number(float(table['there_bytes'].max()) / _GIB, 3)} for it."
    )
    return Table("Every prediction", head, rows, note, folded=len(rows) > 24)


def _findings(run: Run[PredictRun]) -> Iterator[Finding]:
    table = run.found.speeds
    fitting = table[(table["fits"] == 1) & (table["program"] != table["program"].iloc[0])]
    hardware = run.record.get("hardware", "hardware")
    if fitting["tokens_per_second_speedup"].notna().any():
        best = fitting.loc[fitting["tokens_per_second_speedup"].idxmax()]
        where = f"{plural(int(best['ranks']), 'rank')} with batch {int(best['batch'])}"
        speedup = f"{number(float(best['tokens_per_second_speedup']), 3)}{TIMES}"
        text = f"On {hardware}, {best['program']} should win most on {where}: {speedup} the tokens per second."
        yield Finding("Predicted", text, speedup, f"predicted on {hardware}")


PREDICTION = Kind(PredictRun, "Predictions", _show, _findings)
