"""A program as a picture: the residual stream from left to right, with the steps that read it and add to it.

Stretches of unchanged layers, or of the same ranks, are one box. A step's boxes stand between the place where it reads
the stream and the plus where their sum is added. A late step reads in front of the plus of the step before, and is
drawn on the stream's other side: the two run at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Circle, FancyBboxPatch, Patch

from surgeon.language.program import Fork, Node, Program, Step, layer_nodes, steps_of
from surgeon.language.sublayer import ATTENTION, FEED_FORWARD, UNITS, Sublayer, sizes_text

_FILLS = {ATTENTION: "#3b75af", FEED_FORWARD: "#e8842c"}
_STREAM = "#333333"
_LATE = "#7b3fa0"
_LEFT_OUT = "#c0392b"
_UNCHANGED = "#eeeeee"
_LOW_RANK = "#cfe5cd"
_ROW_WIDTH = 12.0  # in steps; a wider fork makes rows wider
# Widths.
_STEP = 1.0
_LATE_STEP = 0.72
_STRETCH = 1.7
_GAP = 0.75
_BOX_GAP = 0.08
_ABOVE = 0.28
_LINE = 0.15  # of a box's text
_FONT = 8.0
_INCHES = 0.95  # per unit


def program_figure(program: Program, num_layers: int, steps_per_layer: int, title: str = "") -> Figure:
    """The picture, on axes whose units are steps; sizes are those of the unedited model."""
    items = list(outline(program, num_layers, steps_per_layer))
    rows: list[list[Item]] = [[]]
    room = max(_ROW_WIDTH, *map(_width, items))
    for item in items:
        if rows[-1] and sum(map(_width, rows[-1])) + _width(item) > room:
            rows.append([])
        rows[-1].append(item)
    heights = [(_height(row, 1), _height(row, -1)) for row in rows]
    width = max(_ROW_WIDTH / 2, *(sum(map(_width, row)) for row in rows)) + 1.2
    height = sum(up + down for up, down in heights) + 1.5
    figure = Figure(figsize=(width * _INCHES, height * _INCHES), dpi=160)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(-0.6, width - 0.6)
    axes.set_ylim(-height + 0.9, 0.6)
    axes.set_aspect("equal")
    axes.axis("off")
    axes.text(-0.35, 0.25, title, fontsize=11, va="center")
    y = 0.0
    for number, (row, (up, down)) in enumerate(zip(rows, heights, strict=True)):
        y -= up
        end = _draw_nodes(axes, row, 0.0, y)
        begins = "in" if number == 0 else "..."
        ends = "out" if number == len(rows) - 1 else "..."
        for x, text in ((-0.32, begins), (end + 0.2, ends)):
            axes.text(x, y, text, ha="center", va="center", fontsize=8, color=_STREAM)
        start = -0.15  # left of where a late step that begins the row reads
        axes.plot([start, end], [y, y], color=_STREAM, linewidth=1.6, zorder=1)
        y -= down
    handles: list[Patch | Line2D] = [
        Patch(facecolor=_FILLS[ATTENTION], label="attention"),
        Patch(facecolor=_FILLS[FEED_FORWARD], label="feed-forward"),
    ]
    nodes = tuple(item for item in items if isinstance(item, Step | Fork))
    if any(isinstance(item, LayersInOrder) and item.sizes for item in items):
        handles.append(
            Patch(facecolor=_LOW_RANK, label="fewer heads or neurons, or factors of these ranks")
        )
    if any(step.late for step in steps_of(nodes)):
        handles.append(Line2D([], [], color=_LATE, label="late: beside the step before"))
    if any(isinstance(item, LeftOut) for item in items):
        handles.append(Line2D([], [], color=_LEFT_OUT, linestyle=(0, (2, 1.5)), label="left out"))
    axes.legend(
        handles=handles,
        loc="center left",
        bbox_to_anchor=(-0.4, y - 0.25),
        bbox_transform=axes.transData,
        ncols=len(handles),
        frameon=False,
        fontsize=8,
        handlelength=1.3,
        columnspacing=1.2,
    )
    return figure


# -- how much room it takes --


def _width(item: Item) -> float:
    if isinstance(item, Step):
        if item.late:
            return _LATE_STEP
        return _STEP
    if isinstance(item, LayersInOrder):
        return _STRETCH
    if isinstance(item, LeftOut):
        return _GAP
    return 0.7 + max(sum(map(_width, branch)) for branch in item.branches)


def _lines(item: Sublayer | LayersInOrder) -> list[str]:
    if isinstance(item, Sublayer):
        return [
            str(replace(item, ranks=(), width=None)),
            *(f"{what} {size}" for what, size in item.sizes),
        ]
    sizes = []
    if item.sizes:
        sizes = sizes_text(dict(item.sizes)).split("; ")
    return [item.text, item.how, *sizes]


def _box_height(item: Sublayer | LayersInOrder) -> float:
    return 0.19 + _LINE * len(_lines(item))


def _height(row: Sequence[Item], wanted: int) -> float:
    """Height of a row above the stream (1) or below it (-1)."""
    reached = [_box_height(item) / 2 for item in row if isinstance(item, LayersInOrder)]
    for item, side in zip(row, _sides(row), strict=True):
        if side != wanted:
            continue
        if isinstance(item, Step):
            reached.append(_ABOVE + sum(_box_height(one) + _BOX_GAP for one in item.sublayers))
        elif isinstance(item, Fork):
            heights = (_height(branch, 1) + _height(branch, -1) for branch in item.branches)
            reached.append(sum(heights) + 0.1)
        else:
            reached.append(_ABOVE + _BOX_GAP)
    return max(reached, default=0.1) + 0.1


def _sides(row: Sequence[Item]) -> list[int]:
    """The side of the stream of each item: 1 above, -1 below."""
    sides: list[int] = []
    for item in row:
        late = isinstance(item, Step) and item.late
        sides.append(-sides[-1] if late and sides else 1)
    return sides


# -- drawing --


def _draw_nodes(axes: Axes, nodes: Sequence[Item], x: float, y: float) -> float:
    plus = x  # of the item before
    for item, side in zip(nodes, _sides(nodes), strict=True):
        end = x + _width(item)
        if isinstance(item, Step):
            read = plus - 0.13 if item.late else x + 0.1
            plus = end - 0.1
            color = _STREAM
            left = read + 0.1
            if item.late:
                color = _LATE
                left = max(left, plus - 0.68)
            # The first one on top, on either side of the stream.
            outwards = item.sublayers[::-side]
            rooms = [_box_height(one) + _BOX_GAP for one in outwards]
            centers = [
                y + side * (_ABOVE + reached - room / 2)
                for reached, room in zip(accumulate(rooms), rooms, strict=True)
            ]
            for upright in (read, plus):
                axes.plot([upright] * 2, [y, centers[-1]], color=color, linewidth=1.1, zorder=1)
            for sublayer, center in zip(outwards, centers, strict=True):
                axes.plot([read, plus], [center, center], color=color, linewidth=1.1, zorder=1)
                _box(axes, (left, plus - 0.1), center, sublayer, _FILLS[sublayer.kind], "white")
            _plus(axes, plus, y)
        elif isinstance(item, Fork):
            read = x + 0.1
            plus = end - 0.1
            below = y + 0.1
            for branch in reversed(item.branches):  # the first on top
                lane = below + _height(branch, -1)
                below += _height(branch, 1) + _height(branch, -1)
                inside = _draw_nodes(axes, branch, read + 0.2, lane)
                path = [read, read, plus, plus]
                axes.plot(path, [y, lane, lane, y], color=_STREAM, linewidth=1.1, zorder=1)
                axes.plot([read + 0.2, inside], [lane, lane], color=_STREAM, linewidth=1.6, zorder=1)
            _plus(axes, plus, y)
        elif isinstance(item, LayersInOrder):
            fill = _UNCHANGED
            if item.sizes:
                fill = _LOW_RANK
            _box(axes, (x + 0.12, end - 0.12), y, item, fill, "#444444")
        else:
            axes.plot(
                [(x + end) / 2] * 2,
                [y - 0.12, y + 0.32],
                color=_LEFT_OUT,
                linestyle=(0, (2, 1.5)),
                linewidth=1.2,
            )
            axes.text(
                (x + end) / 2, y + 0.42, f"no {item.text}", color=_LEFT_OUT, fontsize=7.5, ha="center"
            )
        x = end
    return x


def _box(
    axes: Axes,
    span: tuple[float, float],
    y: float,
    item: Sublayer | LayersInOrder,
    fill: str,
    color: str,
) -> None:
    left, right = span
    height = _box_height(item)
    look: dict[str, Any] = {
        "boxstyle": "round,pad=0,rounding_size=0.06",
        "edgecolor": "none",
        "zorder": 2,
    }
    axes.add_patch(FancyBboxPatch((left, y - height / 2), right - left, height, facecolor=fill, **look))
    lines = _lines(item)
    size = min(_FONT, 58 * (right - left) / max(map(len, lines)))
    place: dict[str, Any] = {"ha": "center", "va": "center", "color": color, "zorder": 3}
    axes.text((left + right) / 2, y, "\n".join(lines), fontsize=size, linespacing=1.15, **place)


def _plus(axes: Axes, x: float, y: float) -> None:
    axes.add_patch(Circle((x, y), 0.075, facecolor="white", edgecolor=_STREAM, linewidth=1.1, zorder=4))
    axes.plot([x - 0.04, x + 0.04], [y, y], color=_STREAM, linewidth=0.9, zorder=5)
    axes.plot([x, x], [y - 0.04, y + 0.04], color=_STREAM, linewidth=0.9, zorder=5)


FEWEST_IN_A_STRETCH = 3  # layers
Sizes = tuple[tuple[str, int], ...]  # by name


@dataclass(frozen=True)
class LayersInOrder:
    """Unchanged layers, drawn as one box.

    Attributes:
        sizes: by name, of narrower layers: KV groups or neurons, and ranks of matrices.
    """

    first: int
    last: int
    sizes: Sizes = ()

    @property
    def text(self) -> str:
        return f"layers {self.first}-{self.last}"

    @property
    def how(self) -> str:
        names = {name for name, _ in self.sizes}
        changes = {"narrow": names & {*UNITS.values()}, "low-rank": names - {*UNITS.values()}}
        return ", ".join(change for change, these in changes.items() if these) or "as they were"


@dataclass(frozen=True)
class LeftOut:
    """Sublayers of the unedited model that the program leaves out, at their place."""

    sublayers: tuple[Sublayer, ...]

    @property
    def text(self) -> str:
        """For whole layers "4-6", for an attention only "A4"."""
        layers = sorted({sublayer.layers[0] for sublayer in self.sublayers})
        kinds = {sublayer.kind for sublayer in self.sublayers}
        what = ""
        if len(kinds) == 1:
            what = "".join(sorted(kinds))
        if len(layers) == 1:
            return f"{what}{layers[0]}"
        return f"{what}{layers[0]}-{layers[-1]}"


Item = Step | Fork | LayersInOrder | LeftOut


def outline(program: Program, num_layers: int, steps_per_layer: int) -> Iterator[Item]:
    """The program's nodes, with stretches of layers in order as one item, and with sublayers that are left out."""
    used = {(one.kind, layer) for one in program.sublayers() for layer in one.layers}
    dense = Program.dense(num_layers, steps_per_layer).sublayers()
    missing = [sublayer for sublayer in dense if (sublayer.kind, sublayer.layers[0]) not in used]
    # Layers that run whole and in their order, with their sizes, by the place of their first node.
    unchanged: dict[int, tuple[int, Sizes]] = {}
    nodes = program.whole().nodes
    places = [sorted(map(_place, _sublayers(node))) for node in nodes]
    for at in range(len(nodes) - steps_per_layer + 1):
        end = at + steps_per_layer
        layer = places[at][0][0]
        # What reads in front of a plus needs it to be seen.
        late = any(isinstance(node, Step) and node.late for node in nodes[end : end + 1])
        if late or nodes[at:end] != layer_nodes(layer, steps_per_layer):
            continue
        before = all(each[-1] < places[at][0] for each in places[:at])
        if before and all(each[0] > places[end - 1][-1] for each in places[end:]):
            sublayers = (one for node in program.nodes[at:end] for one in _sublayers(node))
            unchanged[at] = layer, tuple(size for one in sublayers for size in one.sizes)
    at = 0
    while at < len(program.nodes):
        node = program.nodes[at]
        gone = tuple(
            sublayer for sublayer in missing if _place(sublayer) < min(map(_place, _sublayers(node)))
        )
        if gone:
            yield LeftOut(gone)
            missing = missing[len(gone) :]
        first, sizes = unchanged.get(at, (0, ()))
        layers = 0
        while unchanged.get(at + layers * steps_per_layer) == (first + layers, sizes):
            layers += 1
        if layers >= FEWEST_IN_A_STRETCH:
            yield LayersInOrder(first, first + layers - 1, sizes)
            at += layers * steps_per_layer
        else:
            yield node
            at += 1
    if missing:
        yield LeftOut(tuple(missing))


def outline_text(program: Program, num_layers: int, steps_per_layer: int) -> str:
    """The program's text, with stretches of layers in words, and without sizes."""
    words = []
    for item in outline(program, num_layers, steps_per_layer):
        if isinstance(item, LayersInOrder):
            words.append(f"({item.text} {item.how})")
        elif isinstance(item, LeftOut):
            words.append(f"(no {item.text})")
        else:
            words.append(str(Program((item,)).whole()))
    return " ".join(words)


def _place(sublayer: Sublayer) -> tuple[int, bool]:
    return min(sublayer.layers), sublayer.kind != ATTENTION


def _sublayers(node: Node) -> list[Sublayer]:
    return [sublayer for step in steps_of((node,)) for sublayer in step.sublayers]
