"""Sensitivity: bounds of the error of two neighbouring layers as an LP pair, the error itself, and its damage."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from surgeon.findings.drawing import Chart, Picture, columns_chart, points, scale
from surgeon.findings.result import Block, Finding, Record, RunResult, Table, table_file
from surgeon.words import NO_VALUE, hang_indent, join_words, number, plural

PREDICTORS = {  # of damage
    "bound": "bound (equation 12)",
    "relative_bound": "bound / stream",
    "log10_output_bound": "bound x amplification (13)",
    "first_order": "first order",
    "relative_first_order": "first order / stream",
    "error": "measured local error",
    "relative_error": "measured error / stream",
}
DAMAGES = ("error", "divergence", "log_perplexity_ratio")
RELATIVE = ("relative_bound", "relative_first_order", "relative_error")
_LINES = dict(
    zip(RELATIVE, (("bound (equation 12)", 0), ("first order", 2), ("measured", 1)), strict=True)
)
_NAMED = 3  # pairs that the summary names


@dataclass(frozen=True, repr=False)
class Sensitivity(RunResult):
    """The result of `sensitivity`.

    Attributes:
        pairs: one row per pair of neighbouring layers, as in `sensitivity.csv`: `first` and `last`, counted from 0;
            the terms of `lp_error.TERMS`, means over the windows; `relative_bound`, `relative_first_order` and
            `relative_error`, divided by `stream_norm`; `log10_amplification`, of the product in equation 13, and
            `log10_output_bound`, with the bound; `perplexity`, `divergence` (95% interval) and `log_perplexity_ratio`
            of the model with this pair in parallel; `iterations`, the most of an operator norm, and `converged`.
        correlations: rank correlations of `PREDICTORS` with `DAMAGES`: `predictor`, `damage`, `rho`, `p`, `n`; also in
            the record.
    """

    COMMAND = "sensitivity"
    RECORD = "sensitivity.json"
    TITLE = "Sensitivity"
    WITHOUT = "No sensitivity: the error bound of single pairs is not known (surgeon sensitivity)."

    pairs: pd.DataFrame = table_file(
        "sensitivity.csv",
        ("bound", "error", *RELATIVE, "perplexity", "divergence"),
        (),
        ("first", "last"),
    )
    correlations: pd.DataFrame = field(default_factory=pd.DataFrame)

    @classmethod
    def facts(cls, record: Record, file: Path) -> Record:  # noqa: ARG003
        return {"correlations": pd.DataFrame(record.get("correlations") or [])}

    def section(self) -> Iterator[Block]:
        table = self.pairs.sort_values("first")
        yield (
            "Each pair of neighbouring layers alone as an LP pair: the bound on its local error from appendix A of the "
            "Layer Parallelism paper, its first-order size, what it is, and what it does to the predictions."
        )
        first = "first layer of the pair"
        titles = ("Error of a pair: bound and measured", first, "error / norm of the stream")
        error = columns_chart(table, _LINES, _pair, titles, "Relative to the stream after the pair.")
        titles = ("Damage of a pair", first, "divergence (nats per token)")
        damage = columns_chart(table, {"divergence": ("divergence", 0)}, _pair, titles)
        bounded = table[table["relative_bound"] > 0]

        def tip(row: Any) -> str:
            bound = number(row["relative_bound"])
            return f"{_pair(row)}: bound {bound}, divergence {number(row['divergence'])}"

        def draw(axes: Axes) -> None:
            scale(axes, "x", bounded["relative_bound"].tolist(), log=True)
            scale(axes, "y", bounded["divergence"].tolist(), log=True)
            points(axes, bounded, "relative_bound", "divergence", tip, line=False, intervals=True)

        caption = "One point for each pair. Bars: 95% intervals."
        x = "bound / norm of the stream"
        bound = Chart(
            "What the bound says of the damage", draw, x, "divergence (nats per token)", caption
        )
        yield Picture([error, bound, damage], name="sensitivity")
        if len(self.correlations):
            yield self._correlations()

    def summary(self) -> Iterator[Finding]:
        table = self.pairs.sort_values("divergence", kind="stable")
        count = min(_NAMED, len(table) // 2)
        if count:
            pairs = [
                f"{_pair(row).removeprefix('pair ')} ({number(row['divergence'], 2)})"
                for _, row in table.iterrows()
            ]
            least = join_words(pairs[:count])
            most = join_words(pairs[: -count - 1 : -1])
            text = (
                f"As a single LP pair, {least} change the predictions least, {most} most "
                "(divergence, nats per token)."
            )
            yield Finding("Single pairs", text)
        if bound := self._of_bound():
            yield Finding("The bound", bound)

    def __str__(self) -> str:
        """Rank correlations of the bound, and of the error itself, with the damage, in 80 columns."""
        return f"{self._correlations()}\n\n{hang_indent('', self._of_bound())}"

    def _of_bound(self) -> str:
        held = self.record.get("errors_within_bound")
        of_all = self.record.get("errors")
        if not (isinstance(held, int) and isinstance(of_all, int) and of_all):
            return ""
        ratio = float((self.pairs["bound"] / self.pairs["error"]).median())
        return (
            f"The error stays below the paper's bound in {held} of {plural(of_all, 'measurement')}; the bound is "
            f"{number(ratio, 2)} times the error in the median."
        )

    def _correlations(self) -> Table:
        found = self.correlations
        rows = []
        best = found.groupby("damage")["rho"].max()
        for name, words in PREDICTORS.items():
            own = found[found["predictor"] == name].set_index("damage")
            cells = []
            for damage in DAMAGES:
                if damage not in own.index:
                    cells.append("")
                    continue
                rho = float(own["rho"][damage])
                star = " "
                if rho == best[damage]:
                    star = "*"
                cells.append(
                    NO_VALUE if math.isnan(rho) else f"{rho:.3f}{star} ({own['p'][damage]:.0e})"
                )
            rows.append([words, *cells])
        head = ["by pair", "local error", "divergence", "log perplexity ratio"]
        note = "Spearman's rho over pairs of layers (p in brackets; *: the best)."
        return Table("What orders the pairs as their damage does", head, rows, note)


def _pair(row: Any) -> str:
    return f"pair {int(row['first'])}+{int(row['last'])}"
