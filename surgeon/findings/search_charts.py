"""The charts of a search: its history, quality against costs, the front, and single edits."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import EngFormatter

from surgeon.findings.drawing import COLOURS, Chart, layers_across, points, scale
from surgeon.findings.trials import DRAFT_TIME, MOST_DIVERGENCE, SOURCES, TrialTable
from surgeon.words import TIMES, cost, known, number, plural

UNITS = {
    "divergence": "divergence (nats per token)",
    "perplexity": "perplexity",
    "depth": "effective depth (layers)",
    DRAFT_TIME: "time of a token with drafts (parts of that without)",
}
_COSTS = {"depth": "effective depth"}
_ENGINEERED = {"latency": "s", "params": "", "weight_bytes": "B", "size": "B", "kv_bytes": "B", "wire_bytes": "B"}
# Styles.
_STOPPED = 7
_OTHER = 6
_KNEE = 6
_ABOVE = 30.0  # times the least: where the axis ends
_APART = (0.035, 0.035)  # of a panel: numbers nearer than this cover each other


def history_chart(trials: TrialTable) -> Chart:
    """Every trial in the order they were asked for, and the best so far."""

    def draw(axes: Axes) -> None:
        layers_across(axes, 1, max(2, len(trials)))
        values = [value for value in trials.relative if 0 < value < math.inf]
        scale(axes, "y", values, log=True, end=_ABOVE * min(values, default=1.0))
        styles = {words: place for place, words in enumerate(SOURCES.values())}
        sources = np.array(trials.sources)
        kinds = sorted({*trials.sources}, key=lambda words: (styles.get(words, _OTHER), words))
        shown = [(words, styles.get(words, _OTHER), trials.whole & (sources == words)) for words in kinds]
        for words, style, own in [*shown, ("stopped early: an estimate", _STOPPED, ~trials.whole)]:
            rows = np.flatnonzero(own).tolist()
            if rows:
                tips = [trials.tip(row) for row in rows]
                points(axes, np.array(rows) + 1, trials.relative[rows], tips, style, words, line=False)
        best = trials.best_so_far
        name = "best so far"
        if trials.has_levels:
            name = "best so far, mean of all levels"
        steps: Any = {"color": COLOURS[1], "lw": 1.8, "drawstyle": "steps-post", "label": name, "zorder": 1}
        axes.plot(np.arange(1, len(trials) + 1), np.where(best > 0, best, np.nan), **steps)

    stopped = int((~trials.whole).sum())
    caption = ""
    if stopped:
        caption = f"{plural(len(trials), 'trial')}, {stopped} of them stopped early."
    if trials.has_levels:
        y = f"{trials.by}, {TIMES} the best of its level"
    else:
        y = UNITS[trials.by]
    return Chart("How the search went", draw, "trials asked for", y, caption, "search")


def quality_chart(along: str, quality: pd.DataFrame) -> Chart:
    """Quality against a cost: the front of each space alone and of all together, and where the knees are."""
    quality = quality[quality["divergence"] > 0]

    def tip(row: Any) -> str:
        value = f"divergence {known(row, 'divergence')}"
        return f"{row['space']}, {row['along']} {cost(row['cost'])}: {value}; {row['edits'] or 'no edits'}"

    def draw(axes: Axes) -> None:
        scale(axes, "y", quality["divergence"].tolist(), log=True, end=MOST_DIVERGENCE)
        for place, (space, rows) in enumerate(quality.groupby("space", sort=False)):
            low, high = (rows[f"divergence_{end}"].where(rows["divergence_low"] > 0) for end in ("low", "high"))
            tips = [tip(row) for _, row in rows.iterrows()]
            points(axes, rows["cost"], rows["divergence"], tips, place, str(space), ends=(low, high))
        knees = quality[quality["knee"].astype(str) == "True"]
        if len(knees):
            tips = [f"knee: {tip(row)}" for _, row in knees.iterrows()]
            points(axes, knees["cost"], knees["divergence"], tips, _KNEE, "knee", line=False)
            if {"knee_low", "knee_high"} <= set(knees):  # its 95% interval, by resampling windows
                axes.hlines(knees["divergence"], knees["knee_low"], knees["knee_high"], COLOURS[_KNEE], alpha=0.5, lw=3)
        _dearest_left(axes, along, quality["cost"])
        _label_cost(axes.xaxis, along)

    of_each = ""
    if quality["space"].nunique() > 1:
        of_each = " of each space alone and of all together"
    caption = f"The best program{of_each} at each {along} or better, with 95% intervals, on the text of the search."
    title = f"The front: divergence against {_COSTS.get(along, along)}"
    name = "quality-against-" + re.sub(r"[^\w.-]+", "-", along)
    return Chart(title, draw, "", UNITS["divergence"], caption, name)


def _dearest_left(axes: Axes, along: str, costs: pd.Series[Any]) -> None:
    """The x axis, from the unedited model's cost on the left to less of it on the right."""
    ends = [costs.min(), costs.max()] if len(costs) else [0.0, 1.0]
    if along == "depth":
        layers_across(axes, math.floor(ends[0]), math.ceil(ends[1]))
    else:
        room = 0.02 * (ends[1] - ends[0]) or 0.02 * abs(ends[1]) or 1.0
        scale(axes, "x", [ends[0] - room, ends[1] + room])
    if along.partition("@")[0] != "speedup":
        axes.set_xlim(*reversed(axes.get_xlim()))


