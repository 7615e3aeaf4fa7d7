"""The trials of a search: the way to the best, and the layers that good trials touch."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import EngFormatter
from numpy.typing import NDArray

from surgeon.findings.drawing import COLOURS, Chart, layers_across, points, scale
from surgeon.language.operations.applied import Choice, Edit
from surgeon.words import TIMES, cost, first_few, number, plural, value_with_interval

Numbers = NDArray[np.float64]
Flags = NDArray[np.bool_]

# Where a trial comes from.
WINDOW = "window"  # one unbroken stretch, as papers choose it
ADDITIVE = "additive"  # least sum of what edits do alone
SECOND_ORDER = "second-order"  # the same with what every two of them do together
REGRESSION = "regression"  # the same with terms corrected by the trials so far
NEIGHBOUR = "neighbour"  # one of the best so far with one edit moved
SOURCES = {
    WINDOW: "one unbroken stretch",
    ADDITIVE: "least sum of single damage",
    SECOND_ORDER: "least sum with pair terms",
    REGRESSION: "least sum, corrected by trials",
    NEIGHBOUR: "neighbour of the best",
}
MOST_DIVERGENCE = 1.0  # nats per token: what is further from the original than this is another model
DRAFT_TIME: Literal["draft_time"] = "draft_time"
BY = ("divergence", "perplexity", DRAFT_TIME)  # what trials can be ranked by, the usual one first
_BEST_PART = 0.1  # of the trials, that count as good
_EDITS_SHOWN = 6  # in a row of a table


@dataclass(frozen=True)
class TrialTable:
    """The trials of a search, in the order in which they were asked for.

    Attributes:
        table: with the columns of trials.csv.
        by: the objective, one of `BY`, the first where it is none.
    """

    table: pd.DataFrame
    by: str = BY[0]

    def __len__(self) -> int:
        return len(self.table)

    @cached_property
    def values(self) -> Numbers:
        """(trials,), of the objective."""
        return self.table[self.by].to_numpy(dtype=np.float64)

    @cached_property
    def choices(self) -> tuple[Choice, ...]:
        return tuple(
            tuple(map(Edit.parse, filter(None, text.split("; "))))
            for text in self.table["edits"].fillna("").astype(str)
        )

    def short_edits(self, row: int) -> str:
        return first_few(list(map(str, self.choices[row])), _EDITS_SHOWN) or "no edits"

    @cached_property
    def sources(self) -> list[str]:
        return [SOURCES.get(name, name) for name in self.table["source"].fillna("").astype(str)]

    @cached_property
    def whole(self) -> Flags:
        """Trials on all of the text; the others were stopped, and their numbers are estimates."""
        return self._flags("whole")

    @cached_property
    def within(self) -> Flags:
        return self.whole & self._flags("within")

    @cached_property
    def levels(self) -> Numbers:
        """(trials,), the level of a cost that each was made for; all 0 in a search with one goal."""
        return self.table["level"].fillna(0.0).to_numpy(dtype=np.float64)

    @property
    def has_levels(self) -> bool:
        return len(set(self.levels.tolist())) > 1

    def tip(self, row: int) -> str:
        trial = self.table.iloc[row]
        value = f"{self.by} {self.values[row]:.4g}" + (
            "" if self.whole[row] else " (estimate, stopped early)"
        )
        return f"trial {int(trial['trial'])}, depth {trial['depth']:g}, {value}: {trial['edits'] or 'no edits'}"

    @cached_property
    def relative(self) -> Numbers:
        """(trials,): their measure, or along a cost, times the least that was found at the same level.

        Within the budget, or at levels without such trials, of all; NaN where there is no trial to compare with.
        """
        if not self.has_levels:
            return self.values
        values = pd.Series(self.values)
        within, whole = (
            values.where(kept).groupby(self.levels).transform("min")
            for kept in (self.within, self.whole)
        )
        least = within.fillna(whole)
        return (values / least.where(least > 0)).to_numpy()

    @cached_property
    def best_so_far(self) -> Numbers:
        """(trials,): the least `relative` value up to each trial, within the budget; NaN before there is one.

        Along a cost, the geometric mean over the levels, once all of them have a trial.
        """
        if not self.within.any():
            return np.full(len(self), math.nan)
        counted = np.where(self.within & np.isfinite(self.relative), self.relative, math.nan)
        by_level = pd.DataFrame({"level": self.levels, "value": counted}).pivot(
            columns="level", values="value"
        )
        curves = by_level[pd.unique(self.levels[self.within])].cummin().ffill()
        means = curves.mask(curves <= 0, 1.0).prod(axis=1, skipna=False) ** (1 / curves.shape[1])
        return (means if curves.shape[1] > 1 else curves.iloc[:, 0]).to_numpy()

    @cached_property
    def best_of_levels(self) -> list[int]:
        """Rows of the best within the budget, of each level or of all; the deepest level first."""
        values = pd.Series(self.values)[self.within]
        return values.groupby(self.levels[self.within]).idxmin().tolist()[::-1]

    @cached_property
    def by_rank(self) -> list[int]:
        return [int(row) for row in np.argsort(self.values, kind="stable") if self.within[row]]

    @cached_property
    def good(self) -> list[int]:
        """Rows of the best tenth of all trials of every level that are within the budget, at least one of each."""
        found: list[int] = []
        for level in dict.fromkeys(self.levels.tolist()):
            count = max(1, math.ceil(_BEST_PART * (self.levels == level).sum()))
            rows = [row for row in self.by_rank if self.levels[row] == level]
            found += rows[:count]
        return sorted(found)

    def spaces(self) -> list[str]:
        return list(dict.fromkeys(edit.space for choice in self.choices for edit in choice))

    def count_touched(self, space: str, layers: int, rows: Sequence[int]) -> Numbers:
        """(layers,): the share of some trials with an edit of a space on each layer."""
        found = np.zeros(layers)
        for row in rows:
            found[
                [*{layer for edit in self.choices[row] if edit.space == space for layer in edit.layers}]
            ] += 1
        return found / max(1, len(rows))

    def _flags(self, name: str) -> Flags:
        return np.array([str(value) in ("True", "1", "1.0") for value in self.table[name]])


UNITS = {
    "divergence": "divergence (nats per token)",
    "perplexity": "perplexity",
    "depth": "effective depth (layers)",
    DRAFT_TIME: "time of a token with drafts (parts of that without)",
}
_COSTS = {"depth": "effective depth"}
_ENGINEERED = {
    "latency": "s",
    "params": "",
    "weight_bytes": "B",
    "size": "B",
    "kv_bytes": "B",
    "wire_bytes": "B",
}
# Styles.
_STOPPED = 7
_OTHER = 6
_KNEE = 6
_ABOVE = 30.0  # times the least: where the axis ends


def history_chart(trials: TrialTable) -> Chart:
    """Draw every trial in the order they were asked for, and the best so far."""

    def draw(axes: Axes) -> None:
        layers_across(axes, 1, max(2, len(trials)))
        values = [value for value in trials.relative if 0 < value < math.inf]
        scale(axes, "y", values, log=True, end=_ABOVE * min(values, default=1.0))
        styles = {words: place for place, words in enumerate(SOURCES.values())}
        sources = np.array(trials.sources)
        table = pd.DataFrame({"value": trials.relative, "tip": map(trials.tip, range(len(trials)))})
        table["asked"] = table.index + 1
        kinds = sorted({*trials.sources}, key=lambda words: (styles.get(words, _OTHER), words))
        shown = [
            (words, styles.get(words, _OTHER), trials.whole & (sources == words)) for words in kinds
        ]
        for words, style, own in [*shown, ("stopped early: an estimate", _STOPPED, ~trials.whole)]:
            shown = table[own]
            points(axes, shown, "asked", "value", itemgetter("tip"), style, words, line=False)
        best = trials.best_so_far
        name = "best so far"
        if trials.has_levels:
            name = "best so far, mean of all levels"
        steps: Any = {
            "color": COLOURS[1],
            "lw": 1.8,
            "drawstyle": "steps-post",
            "label": name,
            "zorder": 1,
        }
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
    """Quality against a cost: the front of each space alone and of all together, and the knees."""
    quality = quality[quality["divergence"] > 0]

    def tip(row: Any) -> str:
        value = f"divergence {value_with_interval(row, 'divergence')}"
        return (
            f"{row['space']}, {row['along']} {cost(row['cost'])}: {value}; {row['edits'] or 'no edits'}"
        )

    def draw(axes: Axes) -> None:
        scale(axes, "y", quality["divergence"].tolist(), log=True, end=MOST_DIVERGENCE)
        for place, (space, rows) in enumerate(quality.groupby("space", sort=False)):
            low = rows["divergence_low"]
            shown = rows.assign(divergence_low=low.where(low > 0))
            points(axes, shown, "cost", "divergence", tip, place, str(space), intervals=True)
        knees = quality[quality["knee"].astype(str) == "True"]
        if len(knees):
            points(
                axes,
                knees,
                "cost",
                "divergence",
                lambda row: f"knee: {tip(row)}",
                _KNEE,
                "knee",
                line=False,
            )
            if {"knee_low", "knee_high"} <= set(knees):  # its 95% interval, by resampling windows
                axes.hlines(
                    knees["divergence"],
                    knees["knee_low"],
                    knees["knee_high"],
                    COLOURS[_KNEE],
                    alpha=0.5,
                    lw=3,
                )
        # The unedited model's cost is on the left.
        costs = [*map(float, quality["cost"])] or [0.0, 1.0]
        if along == "depth":
            layers_across(axes, math.floor(min(costs)), math.ceil(max(costs)))
        else:
            _room_around(axes, costs)
        if along.partition("@")[0] != "speedup":
            axes.set_xlim(*reversed(axes.get_xlim()))
        _label_cost(axes.xaxis, along)

    of_each = ""
    if quality["space"].nunique() > 1:
        of_each = " of each space alone and of all together"
    caption = f"The best program{of_each} at each {along} or better, with 95% intervals, on the text of the search."
    title = f"The front: divergence against {_COSTS.get(along, along)}"
    name = "quality-against-" + re.sub(r"[^\w.-]+", "-", along)
    return Chart(title, draw, "", UNITS["divergence"], caption, name)


def _room_around(axes: Axes, costs: Sequence[float]) -> None:
    room = 0.02 * (max(costs) - min(costs)) or 0.02 * abs(max(costs)) or 1.0
    scale(axes, "x", [min(costs) - room, max(costs) + room])


def _label_cost(axis: Axis, name: str) -> None:
    aspect = name.partition("@")[0]
    axis.set_label_text(UNITS.get(name) or name + (" (per token)" if aspect == "latency" else ""))
    if aspect in _ENGINEERED:  # times and large numbers as people read them: 600 us, 2.5 M
        axis.set_major_formatter(EngFormatter(unit=_ENGINEERED[aspect]))


def front_charts(
    front: pd.DataFrame, trials: TrialTable, without: Collection[str] = ()
) -> Iterator[Chart]:
    """Draw the first objective against each of the others but some."""
    first, *others = objectives_of(front)
    for name in others:
        if name not in without:
            yield _front_chart(front, trials, first, name, line=len(others) == 1)


def _front_chart(front: pd.DataFrame, trials: TrialTable, first: str, name: str, line: bool) -> Chart:
    own = front.sort_values(name)
    others = trials.table[trials.whole]
    if {first, name} <= set(others):
        others = others[np.isfinite(others[[name, first]].to_numpy(dtype=float)).all(axis=1)]
    else:  # a task's accuracy is of the best only
        others = others.iloc[:0].assign(**{first: math.nan, name: math.nan})

    def draw(axes: Axes) -> None:
        _room_around(axes, [x for x in [*own[name], *others[name]] if math.isfinite(x)])
        ys = own[first].tolist()
        if min(ys) > 0:
            scale(axes, "y", [*ys, *others[first]], log=True, end=max(10 * min(ys), *ys))
        else:
            scale(axes, "y", ys)
        for axis, one in ((axes.xaxis, name), (axes.yaxis, first)):
            _label_cost(axis, one)
        label = f"trials ({len(others)})"
        points(
            axes,
            others,
            name,
            first,
            lambda row: f"trial {int(row['trial'])}",
            _STOPPED,
            label,
            line=False,
        )
        points(axes, own, name, first, point_tip, 0, f"front ({len(own)})", line=line)

    def point_tip(row: Any) -> str:
        return (
            f"point {row['point']:g}: {name} {cost(row[name])}, divergence {number(row['divergence'])}, "
            f"trial {row['trial']:g}: {row['edits'] or 'no edits'}"
        )

    caption = "No trial is at least as good as one of the front in everything."
    return Chart(f"The front: {first} against {name}", draw, caption=caption)


def objectives_of(front: pd.DataFrame) -> list[str]:
    """The columns of front.csv that are its objectives, the first one first."""
    columns = list(front.columns)
    return columns[columns.index("point") + 1 : columns.index("trial")] or ["divergence"]


def edit_chart(space: str, own: pd.DataFrame, terms: pd.DataFrame) -> Chart:
    """The damage of every edit of a space by itself: a mark for each way of it."""
    lengths = (own["last"] - own["first"] + 1).astype(int)
    ways = own["option"].fillna("").astype(str)  # in what they differ besides where they begin
    if lengths.nunique() > 1:
        ways = ways.where(ways == "", ways + ", ") + lengths.map(lambda length: plural(length, "layer"))
    groups = list(own.groupby(ways.where(ways != "", "whole"), sort=False))

    def draw(axes: Axes) -> None:
        layers_across(axes, int(terms["first"].min()), max(int(terms["first"].max()), 1))
        scale(axes, "y", terms["divergence"].tolist(), log=True)
        for place, (name, rows) in enumerate(groups):
            label = ""
            if len(groups) > 1:
                label = str(name)
            points(
                axes,
                rows,
                "first",
                "divergence",
                lambda row: f"{row['edit']}: divergence {number(row['divergence'])}",
                place,
                label,
                line=len(rows) > 2,
            )

    return Chart(f"Each edit alone: {space}", draw, "first layer of the edit", UNITS["divergence"])
