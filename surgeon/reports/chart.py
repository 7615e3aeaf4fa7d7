"""Line charts and point clouds as SVG, readable without colour: lines differ in dash and marks in shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from surgeon.reports.blocks import LegendKey
from surgeon.reports.runs import MOST_LAYERS
from surgeon.reports.svg import element
from surgeon.words import tick as tick_text

WIDTH, HEIGHT = 480.0, 300.0  # of a chart, in its own units, about a pixel each
_LEFT, _RIGHT, _TOP, _BOTTOM = 60.0, 10.0, 10.0, 40.0
STYLES = 8  # classes s0 to s7 for kinds of things, q0 to q7 for more and more of one thing
_MARKS = (
    "M-3 0a3 3 0 1 0 6 0a3 3 0 1 0 -6 0z",
    "M-2.7 -2.7h5.4v5.4h-5.4z",
    "M0 -3.6L3.3 2.4H-3.3z",
    "M0 -3.7L3.7 0L0 3.7L-3.7 0z",
    "M-3.3 -2.4H3.3L0 3.6z",
    "M-3.4 -1H-1V-3.4H1V-1H3.4V1H1V3.4H-1V1H-3.4z",
    "M-3.6 -1.6H3.6V1.6H-3.6z",
    "M-1.6 -3.6H1.6V3.6H-1.6z",
)


@dataclass(frozen=True)
class Point:
    """A value with what is shown when it is pointed at, and its 95% interval if it has one."""

    x: float
    y: float
    tip: str
    low: float = math.nan
    high: float = math.nan


@dataclass(frozen=True)
class Series:
    """Points of one kind.

    Attributes:
        style: number of its colour, dash and mark.
        ordered: one of several that are more and more of the same; colours run from dark to bright.
        line, marks: what is drawn.
        band: intervals are an area along the line instead of a whisker at every point.
    """

    name: str
    points: Sequence[Point]
    style: int = 0
    ordered: bool = False
    line: bool = True
    marks: bool = True
    band: bool = False

    @property
    def css(self) -> str:
        """Its class."""
        return f"{'q' if self.ordered else 's'}{self.style % STYLES}"

    def key(self) -> LegendKey:
        """Its entry in a legend."""
        parts = [element("line", x1=0, x2=26, y1=7, y2=7, class_=f"line {self.css}")] if self.line else []
        if self.marks:
            parts.append(self.mark(13.0, 7.0))
        return LegendKey(element("svg", *parts, viewBox="0 0 26 14", class_="key", aria_hidden="true"), self.name)

    def mark(self, x: float, y: float, tip: str = "", beyond: bool = False) -> Markup:
        """A point; a hollow one stands for a value beyond the axis."""
        shape = _MARKS[0 if self.ordered else self.style % len(_MARKS)]
        title = [element("title", escape(tip))] if tip else []
        return element(
            "path",
            *title,
            d=shape,
            transform=f"translate({x:.1f} {y:.1f})",
            class_=f"mark {self.css}{' beyond' if beyond else ''}",
        )


@dataclass(frozen=True)
class Axis:
    """One axis: its range, ticks and title.

    Attributes:
        ticks: values and their labels.
    """

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    title: str
    log: bool = False

    def place(self, value: float) -> float:
        """0 at `low`, 1 at `high`."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def layer_axis(first: int, last: int, title: str = "layer") -> Axis:
    """Whole layers, all of them or evenly chosen ones labelled."""
    if last - first > MOST_LAYERS:
        raise ValueError(f"layers {first} to {last} are more than any model has")
    step = next(s for s in (1, 2, 4, 5, 10, 20, 50, 100, 1000) if (last - first) / s <= 16)
    ticks = [(float(layer), str(layer)) for layer in range(first, last + 1) if layer % step == 0]
    return Axis(first - 0.5, last + 0.5, ticks, title)


