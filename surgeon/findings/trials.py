"""What a search's table of trials says: the way to the best, which layers good trials touch, what edits go with."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import EngFormatter
from numpy.typing import NDArray

from surgeon.findings.drawing import COLOURS, Chart, layers_across, points, scale
from surgeon.findings.edit import ADDITIVE, NEIGHBOUR, REGRESSION, SECOND_ORDER, WINDOW, Choice, Edit
from surgeon.words import TIMES, cost, known, number, plural

Numbers = NDArray[np.float64]
Flags = NDArray[np.bool_]

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
_LONGEST = 72  # characters of edits in a table
_FEWEST = 3  # trials with an edit, and without it, for a comparison of the two


@dataclass(frozen=True)
class EditEffect:
    """Trials with an edit against trials of the same level without it.

    Attributes:
        trials: how many have it.
        ratio: of their measure to the others', of geometric means; below 1 where trials with it are the lower ones.
        low, high: its 95% interval.
    """

    edit: Edit
    trials: int
    ratio: float
    low: float
    high: float

    @property
    def excludes_one(self) -> bool:
        return self.low > 1 or self.high < 1


@dataclass(frozen=True)
class TrialTable:
    """The trials of a search, in the order in which they were asked for.

    Attributes:
        table: with the columns of trials.csv.
        by: what the search made small: one of `BY`, the first where it is none.
    """

    table: pd.DataFrame
    by: str = BY[0]

    def __len__(self) -> int:
        return len(self.table)

    @cached_property
    def values(self) -> Numbers:
        """(trials,), of what they are ranked by."""
        return self.table[self.by].to_numpy(dtype=np.float64)

    @cached_property
    def choices(self) -> tuple[Choice, ...]:
        """Each trial's edits."""
        return tuple(tuple(map(Edit.parse, filter(None, text.split("; ")))) for text in self._words("edits"))

    def short_edits(self, row: int) -> str:
        """A trial's edits in few words: of each space its layers, neighbouring ones as one stretch."""
        groups: dict[tuple[str, str], list[list[int]]] = {}
        for edit in self.choices[row]:
            runs = groups.setdefault((edit.space, edit.option), [])
            if runs and len(edit.layers) == 1 and runs[-1][1] == edit.first:
                runs[-1][1] = edit.stop
            else:
                runs.append([edit.first, edit.stop])
        parts = [
            f"{space} {option + ' ' if option else ''}{' '.join(f'{first}:{stop}' for first, stop in runs)}"
            for (space, option), runs in groups.items()
        ]
        text = "; ".join(parts) or "no edits"
        if len(text) <= _LONGEST:
            return text
        return f"{text[: _LONGEST - 4]} ..."

    @cached_property
    def sources(self) -> list[str]:
        return [SOURCES.get(name, name) for name in self._words("source")]

    @cached_property
    def whole(self) -> Flags:
        """Which were measured on all of the text; the others were stopped, and their numbers are estimates."""
        return self._flags("whole")

    @cached_property
    def within(self) -> Flags:
        """Which of the whole ones keep the budget."""
        return self.whole & self._flags("within")

    @cached_property
    def levels(self) -> Numbers:
        """(trials,), which level of a cost each was made for; all 0 in a search with one goal."""
        return np.asarray(np.nan_to_num(self.table["level"].to_numpy(dtype=np.float64)), dtype=np.float64)

    @property
    def has_levels(self) -> bool:
        """Whether the search looked along a cost, so that trials of different levels do not compare."""
        return len(set(self.levels.tolist())) > 1

    def tip(self, row: int) -> str:
        trial = self.table.iloc[row]
        value = f"{self.by} {self.values[row]:.4g}" + ("" if self.whole[row] else " (estimate, stopped early)")
        return f"trial {int(trial['trial'])}, depth {trial['depth']:g}, {value}: {trial['edits'] or 'no edits'}"

    @cached_property
    def relative(self) -> Numbers:
        """(trials,): their measure, or in a search along a cost, times the least that was found at the same level.

        Within the budget, or at levels at which nothing is, of all; NaN where there is no trial to compare with.
        """
        if not self.has_levels:
            return self.values
        least = np.array([self._least(level) for level in self.levels])
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(np.where(least > 0, self.values / least, math.nan), dtype=np.float64)

    @cached_property
    def best_so_far(self) -> Numbers:
        """(trials,): the least `relative` value up to each trial, within the budget; NaN before there is one.

        Along a cost, the geometric mean over the levels, once all of them have a trial.
        """
        levels = list(dict.fromkeys(self.levels[self.within].tolist()))
        curves = []
        for level in levels:
            own = self.within & (self.levels == level) & np.isfinite(self.relative)
            curves.append(np.minimum.accumulate(np.where(own, self.relative, math.inf)))
        if not curves:
            return np.full(len(self), math.nan)
        table = np.array(curves)
        known = np.isfinite(table).all(axis=0)
        means = np.exp(np.mean(np.log(np.where(known & (table > 0), table, 1.0)), axis=0))
        return np.asarray(np.where(known, means if len(levels) > 1 else table[0], math.nan), dtype=np.float64)

    @cached_property
    def best_of_levels(self) -> list[int]:
        """Rows of the best within the budget, of each level or of all; the deepest level first."""
        found = []
        for level in sorted(set(self.levels.tolist()), reverse=True):
            rows = np.flatnonzero(self.within & (self.levels == level))
            if len(rows):
                found.append(int(rows[self.values[rows].argmin()]))
        return found

    @cached_property
    def ranked(self) -> list[int]:
        """Rows of those within the budget, the best first."""
        return [int(row) for row in np.argsort(self.values, kind="stable") if self.within[row]]

    @cached_property
    def good(self) -> list[int]:
        """Rows of the best tenth of all trials of every level that are within the budget, at least one of each."""
        found: list[int] = []
        for level in dict.fromkeys(self.levels.tolist()):
            count = max(1, math.ceil(_BEST_PART * (self.levels == level).sum()))
            rows = [row for row in self.ranked if self.levels[row] == level]
            found += rows[:count]
        return sorted(found)

    def spaces(self) -> list[str]:
        """Of all edits, in the order in which trials have them."""
        return list(dict.fromkeys(edit.space for choice in self.choices for edit in choice))

    def touched(self, space: str, layers: int, rows: Sequence[int]) -> Numbers:
        """(layers,): which share of some trials has an edit of a space on each layer."""
        found = np.zeros(layers)
        for row in rows:
            found[[*{layer for edit in self.choices[row] if edit.space == space for layer in edit.layers}]] += 1
        return found / max(1, len(rows))

    def shares(self, layers: int) -> pd.DataFrame:
        """(spaces, layers): which share of the good trials has an edit of a space on each layer."""
        spaces = self.spaces()
        found = [self.touched(space, layers, self.good) for space in spaces]
        return pd.DataFrame(np.reshape(found, (-1, layers)), index=spaces)

    def effects(self) -> list[EditEffect]:
        """Trials with each edit against those without, the surest differences first.

        The measure's logarithm, less its mean over the level's trials, is compared by Welch's t interval; stopped
        trials count with their estimates, for to leave them out would leave out the bad ones. It is what goes with an
        edit among the trials that a search chose to run, and no effect by itself: that is in terms.csv.
        """
        finite = np.isfinite(self.values) & (self.values > 0)
        logs = np.log(np.where(finite, self.values, 1.0))
        for level in set(self.levels.tolist()):
            own = finite & (self.levels == level)
            logs[own] -= logs[own].mean() if own.any() else 0.0
        edits = dict.fromkeys(edit for choice in self.choices for edit in choice)
        found = []
        for edit in edits:
            has = np.array([edit in choice for choice in self.choices])
            there = logs[finite & has]
            else_ = logs[finite & ~has]
            if min(len(there), len(else_)) >= _FEWEST and there.std() + else_.std() > 0:
                found.append(_effect(edit, there, else_))
        return sorted(found, key=lambda one: -abs(math.log(one.ratio)) / math.log(one.high / one.low))

    def _least(self, level: float) -> float:
        every = self.levels == level
        own = self.values[every & (self.within if (self.within & every).any() else self.whole)]
        if len(own):
            return float(own.min())
        return math.nan

    def _words(self, name: str) -> Iterator[str]:
        return (str(text) for text in self.table[name].fillna(""))

    def _flags(self, name: str) -> Flags:
        return np.array([str(value) in ("True", "1", "1.0") for value in self.table[name]])


def _effect(edit: Edit, there: Numbers, else_: Numbers) -> EditEffect:
    from scipy import stats  # half a second that a page without a search need not wait

    found: Any = stats.ttest_ind(there, else_, equal_var=False)
    low, high = found.confidence_interval(0.95)
    ratio = math.exp(there.mean() - else_.mean())
    return EditEffect(edit, len(there), ratio, math.exp(low), math.exp(high))


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
