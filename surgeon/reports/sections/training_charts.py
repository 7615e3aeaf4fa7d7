"""Curves of training: the loss while it goes on, and the model on held-out text, one run or several in a picture."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from surgeon.reports.blocks import Chart
from surgeon.reports.chart import Axis, Point, Series, draw_chart, log_axis, value_axis
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
    series, values = [], []
    written = training.dropna(axis="columns", how="all")
    parts = {"loss": "loss"} | {name: words for name, words in PARTS.items() if name in written}
    few = len(training) <= _MEANS
    if not few:
        rows = _points(training, "loss", "loss")
        series.append(Series("loss, each row", rows, _ROW_STYLE, line=False))
        values += [point.y for point in rows]
    for place, (name, words) in enumerate(parts.items()):
        if len(parts) == 2 and place:
            continue  # the only part is the loss itself
        drawn = _points(training if few else _means(training, name), name, words)
        values += [point.y for point in drawn]
        series.append(Series(words if few else f"{words}, mean of {_span(training)} rows", drawn, place, marks=few))
    title = "Loss while it trained"
    svg = draw_chart(series, _steps(training["step"]), _wide_or_log(values, "loss"), title)
    return Chart(svg, title, "", [one.key() for one in series] if len(series) > 1 else [])


def rate_chart(training: pd.DataFrame) -> Chart:
    """The learning rate."""
    points = _points(training, "learning_rate", "learning rate")
    highest = max((p.y for p in points if math.isfinite(p.y)), default=0.0)
    power = math.floor(math.log10(highest)) if highest > 0 else 0
    scaled = [replace(point, y=point.y * 10.0**-power) for point in points]  # so that numbers on the axis are short
    title = "Learning rate"
    unit = f"learning rate ({TIMES} 1e{power})" if power else "learning rate"
    y = value_axis([point.y for point in scaled], unit, zero=True)
    svg = draw_chart([Series(title, scaled, 0, marks=len(points) <= _MEANS)], _steps(training["step"]), y, title)
    return Chart(svg, title, "")


def losses_chart(runs: Mapping[str, pd.DataFrame], together: str) -> Chart:
    """The training losses of several runs by their names, smoothed where there are many rows.

    Args:
        together: ends the title.
    """
    series, values = [], []
    for place, (name, training) in enumerate(runs.items()):
        few = len(training) <= _MEANS
        points = _points(training if few else _means(training, "loss"), "loss", f"{name}, loss")
        values += [point.y for point in points]
        series.append(Series(name, points, place, marks=False))
    title = f"Loss while they trained{together}"
    steps = pd.concat([training["step"] for training in runs.values()])
    svg = draw_chart(series, _steps(steps), _wide_or_log(values, "loss"), title)
    return Chart(svg, title, "", [one.key() for one in series])


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
        series = [
            Series(curve.name, _measured(curve, name, by_tokens), place, band=len(curves) <= _MOST_BANDS)
            for place, curve in enumerate(curves)
        ]
        originals = {curve.original for curve in curves}
        rule = originals.pop() if name == "perplexity" and len(originals) == 1 else None
        curve_values = [*(point.y for one in series for point in one.points), *filter(None, [rule])]
        ends = [end for one in series for point in one.points for end in (point.low, point.high)]
        too_wide = _span_of([*curve_values, *ends]) > _FLAT * _span_of(curve_values) > 0
        if too_wide:
            series = [replace(one, points=[_bare(point) for point in one.points]) for one in series]
        steps = pd.concat([curve.table["step"] * (curve.tokens_per_step if by_tokens else 1) for curve in curves])
        x = _steps(steps, "tokens trained on" if by_tokens else "step")
        title = f"{name.capitalize()} on held-out text{together}"
        dashed = "" if rule is None else f" Dashed: the original's {name}, {number(rule)}."
        shown = "95% intervals are far wider than the picture" if too_wide else f"{_drawn(series)} are 95% intervals"
        caption = f"Step 0 is {first}; {shown}.{dashed}"
        axis = _wide_or_log(curve_values if too_wide else [*curve_values, *ends], UNITS[name], log_from)
        svg = draw_chart(series, x, axis, title, rule)
        yield Chart(svg, title, caption, [one.key() for one in series] if len(series) > 1 else [])


def _span_of(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return max(finite) - min(finite) if finite else 0.0


def _bare(point: Point) -> Point:
    """Without its interval, which is read by pointing at it."""
    return replace(point, low=math.nan, high=math.nan)


def _drawn(series: Sequence[Series]) -> str:
    return "areas" if series[0].band else "bars"


def _measured(curve: HeldOutCurve, name: str, by_tokens: bool) -> list[Point]:
    points, apart = [], curve.tokens_per_step if by_tokens else 1.0
    for _, row in curve.table.iterrows():
        low, high = (row.get(f"{name}_{end}", math.nan) for end in ("low", "high"))
        known = interval(low, high)
        value = f"{number(row[name])}{f' (95%: {known})' if known else ''}"
        tip = f"{curve.name}, step {row['step']:g}: {name} {value}"
        points.append(Point(row["step"] * apart, row[name], tip, low, high))
    return points


def _points(training: pd.DataFrame, column: str, words: str) -> list[Point]:
    rows = zip(training["step"], training[column], strict=True)
    return [Point(step, value, f"step {step:g}: {words} {number(value)}") for step, value in rows]


def _span(training: pd.DataFrame) -> int:
    return math.ceil(len(training) / _MEANS)


def _means(training: pd.DataFrame, column: str) -> pd.DataFrame:
    """Means of neighbouring rows, at the last one's step."""
    parts = pd.Series(range(len(training)), index=training.index) // _span(training)
    return training.groupby(parts).agg({"step": "last", column: "mean"})


def _steps(steps: pd.Series[float], title: str = "step") -> Axis:
    last = float(steps.max())
    if not 0 <= last < math.inf:
        raise ValueError(f"a step of {last} is none")
    return value_axis([0.0, max(1.0, last)], title, zero=True)


def _wide_or_log(values: Sequence[float], title: str, log_from: float = _WIDE) -> Axis:
    finite = [value for value in values if math.isfinite(value)]
    if finite and min(finite) > 0 and max(finite) > log_from * min(finite):
        return log_axis(finite, title)
    return value_axis(finite, title, zero=title == UNITS["divergence"])
