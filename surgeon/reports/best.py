"""Which program is fastest where: as lines of a terminal, as a table for a file, and as a map."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from surgeon.cost.best import Choice, Extent
from surgeon.language.operations.variants import DENSE
from surgeon.processes.files import whole_file
from surgeon.reports.bench import aligned

_NOTHING, _DENSE = "#ffffff", "#d5dadf"
_PROGRAMS = ("#33638d", "#f0a04b", "#4aa36c", "#c8553d", "#7b5ea7", "#c9a227", "#2aa1b3", "#8a6d5b")
_STRONGEST = 2.0  # times as fast: full colour
_MOST_COLUMNS = 3


def choice_table(found: Sequence[Choice]) -> pd.DataFrame:
    """A row for every link, number of ranks and batch: what wins, and what every program wins there."""
    rows = []
    for one in found:
        row: dict[str, object] = {"link": one.link, "ranks": one.ranks, "batch": one.batch}
        row |= {"winner": one.winner if one.dense else "", "speedup": one.speedup if one.dense else math.nan}
        rows.append(row | {f"{name}_speedup": speedup for name, speedup in one.by_program.items()})
    return pd.DataFrame(rows)


def describe_choices(found: Sequence[Choice]) -> str:
    """One table for each link: ranks down, batches across, each with its winner and what it wins."""
    parts = []
    for link in dict.fromkeys(one.link for one in found):
        here = [one for one in found if one.link == link]
        batches = list(dict.fromkeys(one.batch for one in here))
        lines = [["ranks", *(f"batch {batch}" for batch in batches)]]
        for ranks in dict.fromkeys(one.ranks for one in here):
            by_batch = {one.batch: one for one in here if one.ranks == ranks}
            lines.append([str(ranks), *(_told(by_batch.get(batch)) for batch in batches)])
        parts += [link or "no link", aligned(lines), ""]
    return "\n".join(parts).rstrip()


def _told(one: Choice | None) -> str:
    if one is None or one.dense is None:
        return "-"
    return DENSE if one.winner == DENSE else f"{one.winner} {one.speedup:.2f}"


def describe_reaches(found: Sequence[Extent]) -> str:
    """At which batches each program pays; programs down, ranks across, by link."""
    parts = []
    for link in dict.fromkeys(one.link for one in found):
        here = [one for one in found if one.link == link]
        ranks = list(dict.fromkeys(one.ranks for one in here))
        lines = [["batches", *(f"{count} ranks" if count > 1 else "1 rank" for count in ranks)]]
        for program in dict.fromkeys(one.program for one in here):
            by_ranks = {one.ranks: one for one in here if one.program == program}
            lines.append([program, *(_reach(by_ranks.get(count)) for count in ranks)])
        parts += [link or "no link", aligned(lines), ""]
    return "\n".join(parts).rstrip()


def _reach(one: Extent | None) -> str:
    if one is None:
        return "-"
    if one.never:
        return "never"
    if one.starts is None:
        return "always" if one.stops is None else f"below {one.stops}"
    return f"from {one.starts}" + (f", below {one.stops}" if one.stops else "")


def draw_choices(found: Sequence[Choice], path: Path, title: str) -> Path:
    """Write a map: a panel for each link, ranks down, batches across, coloured by what wins and how much."""
    links = list(dict.fromkeys(one.link for one in found))
    winners = list(dict.fromkeys(name for one in found for name in one.by_program))
    colours = {name: _PROGRAMS[place % len(_PROGRAMS)] for place, name in enumerate(winners)}
    columns = min(_MOST_COLUMNS, len(links))
    rows = -(-len(links) // columns)
    batches = len({one.batch for one in found})
    heights = len({one.ranks for one in found})
    size = (max(7.0, 1.2 + columns * (0.6 + 0.62 * batches)), 1.3 + rows * (0.7 + 0.42 * heights))
    figure = Figure(figsize=size, layout="constrained", dpi=160)
    panels = list(np.atleast_1d(figure.subplots(rows, columns, squeeze=False)).flat)
    for panel, link in zip(panels, links, strict=False):
        _draw(panel, [one for one in found if one.link == link], colours)
        panel.set_title(link or "one rank", fontsize=10)
    for panel in panels[len(links) :]:
        panel.set_axis_off()
    won = {one.winner for one in found if one.dense}
    handles = [Patch(color=colours[name], label=name) for name in winners if name in won]
    handles += [Patch(facecolor=_DENSE, label="nothing pays")] if DENSE in won else []
    handles += [Patch(facecolor=_NOTHING, edgecolor="#888888", label="does not fit")] if _unfit(found) else []
    figure.legend(handles=handles, loc="outside lower center", ncols=min(5, len(handles)), fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=10, wrap=True)
    with whole_file(path) as beside:
        figure.savefig(beside, format="png")
    return path


def _unfit(found: Sequence[Choice]) -> bool:
    return any(one.dense is None for one in found)


def _draw(axes: Axes, found: Sequence[Choice], colours: dict[str, str]) -> None:
    ranks, batches = (list(dict.fromkeys(getattr(one, name) for one in found)) for name in ("ranks", "batch"))
    image = np.ones((len(ranks), len(batches), 4))
    for one in found:
        place = ranks.index(one.ranks), batches.index(one.batch)
        image[place] = _colour(one, colours)
        if one.dense is not None:
            axes.text(place[1], place[0], f"{one.speedup:.2f}", ha="center", va="center", fontsize=7)
    axes.imshow(image, aspect="auto")
    axes.set_xticks(range(len(batches)), labels=[str(batch) for batch in batches], fontsize=8)
    axes.set_yticks(range(len(ranks)), labels=[str(count) for count in ranks], fontsize=8)
    axes.set_xlabel("batch", fontsize=9)
    axes.set_ylabel("ranks", fontsize=9)
    axes.tick_params(length=2)


def _colour(one: Choice, colours: dict[str, str]) -> tuple[float, float, float, float]:
    """The winner's, mixed with white where it wins little."""
    if one.dense is None:
        return to_rgba(_NOTHING)
    if one.winner == DENSE:
        return to_rgba(_DENSE)
    strength = 0.25 + 0.75 * min(1.0, (one.speedup - 1) / (_STRONGEST - 1))
    red, green, blue, _ = to_rgba(colours[one.winner])
    return (1 - strength * (1 - red), 1 - strength * (1 - green), 1 - strength * (1 - blue), 1.0)
