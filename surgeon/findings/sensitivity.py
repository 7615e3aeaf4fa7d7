"""What a sensitivity has found: bounds of the error of LP pairs, what it really is, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from surgeon.findings.drawing import COLOURS, INK, SOFT, finish
from surgeon.findings.result import RunResult, TableFile
from surgeon.words import aligned

BLUE, ORANGE, GREEN, PURPLE, YELLOW = COLOURS[:5]
_ERRORS = {
    "bound": ("bound (equation 12)", INK, "o"),
    "attention_shift": ("its attention shift", BLUE, ""),
    "mlp_shift": ("its shift of the first MLP", YELLOW, ""),
    "next_mlp_shift": ("its shift of the second MLP", ORANGE, ""),
    "first_order": ("first order", PURPLE, "^"),
    "error": ("measured error", GREEN, "s"),
}
_JACOBIANS = {
    "attention_jacobian": ("second attention", BLUE, "o"),
    "mlp_jacobian": ("first MLP", YELLOW, "D"),
    "next_mlp_jacobian": ("second MLP", ORANGE, "s"),
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

    def pictures(self) -> dict[str, Figure]:
        """`sensitivity`, by pair of layers: bound and error, Jacobians, and the damage with that pair in parallel."""
        table = self.pairs
        figure = Figure(figsize=(max(7.2, min(12, 0.22 * len(table) + 4)), 7.6), layout="constrained", dpi=150)
        errors, jacobians, damage = figure.subplots(3, 1, sharex=True, height_ratios=(2, 1.2, 1.2))
        _lines(errors, table, _ERRORS)
        errors.set_ylabel("norm over a window's stream")
        errors.set_title(f"{self.label}: pairs of layers $k$, $k+1$ in parallel (LP)", fontsize=11)
        _lines(jacobians, table, _JACOBIANS)
        jacobians.set_ylabel("Jacobian's norm")
        low, high = (np.clip(table[f"divergence_{end}"], 1e-12, 1e12) for end in ("low", "high"))
        damage.fill_between(table["first"], low, high, color=SOFT, alpha=0.25, lw=0)
        damage.plot(table["first"], table["divergence"], color=INK, marker="o", ms=3.5, lw=1.2)
        damage.set(ylabel="divergence\n(nats/token)", xlabel="first layer of the pair, $k$", yscale="log")
        positive = table["divergence"][(table["divergence"] > 0) & np.isfinite(table["divergence"])]
        if len(positive):
            damage.set_ylim(float(positive.min()) / 2, float(positive.max()) * 2)
        for axes in (errors, jacobians, damage):
            finish(axes, layers=True)
        return {"sensitivity": figure}

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
            best = "*" if value == rho[damage].max() else " "
            return "-" if np.isnan(value) else f"{value:.3f}{best} ({p[damage][predictor]:.0e})"

        lines = [["", "", "", "log perplexity"], ["by pair", "local error", "divergence", "ratio"]]
        lines += [[words, *(cell(name, damage) for damage in DAMAGES)] for name, (words, _) in PREDICTORS.items()]
        table = self.pairs
        looseness = float(np.median(table["bound"] / table["error"])) if (table["error"] > 0).all() else np.inf
        within, every = self.record["errors_within_bound"], self.record["errors"]
        return (
            f"Spearman's rho over {len(table)} pairs of layers (p in brackets; *: the best)\n{aligned(lines)}\n\n"
            f"the error is within its bound in {within} of {every} cases (pairs and windows);\n"
            f"the bound is {looseness:.3g} times the error (median over pairs)"
        )


def _lines(axes: Axes, table: pd.DataFrame, lines: Mapping[str, tuple[str, str, str]]) -> None:
    for name, (words, colour, marker) in lines.items():
        # A term that is 0 (GPT-NeoX has one) has no place on this scale.
        values = table[name].where((table[name] > 0) & np.isfinite(table[name]))
        if values.notna().any():
            style = "-" if marker else ":"
            axes.plot(table["first"], values, style, color=colour, marker=marker, ms=3.5, lw=1.2, label=words)
    axes.set_yscale("log")
    axes.legend(fontsize=7.5, frameon=False, ncols=2 if len(lines) > 3 else 3)
