"""What a search has found: its trials, what edits do alone, its front, and quality against what was looked along."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from surgeon.findings.drawing import COLOURS, SOFT, Chart, chart, finish, layers_across, points, scale
from surgeon.findings.maps import colour_bar, draw_map, label_map
from surgeon.findings.result import RunResult, TableFile
from surgeon.findings.trials import BY, DRAFT_TIME, MOST_DIVERGENCE, SOURCES, TrialTable
from surgeon.language.recipe import Recipe, parse_recipe
from surgeon.words import MOST_LAYERS, TIMES, cost, known, number, plural

UNITS = {
    "divergence": "divergence (nats per token)",
    "perplexity": "perplexity",
    "depth": "effective depth (layers)",
    DRAFT_TIME: "time of a token with drafts (parts of that without)",
}
_COSTS = {"depth": "effective depth"}
_ENGINEERED = {"latency": "s", "params": "", "weight_bytes": "B", "size": "B", "kv_bytes": "B", "wire_bytes": "B"}
_STOPPED, _OTHER, _KNEE = 7, 6, 6  # styles
_ABOVE = 30.0  # times the least: where the axis ends
_STRIP = 0.3  # of an inch, the height of a space's strip
_APART = (0.035, 0.035)  # of a panel: numbers nearer than this cover each other
_LATER = ("level", "edits", "whole", "within", "program")  # columns that earlier versions did not write


@dataclass(frozen=True, repr=False)
class SearchRun(RunResult):
    """The result of `search`.

    Attributes:
        trials: one row per trial, in the order they were asked for, as in `trials.csv`.
        terms: what each edit does alone, as in `terms.csv`.
        front: the programs that no other is better than, as in `front.csv`; empty with one objective.
        quality: the least divergence at every cost that was looked along, of each space alone and of all together, as
            in `quality.csv`; empty unless there was one.
        recipe_text: the winner's recipe, with what was measured in comments.
    """

    COMMAND = "search"
    RECORD = "search.json"
    TABLES: ClassVar = {
        "trials": TableFile("trials.csv", ("trial", "depth", "perplexity", "divergence"), ("source",), missing=""),
        "terms": TableFile(
            "terms.csv", ("divergence",), ("edit", "space"), ("first", "last"), optional=True, missing=""
        ),
        "front": TableFile(
            "front.csv", ("point", "trial", "divergence"), ("edits",), optional=True, may_be_empty=True, missing=""
        ),
        "quality": TableFile(
            "quality.csv", ("cost", "divergence"), ("along", "space", "edits"), optional=True, missing=""
        ),
    }
    TEXTS: ClassVar = {"recipe_text": "recipe.yaml"}

    trials: pd.DataFrame
    terms: pd.DataFrame = field(default_factory=pd.DataFrame)
    front: pd.DataFrame = field(default_factory=pd.DataFrame)
    quality: pd.DataFrame = field(default_factory=pd.DataFrame)
    recipe_text: str = ""

    @property
    def recipe(self) -> Recipe:
        return parse_recipe(self.recipe_text, self.TEXTS["recipe_text"])

    @property
    def is_earlier(self) -> bool:
        """Whether an earlier version made it, whose table of trials says less."""
        return not set(_LATER) <= set(self.trials)

    @cached_property
    def trial_table(self) -> TrialTable:
        """The trials, ready to be asked."""
        texts = {name: self.trials[name].fillna("").astype(str) for name in ("edits", "program")}
        objectives = str(self.record.get("objective") or BY[0]).split(",")
        if objectives[0].partition("@")[0] == "draft":  # those of all levels compare
            return TrialTable(self.trials.assign(**texts, level=math.nan), DRAFT_TIME)
        return TrialTable(self.trials.assign(**texts), next((name for name in objectives if name in BY), BY[0]))

    @property
    def layers(self) -> int:
        """Of the unedited model; where the record does not say it, as far as edits reach."""
        reached = max((edit.stop for choice in self.trial_table.choices for edit in choice), default=1)
        layers = max(int(self.record.get("num_layers") or 0), reached)
        if layers > MOST_LAYERS:
            raise ValueError(f"edits of {layers} layers are more than any model has")
        return layers

    def pictures(self) -> dict[str, Figure]:
        """`search`, every trial, the best so far and what good ones change; `quality-against-COST`; `front`."""
        found = {"search": self._history()}
        for along, points_ in self.by_cost.items():
            found["quality-against-" + re.sub(r"[^\w.-]+", "-", along)] = self._quality(along, points_)
        return found | ({"front": self._front()} if len(self.front) else {})

    @property
    def by_cost(self) -> dict[str, pd.DataFrame]:
        """`quality` of each cost that was looked along."""
        return (
            {str(along): rows for along, rows in self.quality.groupby("along", sort=False)} if len(self.quality) else {}
        )

    def _history(self) -> Figure:
        trials, shares = self.trial_table, self.trial_table.shares(self.layers)
        strips = 0.75 + _STRIP * max(1, len(shares))
        figure = Figure(figsize=(9.0, 4.8 + strips), layout="constrained", dpi=150)
        above, below = figure.subplots(2, 1, height_ratios=[4.2, strips])
        beyond = draw_history(above, trials)
        if beyond:
            text = f"{beyond} of {len(trials)} trials lie above (hollow, on the edge)"
            above.text(0.01, 0.98, text, va="top", fontsize=8, color=SOFT, transform=above.transAxes)
        above.set_xlabel("trials, in the order they were asked for")
        above.xaxis.set_major_locator(MaxNLocator(integer=True))
        above.set_xlim(0.3, len(trials) + 0.7)
        figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=3)
        finish(above)
        if len(shares):
            scale_ = Normalize(0, 1)
            draw_map(below, shares, scale_, aspect="auto")
            label_map(below, shares, 32, len(shares), 8)
            below.set_xlabel("layer")
            below.spines[:].set_visible(False)
            of_each = " of each level" if trials.has_levels else ""
            text = f"share of the best tenth of trials{of_each} ({len(trials.good)}) that change the layer"
            below.set_title(text, fontsize=9, loc="left")
            colour_bar(figure, [below], scale_, False, ticks=[0, 0.5, 1], pad=0.01, aspect=8)
        else:
            below.axis("off")
        figure.suptitle(f"{self.label}: the search", fontsize=11)
        return figure

    def _front(self) -> Figure:
        """The first objective against each of the others, one panel for each."""
        first, *others = objectives_of(self.front)
        figure = Figure(figsize=(6.4 * max(1, len(others)), 4.6), layout="constrained", dpi=150)
        for axes, name in zip(figure.subplots(1, max(1, len(others)), squeeze=False)[0], others, strict=False):
            above, every = draw_front(axes, self.front, self.trial_table, name)
            finish(axes)
            axes.legend(frameon=False, fontsize=8)
            _number(axes, list(zip(self.front[name], self.front[first], strict=True)))
            if above:
                text = f"{above} of {every} trials lie above"
                axes.text(0.0, 1.01, text, fontsize=8, color=SOFT, transform=axes.transAxes)
        figure.suptitle(self.label, fontsize=11)
        return figure

    def _quality(self, along: str, quality: pd.DataFrame) -> Figure:
        """The least divergence at every cost with its 95% interval, and each curve's knee.

        On the left as it is, up to `MOST_DIVERGENCE`, which is how a knee is told; on the right on a logarithmic scale.
        """
        curves = {str(space): rows for space, rows in quality.groupby("space", sort=False)}
        figure = Figure(figsize=(11, 5.2 + 0.14 * len(curves)), layout="constrained", dpi=150)
        panels = figure.subplot_mosaic("LR;KR", sharex=True, height_ratios=[5, 0.5 + 0.35 * len(curves)])
        linear, logarithmic, knees = panels["L"], panels["R"], panels["K"]
        draw_quality(linear, quality, log=False)
        draw_quality(logarithmic, quality)
        for row, (colour, (_, points_)) in enumerate(zip(COLOURS * len(curves), curves.items(), strict=False)):
            _draw_knee(knees, points_, row, colour)
        linear.set_ylabel("divergence from the original (nats/token)")
        linear.legend(frameon=False, fontsize=8)
        logarithmic.set_title("the same, logarithmic", fontsize=9, loc="left")
        knees.set(ylim=(len(curves) - 0.5, -0.5))
        _dearest_left(knees, along, quality["cost"])
        knees.set_yticks(range(len(curves)), labels=list(curves), fontsize=8)
        knees.set_title("knee, with its 95% interval by resampling windows", fontsize=9, loc="left")
        for axes in (logarithmic, knees):
            _label_cost(axes.xaxis, along)
        for axes in (linear, logarithmic, knees):
            finish(axes)
        what = "how deep it really is" if along == "depth" else f"quality against {along}"
        figure.suptitle(f"{self.label}: {what}", fontsize=11)
        return figure


def draw_history(axes: Axes, trials: TrialTable) -> int:
    """Draw every trial in the order they were asked for, and the best so far.

    Returns:
        How many lie above the axis.
    """
    values = [value for value in trials.relative if 0 < value < math.inf]
    scale(axes, "y", values, log=True, end=_ABOVE * min(values, default=1.0))
    axes.set_ylabel(f"{trials.by}, {TIMES} the best of its level" if trials.has_levels else UNITS[trials.by])
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
    name = "best so far, mean of all levels" if trials.has_levels else "best so far"
    steps: Any = {"color": COLOURS[1], "lw": 1.8, "drawstyle": "steps-post", "label": name, "zorder": 1}
    axes.plot(np.arange(1, len(trials) + 1), np.where(best > 0, best, np.nan), **steps)
    return int((trials.relative > axes.get_ylim()[1]).sum())


def history_chart(trials: TrialTable) -> Chart:
    """Every trial in the order they were asked for, and the best so far."""
    figure, axes = chart("trials asked for", "")
    layers_across(axes, 1, max(2, len(trials)))
    above, stopped = draw_history(axes, trials), int((~trials.whole).sum())
    caption = f"{plural(len(trials), 'trial')}, {stopped} of them stopped early." if stopped else ""
    return Chart(figure, "How the search went", f"{caption}{_beyond(above)}".strip())


def _beyond(above: int, noun: str = "trial") -> str:
    return f" {plural(above, noun)} above the upper edge (hollow, on it)." if above else ""


def draw_quality(axes: Axes, quality: pd.DataFrame, log: bool = True) -> None:
    """Draw the least divergence at every level of a cost, a line for each space, and where the knees are."""
    quality = quality[quality["divergence"] > 0] if log else quality
    scale(axes, "y", quality["divergence"].tolist(), log, zero=not log, end=MOST_DIVERGENCE)

    def tip(row: Any) -> str:
        value = f"divergence {known(row, 'divergence')}"
        return f"{row['space']}, {row['along']} {cost(row['cost'])}: {value}; {row['edits'] or 'no edits'}"

    for place, (space, rows) in enumerate(quality.groupby("space", sort=False)):
        low, high = (
            rows[f"divergence_{end}"].where((rows["divergence_low"] > 0) | (not log)) for end in ("low", "high")
        )
        tips = [tip(row) for _, row in rows.iterrows()]
        points(axes, rows["cost"], rows["divergence"], tips, place, str(space), ends=(low, high))
    knees = quality[quality["knee"].astype(str) == "True"]
    if len(knees):
        tips = [f"knee: {tip(row)}" for _, row in knees.iterrows()]
        points(axes, knees["cost"], knees["divergence"], tips, _KNEE, "knee", line=False)


def quality_chart(along: str, quality: pd.DataFrame) -> Chart:
    """Quality against a cost: the front of each space alone and of all together."""
    figure, axes = chart("", UNITS["divergence"])
    draw_quality(axes, quality)
    _dearest_left(axes, along, quality["cost"][quality["divergence"] > 0])
    _label_cost(axes.xaxis, along)
    of_each = " of each space alone and of all together" if quality["space"].nunique() > 1 else ""
    caption = f"The best program{of_each} at each {along} or better, with 95% intervals, on the text of the search."
    above = int((quality["divergence"] > axes.get_ylim()[1]).sum())
    return Chart(figure, f"The front: divergence against {_COSTS.get(along, along)}", caption + _beyond(above, "point"))


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


def _draw_knee(axes: Axes, curve: pd.DataFrame, row: int, colour: str) -> None:
    knees = curve[curve["knee"].astype(str) == "True"]
    if knees.empty:
        axes.text(float(curve["cost"].iloc[0]), row, " none", fontsize=8, color=colour, va="center")
        return
    knee = knees.iloc[0]
    axes.scatter([knee["cost"]], [row], s=40, color=colour, zorder=3)
    low, high, share = (float(knee.get(f"knee_{name}", math.nan)) for name in ("low", "high", "share"))
    axes.plot([low, high], [row, row], color=colour, lw=3, alpha=0.45, solid_capstyle="butt")
    if share < 0.95:
        text = f"  in {share:.0%} of the resamples"
        axes.text(np.nanmin([low, knee["cost"]]), row, text, fontsize=7, color=SOFT, va="center")


def draw_front(axes: Axes, front: pd.DataFrame, trials: TrialTable, name: str) -> tuple[int, int]:
    """Draw the first objective against another one: the front, and the other trials.

    Returns:
        How many trials lie above the axis, and of how many.
    """
    names, table = objectives_of(front), trials.table[trials.whole]
    first, own = names[0], front.sort_values(name)
    others = table if {first, name} <= set(table) else table.iloc[:0]  # a task's accuracy is of the best only
    if len(others):
        others = others[np.isfinite(others[[name, first]].to_numpy(dtype=float)).all(axis=1)]
    xs = [x for x in [*own[name], *(others[name] if len(others) else ())] if math.isfinite(x)]
    room = 0.02 * (max(xs) - min(xs)) or 0.02 * abs(max(xs)) or 1.0
    scale(axes, "x", [min(xs) - room, max(xs) + room])
    ys = own[first].tolist()
    log, least = min(ys) > 0, min((y for y in ys if y > 0), default=1.0)
    end = max(10 * least, *ys) if log else math.inf
    scale(axes, "y", [*ys, *(others[first] if log and len(others) else ())], log, end=end)
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
    points(axes, own[name], own[first], tips, 0, f"front ({len(own)})", line=len(names) == 2)
    return int((others[first] > axes.get_ylim()[1]).sum()) if len(others) else 0, len(others)


def front_charts(front: pd.DataFrame, trials: TrialTable, without: Collection[str] = ()) -> Iterator[Chart]:
    """The first objective against each of the others but some."""
    first, *others = objectives_of(front)
    for name in (name for name in others if name not in without):
        figure, axes = chart("", "")
        above, _ = draw_front(axes, front, trials, name)
        caption = f"No trial is at least as good as one of the front in everything.{_beyond(above)}"
        yield Chart(figure, f"The front: {first} against {name}", caption)


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
    charts = []
    for space, own in terms.groupby("space", sort=False):
        figure, axes = chart("first layer of the edit", UNITS["divergence"])
        layers_across(axes, int(terms["first"].min()), max(int(terms["first"].max()), 1))
        scale(axes, "y", terms["divergence"].tolist(), log=True)
        lengths = (own["last"] - own["first"] + 1).astype(int)
        ways = own["option"].fillna("").astype(str)  # in what they differ besides where they begin
        if lengths.nunique() > 1:
            ways = ways.where(ways == "", ways + ", ") + lengths.map(lambda length: plural(length, "layer"))
        groups = own.groupby(ways.where(ways != "", "whole"), sort=False)
        for place, (name, rows) in enumerate(groups):
            tips = [f"{row['edit']}: divergence {number(row['divergence'])}" for _, row in rows.iterrows()]
            label = str(name) if len(groups) > 1 else ""
            points(axes, rows["first"], rows["divergence"], tips, place, label, line=len(rows) > 2)
        charts.append(Chart(figure, f"Each edit alone: {space}"))
    return charts
