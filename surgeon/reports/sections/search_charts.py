"""Charts of a search: how it went, its front, quality against depth, and what each edit does alone."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

import numpy as np
import pandas as pd
from matplotlib.colors import Normalize

from surgeon.reports.blocks import Legend, Map
from surgeon.reports.maps import WIDE, cell_table, legend_figure, map_cells, map_figure
from surgeon.reports.search_history import STOPPED, UNITS, draw_history
from surgeon.reports.search_trials import SearchedTrials
from surgeon.results.drawing import Chart, chart, layers_across, points, scale
from surgeon.words import interval, number, plural


def history(trials: SearchedTrials) -> Chart:
    """Every trial in the order they were asked for, and the best so far."""
    figure, axes = chart("trials asked for", "")
    layers_across(axes, 1, max(2, len(trials)))
    above, stopped = draw_history(axes, trials), int((~trials.whole).sum())
    caption = f"{plural(len(trials), 'trial')}, {stopped} of them stopped early." if stopped else ""
    caption += f" {plural(above, 'trial')} above the upper edge (hollow, on it)." if above else ""
    return Chart(figure, "How the search went", caption.strip())


def against_depth(depths: pd.DataFrame) -> Chart:
    """The least divergence at every effective depth, a line for each space, and where the knees are."""
    depths = depths[depths["divergence"] > 0]
    figure, axes = chart("effective depth (layers)", UNITS["divergence"])
    known = depths["depth"] if len(depths) else pd.Series([0.0, 1.0])
    layers_across(axes, math.floor(known.min()), math.ceil(known.max()))
    scale(axes, "y", depths["divergence"].tolist(), log=True)
    for place, (space, rows) in enumerate(depths.groupby("space", sort=False)):
        ends = [rows[f"divergence_{end}"].where(rows["divergence_low"] > 0) for end in ("low", "high")]
        tips = [_depth_tip(row) for _, row in rows.iterrows()]
        points(axes, rows["depth"], rows["divergence"], tips, place, str(space), ends=(ends[0], ends[1]))
    knees = depths[depths["knee"].astype(str) == "True"]
    if len(knees):
        tips = [f"knee: {_depth_tip(row)}" for _, row in knees.iterrows()]
        points(axes, knees["depth"], knees["divergence"], tips, 3, "knee", line=False)
    caption = "The best program that is as shallow as each depth, with 95% intervals."
    return Chart(figure, "Quality against effective depth", caption)


def _depth_tip(row: pd.Series[float]) -> str:
    known = interval(row["divergence_low"], row["divergence_high"])
    value = f"{number(row['divergence'])}{f' (95%: {known})' if known else ''}"
    return f"{row['space']}, depth {row['depth']:g}: divergence {value}; {row['edits'] or 'no edits'}"


def front_charts(front: pd.DataFrame, trials: SearchedTrials, without: Collection[str] = ()) -> Iterator[Chart]:
    """The first objective against each of the others but some: the front, and the other trials."""
    names = objectives_of(front)
    first, table = names[0], trials.table[trials.whole]
    for name in (name for name in names[1:] if name not in without):
        own = front.sort_values(name)
        others = table if {first, name} <= set(table) else table.iloc[:0]  # a task's accuracy is of the best only
        figure, axes = chart(_unit(name), _unit(first))
        xs = [x for x in [*own[name], *(others[name] if len(others) else ())] if math.isfinite(x)]
        room = 0.02 * (max(xs) - min(xs)) or 0.02 * abs(max(xs)) or 1.0
        scale(axes, "x", [min(xs) - room, max(xs) + room])
        ys = own[first].tolist()
        log, least = min(ys) > 0, min((y for y in ys if y > 0), default=1.0)
        end = max(10 * least, *ys) if log else math.inf
        scale(axes, "y", [*ys, *(others[first] if log and len(others) else ())], log, end=end)
        if len(others):
            tips = [f"trial {int(trial)}" for trial in others["trial"]]
            points(axes, others[name], others[first], tips, STOPPED, f"trials ({len(others)})", line=False)
        tips = [f"point {row['point']:g}: {name} {number(row[name])}, {_front_tip(row)}" for _, row in own.iterrows()]
        points(axes, own[name], own[first], tips, 0, f"front ({len(own)})", line=len(names) == 2)
        above = int((others[first] > axes.get_ylim()[1]).sum()) if len(others) else 0
        beyond = f" {plural(above, 'trial')} above the upper edge (hollow, on it)." if above else ""
        caption = f"No trial is at least as good as one of the front in everything.{beyond}"
        yield Chart(figure, f"The front: {first} against {name}", caption)


def objectives_of(front: pd.DataFrame) -> list[str]:
    """The columns of front.csv that are its objectives, the first one first."""
    columns = list(front.columns)
    return columns[columns.index("point") + 1 : columns.index("trial")] or ["divergence"]


def _unit(name: str) -> str:
    return f"{name} (s per token)" if name.startswith("latency") else UNITS.get(name, name)


def _front_tip(row: pd.Series[float]) -> str:
    return f"divergence {number(row['divergence'])}, trial {row['trial']:g}: {row['edits'] or 'no edits'}"


def edits_alone(terms: pd.DataFrame) -> list[Chart]:
    """What every edit does by itself: a panel for each space, a mark for each way of it."""
    charts = []
    for space, own in terms.groupby("space", sort=False):
        figure, axes = chart("first layer of the edit", UNITS["divergence"])
        layers_across(axes, int(terms["first"].min()), max(int(terms["first"].max()), 1))
        scale(axes, "y", terms["divergence"].tolist(), log=True)
        ways = own.groupby(_ways(own), sort=False)
        for place, (name, rows) in enumerate(ways):
            tips = [f"{row['edit']}: divergence {number(row['divergence'])}" for _, row in rows.iterrows()]
            label = str(name) if len(ways) > 1 else ""
            points(axes, rows["first"], rows["divergence"], tips, place, label, line=len(rows) > 2)
        charts.append(Chart(figure, f"Each edit alone: {space}"))
    return charts


def _ways(own: pd.DataFrame) -> pd.Series[str]:
    """Of edits of one space, in what they differ besides where they begin."""
    lengths = (own["last"] - own["first"] + 1).astype(int)
    words = own["option"].fillna("").astype(str)
    if lengths.nunique() > 1:
        words = words.where(words == "", words + ", ") + lengths.map(lambda length: plural(length, "layer"))
    return words.where(words != "", "whole")


def layers_touched(trials: SearchedTrials, layers: int) -> Map:
    """Which layers the good trials change: a strip for each space."""
    values = trials.shares(layers)
    every = [trials.touched(space, layers, range(len(trials))) for space in values.index]
    places = [(row, layer) for row in range(len(values)) for layer in range(layers)]
    shares = pd.DataFrame({"good": values.to_numpy().ravel(), "all": np.ravel(every)})
    title = "Which layers the good trials change"
    of_each = "of each level " if trials.has_levels else ""
    caption = (
        f"Share of the best tenth of trials {of_each}({len(trials.good)} of {len(trials)}) "
        "that have an edit of this space on the layer."
    )
    fields = {"good": "of the good trials", "all": "of all trials"}
    cells = map_cells(values, places, shares, fields, "{row}, layer {column}")
    scale_ = Normalize(0, 1)
    legend = Legend(legend_figure(scale_), "Colours: share of the good trials")
    table = cell_table(f"{title}: shares", "space", values)
    return Map(map_figure(values, scale_, ("layer", ""), flat=WIDE), title, caption, cells, table, legend, wide=True)
