"""Drawing as SVG text: elements, colour scales and maps of cells."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib
from markupsafe import Markup, escape
from matplotlib.colors import to_hex

from surgeon.reports.scale import BEYOND, COLOURS, damage, largest_shown
from surgeon.words import TIMES, allowance, tick

TOLERANCES = (1.05, 1.10, 1.25)  # of the base perplexity, that tables and maps speak of
MARKED = 1.10  # the one whose border is drawn into the maps
_COLOURS = [to_hex(colour) for colour in matplotlib.colormaps[COLOURS].resampled(64)(range(64))]
_TICKS = (1.05, 1.10, 1.25, 1.5, 2.0, 3.0)
MANY_LAYERS = 48  # beyond, a map needs more room
WIDE, HALF = 800.0, 520.0  # of flat maps, alone and side by side
_PLOT, _LEFT, _BOTTOM, _TOP = 320.0, 34.0, 34.0, 6.0  # of a map, in its own units, about a pixel each


def element(name: str, *children: str | Markup, **attributes: object) -> Markup:
    """An element with everything escaped; attribute names: class_ is class, stroke_width is stroke-width."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_short(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    inside = Markup("").join(children)
    return Markup(f"<{name}{given}>{inside}</{name}>") if children else Markup(f"<{name}{given}/>")


