"""Charts of a search: how it went, its front, quality against depth, and what each edit does alone."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

import numpy as np
import pandas as pd

from surgeon.reports.blocks import Chart, Map
from surgeon.reports.chart import STYLES, Axis, Point, Series, draw_chart, layer_axis, log_axis, value_axis
from surgeon.reports.search_trials import SOURCES, SearchedTrials
from surgeon.reports.svg import WIDE, ColourScale, Grid, colour_bar, draw_map
from surgeon.reports.values import cell_table, map_cells
from surgeon.words import TIMES, interval, number, plural

UNITS = {"divergence": "divergence (nats per token)", "perplexity": "perplexity"}
_STOPPED, _OTHER = 7, 6  # styles
_ABOVE = 30.0  # times the least: where the axis of a history ends


def history(trials: SearchedTrials) -> Chart:
    """Every trial in the order they were asked for, and the best so far."""
    places = range(len(trials))
    known = {words: place for place, words in enumerate(SOURCES.values())}
    series = []
    for words in sorted(set(trials.sources), key=lambda words: known.get(words, _OTHER)):
        rows = [row for row in places if trials.sources[row] == words and trials.whole[row]]
        if rows:
            series.append(Series(words, _points(trials, rows), known.get(words, _OTHER), line=False))
    stopped = [row for row in places if not trials.whole[row]]
    if stopped:
        series.append(Series("stopped early: an estimate", _points(trials, stopped), _STOPPED, line=False))
    best = [Point(row + 1.0, float(trials.best_so_far[row]), "") for row in places]
    name = "best so far, mean of all levels" if trials.has_levels else "best so far"
    series.append(Series(name, best, 1, marks=False))
    values = [value for value in trials.relative if 0 < value < math.inf]
    unit = f"{trials.by}, {TIMES} the best of its level" if trials.has_levels else UNITS[trials.by]
    y = log_axis(values, unit, end=_ABOVE * min(values, default=1.0))
    title = "How the search went"
    caption = f"{plural(len(trials), 'trial')}, {len(stopped)} of them stopped early." if stopped else ""
    above = sum(value > y.high for value in trials.relative)
    caption += f" {plural(above, 'trial')} above the upper edge (hollow, on it)." if above else ""
    svg = draw_chart(series, layer_axis(1, max(2, len(trials)), "trials asked for"), y, title)
    return Chart(svg, title, caption.strip(), [one.key() for one in series])


def _points(trials: SearchedTrials, rows: Sequence[int]) -> list[Point]:
    return [Point(row + 1.0, float(trials.relative[row]), trials.tip(row)) for row in rows]


def against_depth(depths: pd.DataFrame) -> Chart:
    """The least divergence at every effective depth, a line for each space, and where the knees are."""
    series, values, knees = [], [], []
    for place, (space, points) in enumerate(depths.groupby("space", sort=False)):
        drawn = [
            Point(row["depth"], row["divergence"], _depth_tip(str(space), row), *_ends(row))
            for _, row in points.iterrows()
            if row["divergence"] > 0
        ]
        values += [point.y for point in drawn]
        series.append(Series(str(space), drawn, place))
        at = points[points["knee"].astype(str) == "True"]
        knees += [
            Point(row["depth"], row["divergence"], f"knee: {_depth_tip(str(space), row)}") for _, row in at.iterrows()
        ]
    if knees:
        series.append(Series("knee", knees, 3, line=False))
    title = "Quality against effective depth"
    x = layer_axis(math.floor(depths["depth"].min()), math.ceil(depths["depth"].max()), "effective depth (layers)")
    caption = "The best program that is as shallow as each depth, with 95% intervals."
    svg = draw_chart(series, x, log_axis(values, UNITS["divergence"]), title)
    return Chart(svg, title, caption, [one.key() for one in series])


def _ends(row: pd.Series[float]) -> tuple[float, float]:
    return (row["divergence_low"], row["divergence_high"]) if row["divergence_low"] > 0 else (math.nan, math.nan)


def _depth_tip(space: str, row: pd.Series[float]) -> str:
    known = interval(row["divergence_low"], row["divergence_high"])
    value = f"{number(row['divergence'])}{f' (95%: {known})' if known else ''}"
    return f"{space}, depth {row['depth']:g}: divergence {value}; {row['edits'] or 'no edits'}"


def front_charts(front: pd.DataFrame, trials: SearchedTrials, without: Collection[str] = ()) -> Iterator[Chart]:
    """The first objective against each of the others but some: the front, and the other trials."""
    names = objectives_of(front)
    known = {names[0]} <= set(trials.table)
    for name in (name for name in names[1:] if name not in without):
        points = [
            Point(row[name], row[names[0]], f"point {row['point']:g}: {name} {number(row[name])}, {_front_tip(row)}")
            for _, row in front.sort_values(name).iterrows()
        ]
        table = trials.table[trials.whole & known & (name in trials.table)]  # a task's accuracy is of the best only
        others = [
            Point(x, y, f"trial {int(number_)}")
            for number_, x, y in (zip(table["trial"], table[name], table[names[0]], strict=True) if len(table) else ())
        ]
        ys, xs = [point.y for point in points], [point.x for point in [*points, *others] if math.isfinite(point.x)]
        series = [Series(f"trials ({len(others)})", others, _STOPPED, line=False)] if others else []
        series.append(Series(f"front ({len(points)})", points, 0, line=len(names) == 2))
        title = f"The front: {names[0]} against {name}"
        least = min((y for y in ys if y > 0), default=1.0)
        y = (
            log_axis([p.y for p in [*points, *others]], _unit(names[0]), end=max(10 * least, *ys))
            if min(ys) > 0
            else value_axis(ys, _unit(names[0]))
        )
        svg = draw_chart(series, _wide_axis(xs, _unit(name)), y, title)
        above = sum(point.y > y.high for point in others)
        beyond = f" {plural(above, 'trial')} above the upper edge (hollow, on it)." if above else ""
        caption = f"No trial is at least as good as one of the front in everything.{beyond}"
        yield Chart(svg, title, caption, [one.key() for one in series])


def objectives_of(front: pd.DataFrame) -> list[str]:
    """The columns of front.csv that are its objectives, the first one first."""
    columns = list(front.columns)
    return columns[columns.index("point") + 1 : columns.index("trial")] or ["divergence"]


def _unit(name: str) -> str:
    return f"{name} (s per token)" if name.startswith("latency") else UNITS.get(name, name)


def _wide_axis(values: Sequence[float], title: str) -> Axis:
    """A linear axis with a little room on both sides."""
    low, high = min(values), max(values)
    room = 0.02 * (high - low) or 0.02 * abs(high) or 1.0
    return value_axis([low - room, high + room], title)


def _front_tip(row: pd.Series[float]) -> str:
    return f"divergence {number(row['divergence'])}, trial {row['trial']:g}: {row['edits'] or 'no edits'}"


def edits_alone(terms: pd.DataFrame) -> list[Chart]:
    """What every edit does by itself: a panel for each space, a mark for each way of it."""
    ends = terms["divergence"][(terms["divergence"] > 0) & np.isfinite(terms["divergence"])]
    charts = []
    for space, own in terms.groupby("space", sort=False):
        series = [
            Series(name, [_alone(row) for _, row in rows.iterrows()], place % STYLES, line=len(rows) > 2)
            for place, (name, rows) in enumerate(own.groupby(_ways(own), sort=False))
        ]
        title = f"Each edit alone: {space}"
        x = layer_axis(int(terms["first"].min()), max(int(terms["first"].max()), 1), "first layer of the edit")
        svg = draw_chart(series, x, log_axis(list(ends), UNITS["divergence"]), title)
        keys = [one.key() for one in series] if len(series) > 1 else []
        charts.append(Chart(svg, title, "", keys))
    return charts


def _ways(own: pd.DataFrame) -> pd.Series[str]:
    """Of edits of one space, in what they differ besides where they begin."""
    lengths = (own["last"] - own["first"] + 1).astype(int)
    words = own["option"].fillna("").astype(str)
    if lengths.nunique() > 1:
        words = words.where(words == "", words + ", ") + lengths.map(lambda length: plural(length, "layer"))
    return words.where(words != "", "whole")


def _alone(row: pd.Series[float]) -> Point:
    return Point(float(row["first"]), row["divergence"], f"{row['edit']}: divergence {number(row['divergence'])}")


def layers_touched(trials: SearchedTrials, layers: int) -> Map:
    """Which layers the good trials change: a strip for each space."""
    spaces, every = trials.spaces(), range(len(trials))
    good = {space: trials.touched(space, layers, trials.good) for space in spaces}
    all_of = {space: trials.touched(space, layers, every) for space in spaces}
    places = [(row, layer) for row in range(len(spaces)) for layer in range(layers)]
    values = {(row, layer): float(good[spaces[row]][layer]) for row, layer in places}
    grid = Grid(spaces, [str(layer) for layer in range(layers)], values, "", "layer")
    scale = ColourScale(0.0, 1.0)
    shares = pd.DataFrame(
        {"good": list(values.values()), "all": [float(all_of[spaces[row]][layer]) for row, layer in places]}
    )
    title = "Which layers the good trials change"
    of_each = "of each level " if trials.has_levels else ""
    caption = (
        f"Share of the best tenth of trials {of_each}({len(trials.good)} of {len(trials)}) "
        "that have an edit of this space on the layer."
    )
    cells = map_cells(
        grid, places, shares, {"good": "of the good trials", "all": "of all trials"}, "{row}, layer {column}"
    )
    drawn = draw_map(grid, scale, title, flat=WIDE)
    legend = colour_bar(scale, "Colours: share of the good trials")
    return Map(drawn, title, caption, cells, cell_table(f"{title}: shares", "space", grid), legend, wide=True)
