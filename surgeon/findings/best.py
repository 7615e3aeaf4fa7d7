"""Which program is fastest where: as lines of a terminal, as a table for a file, and as a map."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from surgeon.findings.result import RunResult, TableFile
from surgeon.language.operations.variants import DENSE
from surgeon.words import WIDTH, aligned, hanging, plural

_SPEEDUP = "_speedup"  # what the columns of programs end in
_NOTHING, _DENSE = "#ffffff", "#d5dadf"
_PROGRAMS = ("#33638d", "#f0a04b", "#4aa36c", "#c8553d", "#7b5ea7", "#c9a227", "#2aa1b3", "#8a6d5b")
_STRONGEST = 2.0  # times as fast: full colour
_MOST_COLUMNS = 3


@dataclass(frozen=True, repr=False)
class BestRun(RunResult):
    """The result of a prediction of the best programs.

    Attributes:
        winners: a row for every link, number of ranks and batch, as in `best.csv`: what wins (nothing where the dense
            model does not fit), and what every program wins there, times the dense one's speed.
    """

    COMMAND = "predict"
    RECORD = "best.json"
    TABLES: ClassVar = {"winners": TableFile("best.csv", ("ranks", "batch", "speedup"), ("link", "winner"))}

    winners: pd.DataFrame

    def __str__(self) -> str:
        """One table for each link: batches down, ranks across, each with its winner and what it wins."""
        unfit = " (-: it does not fit into memory)" if (self.winners["winner"] == "").any() else ""
        parts = [hanging("", self.heading), "", f"Fastest, and times as fast as the dense model{unfit}", ""]
        for link, here in self.winners.groupby("link", sort=False):
            cells = here.assign(text=[_words(one) for one in here.itertuples()])
            table = cells.pivot(index="batch", columns="ranks", values="text").fillna("-")
            table = table.reindex(index=here["batch"].unique(), columns=here["ranks"].unique())
            parts += [str(link) or "no link", _across(table), ""]
        return "\n".join(parts).rstrip()

    def pictures(self) -> dict[str, Figure]:
        """`best`: a panel for each link, ranks down, batches across, coloured by what wins and how much."""
        found = self.winners
        links = list(found["link"].unique())
        names = [str(name).removesuffix(_SPEEDUP) for name in found if str(name).endswith(_SPEEDUP)]
        colours = {name: _PROGRAMS[place % len(_PROGRAMS)] for place, name in enumerate(names)}
        columns = min(_MOST_COLUMNS, len(links))
        rows = -(-len(links) // columns)
        batches, heights = found["batch"].nunique(), found["ranks"].nunique()
        size = (max(7.0, 1.2 + columns * (0.6 + 0.62 * batches)), 1.3 + rows * (0.7 + 0.42 * heights))
        figure = Figure(figsize=size, layout="constrained", dpi=160)
        panels = list(np.atleast_1d(figure.subplots(rows, columns, squeeze=False)).flat)
        for panel, link in zip(panels, links, strict=False):
            _draw(panel, found[found["link"] == link], colours)
            panel.set_title(link or "one rank", fontsize=10)
        for panel in panels[len(links) :]:
            panel.set_axis_off()
        won = set(found["winner"])
        handles = [Patch(color=colours[name], label=name) for name in names if name in won]
        handles += [Patch(facecolor=_DENSE, label="nothing pays")] if DENSE in won else []
        handles += [Patch(facecolor=_NOTHING, edgecolor="#888888", label="does not fit")] if "" in won else []
        ncols = min(5, len(handles))
        figure.legend(handles=handles, loc="outside lower center", ncols=ncols, fontsize=8, frameon=False)
        figure.suptitle(self.heading, fontsize=10, wrap=True)
        return {"best": figure}


def _across(table: pd.DataFrame) -> str:
    """Batches down and ranks across; where those are too many for a terminal, the other half of them below."""
    lines = [["batch", *(plural(int(ranks), "rank") for ranks in table.columns.to_numpy())]]
    lines += [[str(batch), *texts] for batch, texts in zip(table.index, table.to_numpy(), strict=True)]
    text, count = aligned(lines), table.shape[1]
    if count == 1 or max(map(len, text.splitlines())) <= WIDTH:
        return text
    return "\n\n".join(map(_across, (table.iloc[:, : count // 2], table.iloc[:, count // 2 :])))


def _words(one: Any) -> str:
    return {"": "-", DENSE: DENSE}.get(one.winner) or f"{one.winner} {one.speedup:.2f}"


def _draw(axes: Axes, found: pd.DataFrame, colours: dict[str, str]) -> None:
    ranks, batches = list(found["ranks"].unique()), list(found["batch"].unique())
    image = np.ones((len(ranks), len(batches), 4))
    for one in found.itertuples():
        row, column = ranks.index(one.ranks), batches.index(one.batch)
        image[row, column] = _colour(one, colours)
        if one.winner:
            axes.text(column, row, f"{one.speedup:.2f}", ha="center", va="center", fontsize=7)
    axes.imshow(image, aspect="auto")
    axes.set_xticks(range(len(batches)), labels=[str(batch) for batch in batches], fontsize=8)
    axes.set_yticks(range(len(ranks)), labels=[str(count) for count in ranks], fontsize=8)
    axes.set_xlabel("batch", fontsize=9)
    axes.set_ylabel("ranks", fontsize=9)
    axes.tick_params(length=2)


def _colour(one: Any, colours: dict[str, str]) -> tuple[float, float, float, float]:
    """The winner's, mixed with white where it wins little."""
    if one.winner in ("", DENSE):
        return to_rgba(_DENSE if one.winner else _NOTHING)
    strength = 0.25 + 0.75 * min(1.0, (one.speedup - 1) / (_STRONGEST - 1))
    red, green, blue, _ = to_rgba(colours[one.winner])
    return (1 - strength * (1 - red), 1 - strength * (1 - green), 1 - strength * (1 - blue), 1.0)