def _label_cost(axis: Axis, name: str) -> None:
    aspect = name.partition("@")[0]
    axis.set_label_text(UNITS.get(name) or name + (" (per token)" if aspect == "latency" else ""))
    if aspect in _ENGINEERED:  # times and large numbers as people read them: 600 us, 2.5 M
        axis.set_major_formatter(EngFormatter(unit=_ENGINEERED[aspect]))


def front_charts(front: pd.DataFrame, trials: TrialTable, without: Collection[str] = ()) -> Iterator[Chart]:
    """Draw the first objective against each of the others but some."""
    first, *others = objectives_of(front)
    for name in others:
        if name not in without:
            yield _front_chart(front, trials, first, name, line=len(others) == 1)


def _front_chart(front: pd.DataFrame, trials: TrialTable, first: str, name: str, line: bool) -> Chart:
    """The front, and the other trials."""
    own = front.sort_values(name)
    others = trials.table[trials.whole]
    if {first, name} <= set(others):
        others = others[np.isfinite(others[[name, first]].to_numpy(dtype=float)).all(axis=1)]
    else:  # a task's accuracy is of the best only
        others = others.iloc[:0].assign(**{first: math.nan, name: math.nan})

    def draw(axes: Axes) -> None:
        xs = [x for x in [*own[name], *others[name]] if math.isfinite(x)]
        room = 0.02 * (max(xs) - min(xs)) or 0.02 * abs(max(xs)) or 1.0
        scale(axes, "x", [min(xs) - room, max(xs) + room])
        ys = own[first].tolist()
        if min(ys) > 0:
            scale(axes, "y", [*ys, *others[first]], log=True, end=max(10 * min(ys), *ys))
        else:
            scale(axes, "y", ys)
        for axis, one in ((axes.xaxis, name), (axes.yaxis, first)):
            _label_cost(axis, one)
        if len(others):
            tips = [f"trial {int(trial)}" for trial in others["trial"]]
            points(axes, others[name], others[first], tips, _STOPPED, f"trials ({len(others)})", line=False)
        tips = [
            f"point {row['point']:g}: {name} {cost(row[name])}, divergence {number(row['divergence'])}, "
            f"trial {row['trial']:g}: {row['edits'] or 'no edits'}"
            for _, row in own.iterrows()
        ]
        points(axes, own[name], own[first], tips, 0, f"front ({len(own)})", line=line)
        _number(axes, list(zip(front[name], front[first], strict=True)))

    caption = "No trial is at least as good as one of the front in everything. Numbers are those of front.csv."
    return Chart(f"The front: {first} against {name}", draw, caption=caption)


def objectives_of(front: pd.DataFrame) -> list[str]:
    """The columns of front.csv that are its objectives, the first one first."""
    columns = list(front.columns)
    return columns[columns.index("point") + 1 : columns.index("trial")] or ["divergence"]


def _number(axes: Axes, front: list[tuple[float, float]]) -> None:
    """Numbers as in front.csv, of the points whose numbers do not cover each other."""
    written: list[tuple[float, float]] = []
    for place, point in enumerate(front, 1):
        x, y = axes.transAxes.inverted().transform(axes.transData.transform(point))
        if all(abs(x - left) > _APART[0] or abs(y - below) > _APART[1] for left, below in written):
            written.append((x, y))
            axes.annotate(str(place), point, xytext=(4, 4), textcoords="offset points", fontsize=8, color=COLOURS[0])


def edit_charts(terms: pd.DataFrame) -> list[Chart]:
    """What every edit does by itself: a panel for each space, a mark for each way of it."""
    return [_edit_chart(str(space), own, terms) for space, own in terms.groupby("space", sort=False)]


def _edit_chart(space: str, own: pd.DataFrame, terms: pd.DataFrame) -> Chart:
    lengths = (own["last"] - own["first"] + 1).astype(int)
    ways = own["option"].fillna("").astype(str)  # in what they differ besides where they begin
    if lengths.nunique() > 1:
        ways = ways.where(ways == "", ways + ", ") + lengths.map(lambda length: plural(length, "layer"))
    groups = list(own.groupby(ways.where(ways != "", "whole"), sort=False))

    def draw(axes: Axes) -> None:
        layers_across(axes, int(terms["first"].min()), max(int(terms["first"].max()), 1))
        scale(axes, "y", terms["divergence"].tolist(), log=True)
        for place, (name, rows) in enumerate(groups):
            tips = [f"{row['edit']}: divergence {number(row['divergence'])}" for _, row in rows.iterrows()]
            label = ""
            if len(groups) > 1:
                label = str(name)
            points(axes, rows["first"], rows["divergence"], tips, place, label, line=len(rows) > 2)

    return Chart(f"Each edit alone: {space}", draw, "first layer of the edit", UNITS["divergence"])