def value_axis(values: Sequence[float], title: str, zero: bool = False, end: float = math.inf) -> Axis:
    """Evenly spaced round numbers around the finite values.

    Args:
        zero: begin at 0.
        end: larger values are left to lie above the axis.
    """
    finite = [min(value, end) for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    low = min(0.0, low) if zero else low
    high = high if high > low else low + (abs(low) or 1.0) * 0.1
    step = _round_step((high - low) / 5)
    low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    count = round((high - low) / step)
    return Axis(low, high, [(low + i * step, tick_text(low + i * step)) for i in range(count + 1)], title)


def log_axis(values: Sequence[float], title: str, end: float = math.inf) -> Axis:
    """A logarithmic axis around the finite values above 0, with round numbers."""
    finite = [min(value, end) for value in values if 0 < value < math.inf] or [1.0, 10.0]
    low, high = min(finite), max(finite)
    high = high if high > low * 1.0001 else low * 1.1
    room = (high / low) ** 0.05
    low, high = low / room, high * room
    ticks = _log_ticks(low, high)
    return Axis(low, high, [(tick, tick_text(tick)) for tick in ticks], title, log=True)


def _log_ticks(low: float, high: float) -> list[float]:
    if high / low < 4:
        step = _round_step((high - low) / 5)
        return [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for parts in ((1.0, 2.0, 5.0), (1.0, 3.0), (1.0,)):
        ticks = [part * 10.0**decade for decade in decades for part in parts]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= 8:
            return ticks
    return ticks[:: math.ceil(len(ticks) / 8)]


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return power * next(part for part in (1, 2, 2.5, 5, 10) if part * power >= rough * (1 - 1e-9))


def draw_chart(series: Sequence[Series], x: Axis, y: Axis, title: str, rule: float | None = None) -> Markup:
    """Lines and points between two axes; what lies above the upper end is drawn on it.

    Args:
        title: read out for those who do not see it.
        rule: a value of y with a dashed line across.
    """
    width, height = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM

    def at(value: float) -> float:
        return max(-0.02, min(1.0, x.place(value))) * width

    def up(value: float) -> float:
        if y.log and value <= 0:
            return height
        return (1 - max(0.0, min(1.0, y.place(min(value, y.high))))) * height

    drawn = [element("line", x1=0, x2=width, y1=up(rule), y2=up(rule), class_="rule")] if rule is not None else []
    for one in series:
        drawn += _draw_series(one, at, up, y.high)
    inside = element(
        "g", *_grid_lines(x, y, width, height, at, up), *drawn, transform=f"translate({_LEFT:.0f} {_TOP:.0f})"
    )
    middle = f"translate(12 {_TOP + height / 2:.1f}) rotate(-90)"
    labels = [
        element("text", escape(x.title), x=_LEFT + width / 2, y=HEIGHT - 6, text_anchor="middle", class_="axis-title"),
        element("text", escape(y.title), transform=middle, text_anchor="middle", class_="axis-title"),
    ]
    return element("svg", inside, *labels, viewBox=f"0 0 {WIDTH:.0f} {HEIGHT:.0f}", role="img", aria_label=title)


def _grid_lines(
    x: Axis, y: Axis, width: float, height: float, at: Callable[[float], float], up: Callable[[float], float]
) -> list[Markup]:
    parts = []
    for value, text in y.ticks:
        place = up(value)
        parts.append(element("line", x1=0, x2=width, y1=place, y2=place, class_="grid"))
        parts.append(element("text", escape(text), x=-7, y=place + 4, text_anchor="end"))
    for value, text in x.ticks:
        place = at(value)
        parts.append(element("line", x1=place, x2=place, y1=height, y2=height + 4, class_="axis"))
        parts.append(element("text", escape(text), x=place, y=height + 16, text_anchor="middle"))
    parts.append(element("line", x1=0, x2=width, y1=height, y2=height, class_="axis"))
    return parts


def _draw_series(one: Series, at: Callable[[float], float], up: Callable[[float], float], top: float) -> list[Markup]:
    points = [point for point in one.points if not math.isnan(point.y)]
    known = [point for point in points if math.isfinite(point.low) and math.isfinite(point.high)]
    ends = [(at(point.x), up(point.low), up(point.high)) for point in known]
    if one.band and ends:
        edge = [(x, high) for x, _, high in ends] + [(x, low) for x, low, _ in reversed(ends)]
        path = "".join(f"{'L' if i else 'M'}{x:.1f} {y:.1f}" for i, (x, y) in enumerate(edge))
        parts = [element("path", d=f"{path}z", class_=f"band {one.css}")]
    else:
        parts = [element("line", x1=x, x2=x, y1=low, y2=high, class_=f"whisker {one.css}") for x, low, high in ends]
    if one.line:
        path = "".join(f"{'L' if i else 'M'}{at(p.x):.1f} {up(p.y):.1f}" for i, p in enumerate(points))
        parts.append(element("path", d=path, class_=f"line {one.css}"))
    if one.marks:
        parts += [one.mark(at(point.x), up(point.y), point.tip, point.y > top) for point in points]
    return parts