def _short(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class ColourScale:
    """From values to colours, dark for little and bright for much.

    Attributes:
        low, high: values with the first and the last colour; below and above, `BEYOND` above.
        damaged: the value is a perplexity and `low` the base: its place is that of `surgeon.reports.scale.damage`.
        capped: some value lies above `high`.
    """

    low: float
    high: float
    damaged: bool = False
    capped: bool = False

    @classmethod
    def of_perplexity(cls, values: Sequence[float], base: float) -> ColourScale:
        """From the base to the largest perplexity that is shown, as in the PNG files."""
        high = largest_shown(values, base)
        return cls(base, high, damaged=True, capped=any(value > high for value in values))

    @classmethod
    def of_values(cls, values: Sequence[float], low: float | None = None) -> ColourScale:
        """From the least to the greatest of the finite values, evenly."""
        finite = [value for value in values if math.isfinite(value)] or [0.0]
        low = min(finite) if low is None else min(low, *finite)
        high = max(finite)
        return cls(low, high if high > low else low + 1.0, capped=any(value > high for value in values))

    def place(self, value: float) -> float:
        """Where a value lies: 0 at `low`, 1 at `high`."""
        if self.damaged:
            return float(damage(value / self.low) / damage(self.high / self.low))
        return max(0.0, (value - self.low) / (self.high - self.low))

    def colour(self, value: float) -> str:
        """As #rrggbb."""
        # Room for the rounding of numbers that were written to a file.
        if value > self.high * (1 + 1e-9):
            return BEYOND
        return _COLOURS[min(len(_COLOURS) - 1, int(self.place(value) * len(_COLOURS)))]

    def ticks(self) -> list[tuple[float, str]]:
        """Places and labels of the legend, from the first to the last colour."""
        if not self.damaged:
            values = [self.low + (self.high - self.low) * part / 4 for part in range(5)]
            return [(part / 4, tick(value)) for part, value in enumerate(values)]
        end = self.high / self.low
        kept = [ratio for ratio in _TICKS if ratio <= end * (1 + 1e-9)]
        if not kept or self.place(self.low * kept[-1]) < 0.85:
            kept.append(end)
        labels = [allowance(ratio) if ratio < 2 else f"{TIMES}{ratio:.3g}" for ratio in kept]
        return [
            (0.0, "base"),
            *((self.place(self.low * ratio), text) for ratio, text in zip(kept, labels, strict=True)),
        ]


def colour_bar(scale: ColourScale, label: str) -> Markup:
    """The legend of a map: a bar of colours with ticks below, and the colour of values beyond the end."""
    width, left, height = 400.0, 14.0, 12.0
    step = width / len(_COLOURS)
    bars = [
        element("rect", x=left + i * step, y=0, width=step + 0.5, height=height, fill=colour)
        for i, colour in enumerate(_COLOURS)
    ]
    marks = []
    for place, text in scale.ticks():
        x = left + place * width
        marks.append(element("line", x1=x, x2=x, y1=height, y2=height + 4, class_="axis"))
        marks.append(element("text", escape(text), x=x, y=height + 15, text_anchor="middle"))
    if scale.capped:
        x = left + width + 30
        marks.append(element("rect", x=x, y=0, width=22, height=height, fill=BEYOND, class_="cell-edge"))
        marks.append(element("text", "beyond", x=x + 13, y=height + 15, text_anchor="middle"))
    view = f"0 0 {left + width + (74 if scale.capped else 16):.0f} {height + 18:.0f}"
    return element("svg", *bars, *marks, viewBox=view, class_="bar", role="img", aria_label=label)


@dataclass(frozen=True)
class Grid:
    """Values of a map by row and column.

    Attributes:
        rows, columns: labels; a row is drawn below the one before it.
        values: by the numbers of row and column, counted from 0; cells that do not exist are not in it.
    """

    rows: Sequence[str]
    columns: Sequence[str]
    values: Mapping[tuple[int, int], float]
    row_title: str = ""
    column_title: str = ""


def draw_map(grid: Grid, scale: ColourScale, title: str, border: float | None = None, flat: float = 0.0) -> Markup:
    """The cells of a grid in colours, with labels on both axes.

    Args:
        title: read out for those who do not see it.
        border: values up to this one are fenced in by a line.
        flat: for few rows: how wide the drawing is, in cells that are wider than high; `WIDE` or `HALF`.
    """
    across, down = len(grid.columns), len(grid.rows)
    left = _LEFT if not flat else 14.0 + 6.2 * max(len(name) for name in grid.rows)
    width = flat - left if flat else _PLOT
    cell_width = width / across
    cell_height = 22.0 if flat else min(cell_width, _PLOT / down)
    cell_width = cell_width if flat else min(cell_width, _PLOT / down)
    width, height = cell_width * across, cell_height * down
    parts = [element("rect", x=left, y=_TOP, width=width, height=height, class_="no-cell")]
    paths: dict[str, list[str]] = defaultdict(list)
    for (row, column), value in sorted(grid.values.items()):
        if not math.isnan(value):
            paths[scale.colour(value)].append(f"M{column} {row}h1v1h-1z")
    drawn = [element("path", fill=colour, stroke=colour, d="".join(run)) for colour, run in paths.items()]
    if border is not None:
        line = _fence(grid, border)
        drawn += [element("path", d=line, class_=name) for name in ("fence-under", "fence")] if line else []
    place = f"translate({_short(left)} {_short(_TOP)}) scale({cell_width:.4f} {cell_height:.4f})"
    parts.append(element("g", *drawn, transform=place, class_="cells"))
    parts.append(element("rect", width=cell_width, height=cell_height, class_="here", visibility="hidden"))
    parts += _map_labels(grid, left, cell_width, cell_height, bool(flat))
    view = f"0 0 {left + width + 8:.0f} {_TOP + height + _BOTTOM:.0f}"
    geometry = {"data_left": left, "data_top": _TOP, "data_w": round(cell_width, 4), "data_h": round(cell_height, 4)}
    size = {"data_across": across, "data_down": down}
    return element(
        "svg",
        *parts,
        viewBox=view,
        role="img",
        aria_label=title,
        tabindex=0,
        **{k: str(v) for k, v in (geometry | size).items()},
    )


def _map_labels(grid: Grid, left: float, cell_width: float, cell_height: float, flat: bool) -> list[Markup]:
    height, width = cell_height * len(grid.rows), cell_width * len(grid.columns)
    parts = []
    step = _label_step(len(grid.columns), int(width / 24))
    for place in range(0, len(grid.columns), step):
        x = left + (place + 0.5) * cell_width
        parts.append(element("text", escape(grid.columns[place]), x=x, y=_TOP + height + 13, text_anchor="middle"))
    step = 1 if flat else _label_step(len(grid.rows), 16)
    for place in range(0, len(grid.rows), step):
        y = _TOP + (place + 0.5) * cell_height + 3.5
        parts.append(element("text", escape(grid.rows[place]), x=left - 5, y=y, text_anchor="end"))
    middle, bottom = left + width / 2, _TOP + height + 28
    parts.append(
        element("text", escape(grid.column_title), x=middle, y=bottom, text_anchor="middle", class_="axis-title")
    )
    if grid.row_title:
        turned = f"translate(10 {_TOP + height / 2:.1f}) rotate(-90)"
        parts.append(
            element("text", escape(grid.row_title), transform=turned, text_anchor="middle", class_="axis-title")
        )
    return parts


def _label_step(count: int, room: int) -> int:
    """Labels stay apart: every one, every 2nd, 4th, ..."""
    step = 1
    while count / step > room:
        step *= 2
    return step


def _fence(grid: Grid, limit: float) -> str:
    """The border between cells up to a value and the others, as a path in units of cells."""
    parts = []
    for (row, column), value in grid.values.items():
        below, right = grid.values.get((row + 1, column)), grid.values.get((row, column + 1))
        if below is not None and (value <= limit) != (below <= limit):
            parts.append(f"M{column} {row + 1}h1")
        if right is not None and (value <= limit) != (right <= limit):
            parts.append(f"M{column + 1} {row}v1")
    return "".join(parts)
