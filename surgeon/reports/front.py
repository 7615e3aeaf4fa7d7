"""Pictures of a search's front: one objective against another, and how deep the model really is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from surgeon.processes.files import whole_file
from surgeon.searches.front import MOST_DIVERGENCE, DepthCurve, FrontPoint
from surgeon.searches.pricing import Pricing
from surgeon.searches.quantities import Aspect
from surgeon.searches.trial import Trial

# Colours that stay apart for colour-blind readers and in print (Okabe and Ito).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8A6D3B", "#666666", "#4B3B8F")
MARKERS = "osD^vP*Xh"
_ALL = "#222222"
_ENGINEERED = {"latency": "s", "params": "", "weight_bytes": "B", "kv_bytes": "B", "wire_bytes": "B"}
_APART = (0.035, 0.035)  # of a panel: numbers nearer than this cover each other
_SHOWN = 0.5  # times the front's own extent: trials beyond would squeeze it


def draw_front(
    path: Path,
    front: Sequence[FrontPoint],
    trials: Sequence[Trial],
    objectives: Sequence[Aspect],
    pricing: Pricing,
    title: str,
) -> None:
    """Draw the Pareto front: the first objective against each of the others, one panel for each."""
    panels = max(1, len(objectives) - 1)
    figure = Figure(figsize=(6.4 * panels, 4.6), layout="constrained")
    whole = [trial for trial in trials if trial.measured.whole]
    costs = [pricing.costs(objectives, trial) for trial in whole]
    for axes, across in zip(figure.subplots(1, panels, squeeze=False)[0], range(1, panels + 1), strict=True):
        place = min(across, len(objectives) - 1)
        both = objectives[place], objectives[0]
        others = [(both[0].natural(cost[place]), both[1].natural(cost[0])) for cost in costs]
        points = [(both[0].natural(point.costs[place]), both[1].natural(point.costs[0])) for point in front]
        _draw_panel(axes, points, others, joined=len(objectives) == 2)
        axes.set(xlabel=both[0].label, ylabel=both[1].label)
        _format(axes.xaxis, both[0])
        _format(axes.yaxis, both[1])
    figure.suptitle(title, fontsize=11)
    _save(figure, path)


def _draw_panel(
    axes: Axes, points: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]], joined: bool
) -> None:
    finite = [(x, y) for x, y in others if math.isfinite(x) and math.isfinite(y)]
    axes.scatter(*_columns(finite), s=14, color="#BBBBBB", label=f"trials ({len(finite)})", zorder=1)
    ordered = sorted(points)
    if joined:  # between two points of the front nothing better is known than the worse of both
        axes.plot(*_columns(ordered), color=COLOURS[0], lw=1.2, drawstyle="steps-post", zorder=2)
    axes.scatter(*_columns(ordered), s=34, color=COLOURS[0], label=f"front ({len(points)})", zorder=3)
    _limit(axes, [y for _, y in points], [y for _, y in finite])
    _number(axes, points)
    axes.legend(frameon=False, fontsize=8)
    _finish(axes)


def _number(axes: Axes, points: Sequence[tuple[float, float]]) -> None:
    """Numbers as in front.csv, of the points whose numbers do not cover each other."""
    written: list[tuple[float, float]] = []
    for number, point in enumerate(points, 1):
        x, y = axes.transAxes.inverted().transform(axes.transData.transform(point))
        if all(abs(x - left) > _APART[0] or abs(y - below) > _APART[1] for left, below in written):
            written.append((x, y))
            axes.annotate(str(number), point, xytext=(4, 4), textcoords="offset points", fontsize=8, color=COLOURS[0])


def _format(axis: Axis, objective: Aspect) -> None:
    """Times and large numbers as people read them: 600 us, 2.5 M."""
    if objective.name in _ENGINEERED:
        axis.set_major_formatter(EngFormatter(unit=_ENGINEERED[objective.name]))


def draw_depths(path: Path, curves: Sequence[DepthCurve], title: str) -> None:
    """Draw the least divergence at every effective depth with its 95% interval, and each curve's knee.

    On the left as it is, up to `MOST_DIVERGENCE`, which is how a knee is told; on the right on a logarithmic scale.
    Curves that give up no depth are left out.
    """
    shown = [curve for curve in curves if len(curve.points) > 1]
    figure = Figure(figsize=(11, 5.2 + 0.14 * len(shown)), layout="constrained")
    panels = figure.subplot_mosaic("LR;KR", sharex=True, height_ratios=[5, 0.5 + 0.35 * len(shown)])
    linear, logarithmic, knees = panels["L"], panels["R"], panels["K"]
    for number, curve in enumerate(shown):
        together = number == len(shown) - 1 and len(shown) > 1
        colour = _ALL if together else COLOURS[number % len(COLOURS)]
        marker = "o" if together else MARKERS[number % len(MARKERS)]
        under: dict[str, Any] = {"lw": 5.0, "alpha": 0.3, "zorder": 1} if together else {"lw": 1.3, "zorder": 2}
        _draw_curve(linear, curve, colour, marker, under)
        _draw_curve(logarithmic, curve, colour, marker, under, positive=True)
        _draw_knee(knees, curve, number, colour)
    _finish_depths(linear, logarithmic, shown)
    knees.set(xlabel="effective depth (layers)", ylim=(len(shown) - 0.5, -0.5))
    knees.set_yticks(range(len(shown)), labels=[curve.name for curve in shown], fontsize=8)
    knees.set_title("knee, with its 95% interval by resampling windows", fontsize=9, loc="left")
    for each in (linear, logarithmic, knees):
        _finish(each)
    figure.suptitle(title, fontsize=11)
    _save(figure, path)


def _finish_depths(linear: Axes, logarithmic: Axes, shown: Sequence[DepthCurve]) -> None:
    deepest = max((curve.points[0].depth for curve in shown), default=1.0)
    least = min((curve.points[-1].depth for curve in shown), default=0.0)
    highest = max((point.divergence for curve in shown for point in curve.points), default=1.0)
    top = min(highest, MOST_DIVERGENCE) or 1.0
    linear.set(ylabel="divergence from the original (nats/token)", xlim=(deepest + 0.5, least - 0.5))
    linear.set_ylim(-0.03 * top, 1.06 * top)
    linear.legend(frameon=False, fontsize=8)
    logarithmic.set(xlabel="effective depth (layers)", yscale="log")
    logarithmic.set_title("the same, logarithmic", fontsize=9, loc="left")


def _draw_curve(
    axes: Axes, curve: DepthCurve, colour: str, marker: str, line: dict[str, Any], positive: bool = False
) -> None:
    points = [point for point in curve.points if point.divergence > 0 or not positive]
    depths, values = _columns([(point.depth, point.divergence) for point in points])
    axes.plot(depths, values, color=colour, marker=marker, ms=4.5, label=curve.name, **line)
    known = [point for point in points if math.isfinite(point.high) and (point.low > 0 or not positive)]
    if known:
        xs = [point.depth for point in known]
        axes.fill_between(xs, [p.low for p in known], [p.high for p in known], color=colour, alpha=0.14, lw=0)
    knee = next((point for point in points if point.depth == curve.knee.depth), None)
    if knee is not None:
        axes.scatter([knee.depth], [knee.divergence], s=150, facecolors="none", edgecolors=colour, lw=1.8, zorder=4)


def _draw_knee(axes: Axes, curve: DepthCurve, row: int, colour: str) -> None:
    knee = curve.knee
    if knee.depth is None:
        axes.text(curve.points[0].depth, row, " none", fontsize=8, color=colour, va="center")
        return
    axes.plot([knee.low, knee.high], [row, row], color=colour, lw=3, alpha=0.45, solid_capstyle="butt")
    axes.scatter([knee.depth], [row], s=40, color=colour, zorder=3)
    if knee.share < 0.95:
        text = f"  in {knee.share:.0%} of the resamples"
        axes.text(min(knee.low, knee.depth), row, text, fontsize=7, color="#666666", va="center")


def _limit(axes: Axes, own: Sequence[float], others: Sequence[float]) -> None:
    """Keep far trials from squeezing the front, and say how many are left out."""
    if not own:
        return
    low, high = min(own), max(own)
    top = high + _SHOWN * (high - low)
    beyond = sum(value > top for value in others) if high > low else 0
    if beyond:
        room = 0.05 * (top - low)
        axes.set_ylim(low - room, top + room)
        axes.text(0.02, 0.98, f"{beyond} of {len(others)} trials lie above", ha="left", va="top", fontsize=8,
                  color="#666666", transform=axes.transAxes)  # fmt: skip


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _finish(axes: Axes) -> None:
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


def _save(figure: Figure, path: Path) -> None:
    with whole_file(path) as beside:
        figure.savefig(beside, format="png", dpi=150)
