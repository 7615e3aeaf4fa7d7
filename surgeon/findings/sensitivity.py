"""Sensitivity: bounds of the error of two neighbouring layers as an LP pair, the error itself, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from surgeon.findings.blocks import Block, Finding, Paragraph, Table
from surgeon.findings.drawing import Chart, Picture, columns_chart, points, scale
from surgeon.findings.result import RunResult, TableFile
from surgeon.words import aligned, interval_heads, listed, number, plural, with_intervals

# Words and style of each column that is drawn.
_ERRORS = {
    "bound": ("bound (equation 12)", 0),
    "attention_shift": ("its attention shift", 5),
    "mlp_shift": ("its shift of the first MLP", 4),
    "next_mlp_shift": ("its shift of the second MLP", 6),
    "first_order": ("first order", 2),
    "error": ("measured", 1),
}
_JACOBIANS = {
    "attention_jacobian": ("second attention", 0),
    "mlp_jacobian": ("first MLP", 4),
    "next_mlp_jacobian": ("second MLP", 1),
}
# What is compared with damage: as a terminal and as the page names it.
PREDICTORS = {
    "bound": ("bound (equation 12)", "bound"),
    "relative_bound": ("bound / stream", "bound / stream"),
    "log10_output_bound": ("bound x amplification (13)", "bound on the output"),
    "first_order": ("first order", "first order"),
    "relative_first_order": ("first order / stream", "first order / stream"),
    "error": ("measured local error", "measured error"),
    "relative_error": ("measured error / stream", "measured error / stream"),
}
DAMAGES = ("error", "divergence", "log_perplexity_ratio")
RELATIVE = ("relative_bound", "relative_first_order", "relative_error")
_LINES = dict(zip(RELATIVE, (("bound (equation 12)", 0), ("first order", 2), ("measured", 1)), strict=True))
_NAMED = 3  # pairs that the summary names
_WORDS = dict(zip(DAMAGES, ("measured error", "divergence", "log perplexity ratio"), strict=True))


@dataclass(frozen=True, repr=False)
class Sensitivity(RunResult):
    """The result of `sensitivity`.

    Attributes:
        pairs: one row per pair of neighbouring layers, as in `sensitivity.csv`: `first` and `last`, counted from 0;
            the terms of `lp_error.TERMS`, means over the windows they were computed on; `relative_bound`,
            `relative_first_order` and `relative_error`, divided by `stream_norm`; `log10_amplification`, of the
            product in equation 13, and `log10_output_bound`, with the bound; `perplexity` and `divergence` of the
            model with this pair in parallel, with the divergence's 95% interval, and `log_perplexity_ratio`;
            `iterations`, the most that an operator norm took, and `converged`, whether all of them did.
        correlations: rank correlations of `PREDICTORS` with `DAMAGES`: `predictor`, `damage`, `rho`, `p`, `n`; also in
            the record.
    """

    COMMAND = "sensitivity"
    RECORD = "sensitivity.json"
    TITLE = "Sensitivity"
    WITHOUT = "No sensitivity: the error bound of single pairs is not known (surgeon sensitivity)."
    TABLES: ClassVar = {
        "pairs": TableFile(
            "sensitivity.csv", ("bound", "error", *RELATIVE, "perplexity", "divergence"), (), ("first", "last")
        )
    }

    pairs: pd.DataFrame
    correlations: pd.DataFrame = field(default_factory=pd.DataFrame)

    @classmethod
    def facts(cls, record: dict[str, Any], file: Path) -> dict[str, Any]:  # noqa: ARG003
        return {"correlations": pd.DataFrame(record.get("correlations") or [])}

    def section(self) -> Iterator[Block]:
        table = self.pairs.sort_values("first")
        yield Paragraph(
            "Each pair of neighbouring layers alone as an LP pair: the bound on its local error from appendix A of the "
            "Layer Parallelism paper, its first-order size, what it is, and what it does to the predictions."
        )
        relative = "error / norm of the stream"
        caption = "Relative to the stream after the pair."
        charts = [_by_pair(table, _LINES, relative, "Error of a pair: bound and measured", caption)]
        charts.append(_bound_and_damage(table))
        damage = {"divergence": ("divergence", 0)}
        charts.append(_by_pair(table, damage, "divergence (nats per token)", "Damage of a pair", ""))
        if set(_ERRORS) | set(_JACOBIANS) <= set(table):
            parts = "The bound is the sum of its three shifts; over a window's stream."
            charts.append(_by_pair(table, _ERRORS, "norm over a window", "What the bound is made of", parts))
            charts.append(_by_pair(table, _JACOBIANS, "norm", "Jacobians of the sublayers", "Operator norms."))
        yield Picture(charts, name="sensitivity")
        if len(self.correlations):
            yield _correlations(self.correlations)
        yield _pairs(table)

    def summary(self) -> Iterator[Finding]:
        table = self.pairs.sort_values("divergence", kind="stable")
        count = min(_NAMED, len(table) // 2)
        if count:
            least = listed(f"{_pair(row)} ({number(row['divergence'], 2)})" for _, row in table.head(count).iterrows())
            most = listed(
                f"{_pair(row)} ({number(row['divergence'], 2)})" for _, row in table.tail(count).iloc[::-1].iterrows()
            )
            text = (
                f"As a single LP pair, {least} change the predictions least, {most} most (divergence, nats per token)."
            )
            yield Finding("Single pairs", text)
        held = self.record.get("errors_within_bound")
        of_all = self.record.get("errors")
        if isinstance(held, int) and isinstance(of_all, int) and of_all:
            ratio = float((table["bound"] / table["error"]).median())
            text = (
                f"The error stays below the paper's bound in {held} of {plural(of_all, 'measurement')}; the bound is "
                f"{number(ratio, 2)} times the error in the median."
            )
            yield Finding("The bound", text)

    def __str__(self) -> str:
        """How well the bound, and the error itself, order the pairs by their damage, in 80 columns."""
        rho, p = (
            self.correlations.pivot_table(index="predictor", columns="damage", values=name, dropna=False).reindex(
                index=[*PREDICTORS], columns=[*DAMAGES]
            )
            for name in ("rho", "p")
        )
        known = {*zip(self.correlations["predictor"], self.correlations["damage"], strict=True)}

        def cell(predictor: str, damage: str) -> str:
            if (predictor, damage) not in known:
                return ""
            value = rho[damage][predictor]
            best = " "
            if value == rho[damage].max():
                best = "*"
            if np.isnan(value):
                return "-"
            return f"{value:.3f}{best} ({p[damage][predictor]:.0e})"

        lines = [["", "", "", "log perplexity"], ["by pair", "local error", "divergence", "ratio"]]
        lines += [[words, *(cell(name, damage) for damage in DAMAGES)] for name, (words, _) in PREDICTORS.items()]
        table = self.pairs
        looseness = np.inf
        if (table["error"] > 0).all():
            looseness = float(np.median(table["bound"] / table["error"]))
        within = self.record["errors_within_bound"]
        every = self.record["errors"]
        return (
            f"Spearman's rho over {len(table)} pairs of layers (p in brackets; *: the best)\n{aligned(lines)}\n\n"
            f"the error is within its bound in {within} of {every} cases (pairs and windows);\n"
            f"the bound is {looseness:.3g} times the error (median over pairs)"
        )


def _pair(row: Any) -> str:
    return f"{int(row['first'])}+{int(row['last'])}"


def _by_pair(table: pd.DataFrame, lines: Mapping[str, tuple[str, int]], y: str, title: str, caption: str) -> Chart:
    named = (f"pair {_pair(row)}" for _, row in table.iterrows())
    return columns_chart(table, lines, named, (title, "first layer of the pair", y), caption)


def _bound_and_damage(table: pd.DataFrame) -> Chart:
    table = table[table["relative_bound"] > 0]

    def draw(axes: Axes) -> None:
        tips = [
            f"pair {_pair(row)}: bound {number(row['relative_bound'])}, divergence {number(row['divergence'])}"
            for _, row in table.iterrows()
        ]
        scale(axes, "x", table["relative_bound"].tolist(), log=True)
        scale(axes, "y", table["divergence"].tolist(), log=True)
        ends = None
        if {"divergence_low", "divergence_high"} <= set(table):
            ends = (table["divergence_low"], table["divergence_high"])
        points(axes, table["relative_bound"], table["divergence"], tips, line=False, ends=ends)

    caption = "One point for each pair. Bars: 95% intervals."
    x = "bound / norm of the stream"
    return Chart("What the bound says of the damage", draw, x, "divergence (nats per token)", caption)


def _correlations(found: pd.DataFrame) -> Table:
    rho = found.pivot_table(index="predictor", columns="damage", values="rho", dropna=False)
    rho = rho.reindex(
        index=[name for name in PREDICTORS if name in rho.index], columns=[name for name in _WORDS if name in rho]
    )
    rows = [
        [PREDICTORS[str(name)][1], *("" if math.isnan(value) else number(value, 3) for value in values)]
        for name, values in rho.iterrows()
    ]
    best = np.argwhere((rho == rho.max()).to_numpy())
    head = ["rank correlation of", *(f"with {_WORDS[str(name)]}" for name in rho)]
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
