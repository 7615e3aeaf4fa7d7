"""Sensitivity: what running two neighbouring layers as an LP pair should cost, and does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from surgeon.reports.blocks import Block, Chart, Finding, Gallery, Paragraph, Table
from surgeon.reports.drawing import chart, layers_across, points, scale
from surgeon.reports.runs import Kind, Run, TableFile
from surgeon.words import interval_heads, listed, number, plural, with_intervals

TABLE = "sensitivity.csv"
_LINES = {
    "relative_bound": ("bound (equation 12)", 0),
    "relative_first_order": ("first order", 2),
    "relative_error": ("measured", 1),
}
_NAMED = 3  # pairs that the summary names
_PREDICTORS = {
    "bound": "bound",
    "relative_bound": "bound / stream",
    "log10_output_bound": "bound on the output",
    "first_order": "first order",
    "relative_first_order": "first order / stream",
    "error": "measured error",
    "relative_error": "measured error / stream",
}
_DAMAGES = {"error": "measured error", "divergence": "divergence", "log_perplexity_ratio": "log perplexity ratio"}


def _show(run: Run) -> Iterator[Block]:
    table = run.tables[TABLE].sort_values("first")
    yield Paragraph(
        "Each pair of neighbouring layers alone as an LP pair: the bound on its local error from appendix A of the "
        "Layer Parallelism paper, its first-order size, what it is, and what it does to the predictions."
    )
    yield Gallery([_errors(table), _bound_and_damage(table)])
    if isinstance(run.record.get("correlations"), list):
        yield _correlations(run.record["correlations"])
    yield _pairs(table)


def _pair(row: Any) -> str:
    return f"{int(row['first'])}+{int(row['last'])}"


def _errors(table: pd.DataFrame) -> Chart:
    figure, axes = chart("first layer of the pair", "error / norm of the stream")
    layers_across(axes, int(table["first"].min()), int(table["first"].max()))
    scale(axes, "y", table[list(_LINES)].to_numpy(dtype=float).ravel().tolist(), log=True)
    for column, (words, style) in _LINES.items():
        tips = [f"pair {_pair(row)}, {words}: {number(row[column])}" for _, row in table.iterrows()]
        points(axes, table["first"], table[column], tips, style, words)
    return Chart(figure, "Error of a pair: bound and measured", "Relative to the stream after the pair.")


def _bound_and_damage(table: pd.DataFrame) -> Chart:
    table = table[table["relative_bound"] > 0]
    tips = [
        f"pair {_pair(row)}: bound {number(row['relative_bound'])}, divergence {number(row['divergence'])}"
        for _, row in table.iterrows()
    ]
    figure, axes = chart("bound / norm of the stream", "divergence (nats per token)")
    scale(axes, "x", table["relative_bound"].tolist(), log=True)
    scale(axes, "y", table["divergence"].tolist(), log=True)
    known = {"divergence_low", "divergence_high"} <= set(table)
    ends = (table["divergence_low"], table["divergence_high"]) if known else None
    points(axes, table["relative_bound"], table["divergence"], tips, line=False, ends=ends)
    return Chart(figure, "What the bound says of the damage", "One point for each pair. Bars: 95% intervals.")


def _correlations(rows: list[dict[str, Any]]) -> Table:
    found: dict[tuple[str, str], float | None] = {
        (str(row.get("predictor")), str(row.get("damage"))): row.get("rho") for row in rows if isinstance(row, dict)
    }
    predictors = [name for name in _PREDICTORS if any(key[0] == name for key in found)]
    damages = [name for name in _DAMAGES if any(key[1] == name for key in found)]
    body, marked = [], set[tuple[int, int]]()
    for row, predictor in enumerate(predictors):
        values = [found.get((predictor, damage)) for damage in damages]
        body.append([_PREDICTORS[predictor], *("" if v is None else number(float(v), 3) for v in values)])
        for column, (value, damage) in enumerate(zip(values, damages, strict=True), start=1):
            others = [rho for (_, of), rho in found.items() if of == damage and rho is not None]
            if value is not None and value == max(others):
                marked.add((row, column))
    head = ["rank correlation of", *(f"with {_DAMAGES[name]}" for name in damages)]
    note = "Spearman's, over all pairs. Marked: the best for each damage."
    return Table("What orders the pairs as their damage does", head, body, note, marked=frozenset(marked))


def _pairs(table: pd.DataFrame) -> Table:
    head = ["pair", "bound", "first order", "measured", "perplexity", *interval_heads(table, ["divergence"])]
    rows = [
        [
            _pair(row),
            *(number(row[name]) for name in _LINES),
            number(row["perplexity"]),
            *with_intervals(row, ["divergence"]),
        ]
        for _, row in table.iterrows()
    ]
    note = "Bound, first order and measured error are relative to the stream."
    return Table("Every pair", head, rows, note, folded=True)


def _findings(run: Run) -> Iterator[Finding]:
    table = run.tables[TABLE].sort_values("divergence", kind="stable")
    count = min(_NAMED, len(table) // 2)
    if count:
        least = listed(f"{_pair(row)} ({number(row['divergence'], 2)})" for _, row in table.head(count).iterrows())
        most = listed(
            f"{_pair(row)} ({number(row['divergence'], 2)})" for _, row in table.tail(count).iloc[::-1].iterrows()
        )
        text = f"As a single LP pair, {least} change the predictions least, {most} most (divergence, nats per token)."
        yield Finding("Single pairs", text)
    held, of_all = run.record.get("errors_within_bound"), run.record.get("errors")
    if isinstance(held, int) and isinstance(of_all, int) and of_all:
        ratio = float((table["bound"] / table["error"]).median())
        text = (
            f"The error stays below the paper's bound in {held} of {plural(of_all, 'measurement')}; the bound is "
            f"{number(ratio, 2)} times the error in the median."
        )
        yield Finding("The bound", text)


SENSITIVITY = Kind(
    name="sensitivity",
    title="Sensitivity",
    record="sensitivity.json",
    show=lambda run: list(_show(run)),
    tables=(TableFile(TABLE, ("bound", "error", *_LINES, "perplexity", "divergence"), (), ("first", "last")),),
    findings=lambda run: list(_findings(run)),
    without="No sensitivity: the error bound of single pairs is not known (surgeon sensitivity).",
)
