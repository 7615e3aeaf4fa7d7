"""What a sweep has found: models from scratch by program, learning rate and seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from surgeon.results.drawing import chart, points, scale
from surgeon.results.result import RunResult, TableFile
from surgeon.words import aligned, interval, number

DIVERGED = "diverged"  # of `runs` what happened, empty where nothing did; of `summary` how many seeds
_LOG_FROM = 2.0  # ratio of the highest to the lowest perplexity from which their axis is logarithmic
_MOST_AREAS = 4  # lines whose spreads can be told apart as areas


@dataclass(frozen=True, repr=False)
class TrainingSweep(RunResult):
    """The result of `train_sweep`.

    Attributes:
        summary: a row for each program and learning rate, as in `summary.csv`: how many seeds, the mean of their
            held-out losses (`nll`, nats per token) and the perplexity of that, and the mean difference from the first
            program with the same seed and rate (NaN of itself). Intervals of 95% are Student's t over seeds. Where some
            have `diverged`, the mean is infinite.
        runs: a row for each model, as in `sweep.csv`: what it is, its steps, tokens and seconds, and its held-out loss
            and perplexity, with 95% intervals over windows; or at which step it `diverged`.
        curves: a row for each program, learning rate and step that was measured, as in `curves.csv`: held-out
            perplexity (the geometric mean over seeds) and the `least` and `highest` of the seeds.
    """

    COMMAND = "train --sweep"
    RECORD = "sweep.json"
    TABLES: ClassVar = {
        "summary": TableFile(
            "summary.csv", ("learning_rate", "seeds", "nll", "perplexity", "difference"), ("program",)
        ),
        "runs": TableFile(
            "sweep.csv", ("learning_rate", "seed", "steps", "tokens", "nll", "perplexity"), ("run", "program")
        ),
        "curves": TableFile(
            "curves.csv", ("learning_rate", "step", "tokens", "perplexity", "least", "highest"), ("program",)
        ),
    }

    summary: pd.DataFrame
    runs: pd.DataFrame
    curves: pd.DataFrame

    @property
    def label(self) -> str:
        return "models from scratch"

    @property
    def best(self) -> pd.DataFrame:
        """Of `summary`, each program's row with the learning rate of its lowest loss."""
        order = self.summary["program"].drop_duplicates()
        return self.summary.sort_values("nll").drop_duplicates("program").set_index("program").loc[order].reset_index()

    @property
    def _has_rates(self) -> bool:
        return self.summary["learning_rate"].nunique() > 1

    def __str__(self) -> str:
        """The summary, for people."""
        head = ("program", "rate", "seeds", "loss (95%)", "perplexity", "minus the first (95%)")
        rows = [
            (
                *(row["program"], f"{row['learning_rate']:g}", f"{row['seeds']:g}"),
                *(_loss(row), number(row["perplexity"]), _mean(row, "difference", 2)),
            )
            for _, row in self.summary.iterrows()
        ]
        return aligned([head, *rows])

    def pictures(self) -> dict[str, Figure]:
        """Perplexity as training went on, and where there are several learning rates, the loss by these."""
        return {"curves": self._over_tokens()} | ({"rates": self._over_rates()} if self._has_rates else {})

    def _over_tokens(self) -> Figure:
        """Held-out perplexity against tokens of every program, at its best rate; around it that of single seeds."""
        shown = self.curves.merge(self.best[["program", "learning_rate"]])
        axes = _axes("tokens trained on", "held-out perplexity", shown["tokens"].tolist())
        values = [*shown["least"], *shown["highest"]]
        scale(axes, "y", values, log=max(values) > _LOG_FROM * min(values))
        for place, (_, row) in enumerate(self.best.iterrows()):
            one = shown[shown["program"] == row["program"]]
            label = f"{row['program']}, rate {row['learning_rate']:g}" if self._has_rates else row["program"]
            seeds = (one["least"], one["highest"])
            few = len(self.best) <= _MOST_AREAS
            points(axes, one["tokens"], one["perplexity"], (), place, label, ends=seeds, band=few)
        return _with_legend(axes, "mean of seeds, and their least and highest")

    def _over_rates(self) -> Figure:
        """The loss at the end by the learning rate, with 95% intervals over seeds."""
        axes = _axes(
            "learning rate", "held-out loss (nats per token)", self.summary["learning_rate"].tolist(), log=True
        )
        scale(axes, "y", [*self.summary["nll"], *self.summary["nll_low"], *self.summary["nll_high"]])
        for place, (program, one) in enumerate(self.summary.groupby("program", sort=False)):
            rows = one.sort_values("learning_rate")
            ends = rows["nll_low"], rows["nll_high"]
            points(axes, rows["learning_rate"], rows["nll"], (), place, str(program), ends=ends)
        return _with_legend(axes, "mean of seeds, 95% interval")


def _loss(row: pd.Series) -> str:
    """The mean over seeds, or how many of them have diverged."""
    if diverged := row.get(DIVERGED, 0):
        return DIVERGED if diverged == row["seeds"] else f"{diverged:g} of {row['seeds']:g} {DIVERGED}"
    return _mean(row, "nll", 4)


def _mean(row: pd.Series, name: str, digits: int) -> str:
    """A mean over seeds, with its 95% interval in brackets if that is known."""
    ends = interval(row[f"{name}_low"], row[f"{name}_high"], digits)
    return number(row[name], digits) + (f" ({ends})" if ends else "")


def _axes(x: str, y: str, across: Sequence[float], log: bool = False) -> Axes:
    _, axes = chart(x, y)
    scale(axes, "x", across, log=log, zero=not log)
    if not log:
        axes.set_xlim(right=max(across))
    return axes


def _with_legend(axes: Axes, title: str) -> Figure:
    axes.legend(title=title, fontsize=8, title_fontsize=8, frameon=False)
    return cast(Figure, axes.figure)
