"""Sensitivity: what running two neighbouring layers as an LP pair should cost, and does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from surgeon.findings.blocks import Block, Finding, Gallery, Paragraph, Table
from surgeon.findings.drawing import Chart, chart, layers_across, points, scale
from surgeon.findings.runs import Kind, Run
from surgeon.findings.sensitivity import DAMAGES, PREDICTORS, RELATIVE, Sensitivity
from surgeon.words import interval_heads, listed, number, plural, with_intervals

# What is drawn of each column: its words and its style.
_LINES = dict(zip(RELATIVE, (("bound (equation 12)", 0), ("first order", 2), ("measured", 1)), strict=True))
_NAMED = 3  # pairs that the summary names
_DAMAGES = dict(zip(DAMAGES, ("measured error", "divergence", "log perplexity ratio"), strict=True))


def _show(run: Run[Sensitivity]) -> Iterator[Block]:
    table = run.found.pairs.sort_values("first")
    yield Paragraph(
        "Each pair of neighbouring layers alone as an LP pair: the bound on its local error from appendix A of the "
        "Layer Parallelism paper, its first-order size, what it is, and what it does to the predictions."
    )
    yield Gallery([_errors(table), _bound_and_damage(table)])
    if len(run.found.correlations):
        yield _correlations(run.found.correlations)
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


def _correlations(found: pd.DataFrame) -> Table:
    rho = found.pivot_table(index="predictor", columns="damage", values="rho", dropna=False)
    rho = rho.reindex(
        index=[name for name in PREDICTORS if name in rho.index], columns=[name for name in _DAMAGES if name in rho]
    )
    rows = [
        [PREDICTORS[str(name)][1], *("" if math.isnan(value) else number(value, 3) for value in values)]
        for name, values in rho.iterrows()
    ]
    best = np.argwhere((rho == rho.max()).to_numpy())
    head = ["rank correlation of", *(f"with {_DAMAGES[str(name)]}" for name in rho)]
    note = "Spearman's, over all pairs. Marked: the best for each damage."
    marked = frozenset((int(row), int(column) + 1) for row, column in best)
    return Table("What orders the pairs as their damage does", head, rows, note, marked=marked)


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


def _findings(run: Run[Sensitivity]) -> Iterator[Finding]:
    table = run.found.pairs.sort_values("divergence", kind="stable")
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
    Sensitivity,
    "Sensitivity",
    _show,
    _findings,
    without="No sensitivity: the error bound of single pairs is not known (surgeon sensitivity).",
)
