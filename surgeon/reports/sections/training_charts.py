"""Curves of training: the loss while it goes on, and the model on held-out text, one run or several in a picture."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from surgeon.reports.blocks import Chart
from surgeon.reports.drawing import SOFT, chart, points, scale
from surgeon.words import TIMES, interval, number

PARTS = {"logits": "logits' part", "hidden": "hidden states' part", "text": "text's part"}  # of a distillation's loss
UNITS = {"divergence": "divergence (nats per token)", "perplexity": "perplexity"}
_MOST_BANDS = 3  # curves whose intervals can be told apart as areas
_MEANS = 50  # points of the smoothed loss; with fewer rows it is drawn as it is
_FLAT = 5.0  # times the height of the curves: intervals beyond would make lines of them
_WIDE = 20.0  # from this ratio on an axis is logarithmic
_ROW_STYLE = 7


@dataclass(frozen=True)
class HeldOutCurve:
    """One run's numbers on held-out text while it trained.

    Attributes:
        table: as in `held_out.csv`.
        original: the unedited model's perplexity on the same text; None where it is not known.
        tokens_per_step: trained on; NaN where the record does not say it.
    """

    name: str
    table: pd.DataFrame
    original: float | None
    tokens_per_step: float


def loss_chart(training: pd.DataFrame) -> Chart:
    """The training loss at every step that was written down, smoothed where there are many, and its parts."""
    written = training.dropna(axis="columns", how="all")
    parts = {"loss": "loss"} | {name: words for name, words in PARTS.items() if name in written}
    if len(parts) == 2:
        parts = {"loss": "loss"}  # the only part is the loss itself
    few = len(training) <= _MEANS
    drawn = training if few else _means(training, list(parts))
    figure, axes = _over_steps(training["step"])
    values = pd.concat([drawn[name] for name in parts] + ([] if few else [training["loss"]]))
    _value_axis(axes, values.tolist(), "loss")
    several = len(parts) > 1 or not few
    if not few:
        points(axes, training["step"], training["loss"], _tips(training, "loss", "loss"), _ROW_STYLE,
               "loss, each row", line=False)  # fmt: skip
    for place, (name, words) in enumerate(parts.items()):
        label = words if few else f"{words}, mean of {_span(training)} rows"
        points(axes, drawn["step"], drawn[name], _tips(drawn, name, words), place, label if several else "", marks=few)
    return Chart(figure, "Loss while it trained")


def rate_chart(training: pd.DataFrame) -> Chart:
    """The learning rate."""
    rates = training["learning_rate"]
    highest = max((rate for rate in rates if math.isfinite(rate)), default=0.0)
    power = math.floor(math.log10(highest)) if highest > 0 else 0
    scaled = rates * 10.0**-power  # so that numbers on the axis are short
    figure, axes = _over_steps(training["step"])
    axes.set_ylabel(f"learning rate ({TIMES} 1e{power})" if power else "learning rate")
    scale(axes, "y", scaled.tolist(), zero=True)
    tips = _tips(training, "learning_rate", "learning rate")
    points(axes, training["step"], scaled, tips, marks=len(scaled) <= _MEANS)
    return Chart(figure, "Learning rate")


def losses_chart(runs: Mapping[str, pd.DataFrame], together: str) -> Chart:
    """The training losses of several runs by their names, smoothed where there are many rows.

    Args:
        together: ends the title.
    """
    drawn = {name: one if len(one) <= _MEANS else _means(one, ["loss"]) for name, one in runs.items()}
    figure, axes = _over_steps(pd.concat([training["step"] for training in runs.values()]))
    _value_axis(axes, pd.concat([one["loss"] for one in drawn.values()]).tolist(), "loss")
    for place, (name, training) in enumerate(drawn.items()):
        points(axes, training["step"], training["loss"], (), place, name, marks=False)
    return Chart(figure, f"Loss while they trained{together}")


def held_out_charts(
    curves: Sequence[HeldOutCurve],
    together: str = "",
    first: str = "the edited model before training",
    log_from: float = _WIDE,
) -> Iterator[Chart]:
    """Perplexity and divergence on held-out text, a line for each run.

    Args:
        together: ends the titles of charts of several runs.
        first: what step 0 is.
        log_from: the ratio of the highest to the lowest value from which an axis is logarithmic.
    """
    per_step = {curve.tokens_per_step for curve in curves}
    by_tokens = len(per_step) > 1 and all(math.isfinite(tokens) for tokens in per_step)
    known = pd.concat([curve.table["divergence"] for curve in curves]).notna().any()
    for name in ("perplexity", "divergence") if known else ("perplexity",):
        originals = {curve.original for curve in curves}
        rule = originals.pop() if name == "perplexity" and len(originals) == 1 else None
        tables = [curve.table for curve in curves]
        values = [*pd.concat([table[name] for table in tables]), *filter(None, [rule])]
        ends = [*pd.concat([table[f"{name}_{end}"] for table in tables for end in ("low", "high")])]
        too_wide = _span_of([*values, *ends]) > _FLAT * _span_of(values) > 0
        steps = pd.concat([curve.table["step"] * (curve.tokens_per_step if by_tokens else 1) for curve in curves])
        figure, axes = _over_steps(steps, "tokens trained on" if by_tokens else "step")
        _value_axis(axes, values if too_wide else [*values, *ends], UNITS[name], log_from)
        if rule is not None:
            axes.axhline(rule, color=SOFT, lw=1.2, ls=(0, (4, 3)), zorder=1, clip_on=False)
        band = len(curves) <= _MOST_BANDS
        for place, curve in enumerate(curves):
            table, apart = curve.table, curve.tokens_per_step if by_tokens else 1.0
            tips = [_measured(curve, row, name) for _, row in table.iterrows()]
            interval_of = None if too_wide else (table[f"{name}_low"], table[f"{name}_high"])
            label = curve.name if len(curves) > 1 else ""
            points(axes, table["step"] * apart, table[name], tips, place, label, ends=interval_of, band=band)
        dashed = "" if rule is None else f" Dashed: the original's {name}, {number(rule)}."
        drawn = f"{'areas' if band else 'bars'} are 95% intervals"
        shown = "95% intervals are far wider than the picture" if too_wide else drawn
        title = f"{name.capitalize()} on held-out text{together}"
        yield Chart(figure, title, f"Step 0 is {first}; {shown}.{dashed}")


def _span_of(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return max(finite) - min(finite) if finite else 0.0


def _measured(curve: HeldOutCurve, row: Any, name: str) -> str:
    known = interval(row[f"{name}_low"], row[f"{name}_high"])
    value = f"{number(row[name])}{f' (95%: {known})' if known else ''}"
    return f"{curve.name}, step {row['step']:g}: {name} {value}"


def _tips(training: pd.DataFrame, column: str, words: str) -> list[str]:
    rows = zip(training["step"], training[column], strict=True)
    return [f"step {step:g}: {words} {number(value)}" for step, value in rows]


def _span(training: pd.DataFrame) -> int:
    return math.ceil(len(training) / _MEANS)


def _means(training: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Means of neighbouring rows, at the last one's step."""
    parts = pd.Series(range(len(training)), index=training.index) // _span(training)
    return training.groupby(parts).agg({"step": "last", **dict.fromkeys(columns, "mean")})


def _over_steps(steps: pd.Series[float], title: str = "step") -> tuple[Figure, Axes]:
    last = float(steps.max())
    if not 0 <= last < math.inf:
        raise ValueError(f"a step of {last} is none")
    figure, axes = chart(title, "")
    scale(axes, "x", [0.0, max(1.0, last)], zero=True)
    return figure, axes


def _value_axis(axes: Axes, values: Sequence[float], title: str, log_from: float = _WIDE) -> None:
    finite = [value for value in values if math.isfinite(value)]
    log = bool(finite) and min(finite) > 0 and max(finite) > log_from * min(finite)
    axes.set_ylabel(title)
    scale(axes, "y", finite, log, zero=not log and title == UNITS["divergence"])
