"""Which program is fastest where: as lines of a terminal, as a table for a file, and as a map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.patches import Patch

from surgeon.findings.drawing import COLOURS, NO_CELL, PAPER, Chart, Picture
from surgeon.findings.result import RunResult, TableFile
from surgeon.language.operations.variants import DENSE
from surgeon.words import WIDTH, aligned, hanging, plural

_SPEEDUP = "_speedup"  # what the columns of programs end in
_STRONGEST = 2.0  # times as fast: full colour


@dataclass(frozen=True, repr=False)
class BestPrograms(RunResult):
    """The result of a prediction of the best programs.

    Attributes:
        winners: a row for every link, number of ranks and batch, as in `best.csv`: what wins (nothing where the dense
            model does not fit), and what every program wins there, times the dense one's speed.
        choices: one for each link, number of ranks and batch; of a prediction just made.
    """

    COMMAND = "predict"
    RECORD = "best.json"
    TABLES: ClassVar = {"winners": TableFile("best.csv", ("ranks", "batch", "speedup"), ("link", "winner"))}

    winners: pd.DataFrame
    choices: Sequence[Any] = ()

    def __str__(self) -> str:
        """One table for each link: batches down, ranks across, each with its winner and what it wins."""
        unfit = ""
        if (self.winners["winner"] == "").any():
            unfit = " (-: it does not fit into memory)"
        parts = [hanging("", self.heading), "", f"Fastest, and times as fast as the dense model{unfit}", ""]
        for link, here in self.winners.groupby("link", sort=False):
            cells = here.assign(text=[_words(one) for one in here.itertuples()])
            table = cells.pivot(index="batch", columns="ranks", values="text").fillna("-")
            table = table.reindex(index=here["batch"].unique(), columns=here["ranks"].unique())
            parts += [str(link) or "no link", _across(table), ""]
        if "reaches" in self.record:  # not in older ones
            parts += ["The batches at which a program pays", "", self.record["reaches"]]
        return "\n".join(parts).rstrip()

    @property
    def picture_title(self) -> str:
        return self.heading

    def pictures(self) -> dict[str, Picture]:
        """`best`: a panel for each link, ranks down, batches across, coloured by what wins and how much."""
        names = [str(name).removesuffix(_SPEEDUP) for name in self.winners if str(name).endswith(_SPEEDUP)]
        colours = {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(names)}
        colours |= {DENSE: NO_CELL, "": PAPER}
        panels = [_panel(str(link), own, colours) for link, own in self.winners.groupby("link", sort=False)]
        return {"best": Picture(panels)}


def _across(table: pd.DataFrame) -> str:
    """Batches down and ranks across; where those are too many for a terminal, the other half of them below."""
    lines = [["batch", *(plural(int(ranks), "rank") for ranks in table.columns.to_numpy())]]
    lines += [[str(batch), *texts] for batch, texts in zip(table.index, table.to_numpy(), strict=True)]
    text = aligned(lines)
    count = table.shape[1]
    if count == 1 or max(map(len, text.splitlines())) <= WIDTH:
        return text
    return "\n\n".join(map(_across, (table.iloc[:, : count // 2], table.iloc[:, count // 2 :])))


def _words(one: Any) -> str:
    return {"": "-", DENSE: DENSE}.get(one.winner) or f"{one.winner} {one.speedup:.2f}"


def _panel(link: str, found: pd.DataFrame, colours: dict[str, str]) -> Chart:
    ranks = list(found["ranks"].unique())
    batches = list(found["batch"].unique())

    def draw(axes: Axes) -> None:
        image = np.ones((len(ranks), len(batches), 4))
        for one in found.itertuples():
            row = ranks.index(one.ranks)
            column = batches.index(one.batch)
            image[row, column] = _colour(one, colours)
            if one.winner:
                axes.text(column, row, f"{one.speedup:.2f}", ha="center", va="center", fontsize=8)
        axes.imshow(image, aspect="auto")
        axes.set_xticks(range(len(batches)), labels=[str(batch) for batch in batches])
        axes.set_yticks(range(len(ranks)), labels=[str(count) for count in ranks])
        axes.grid(visible=False)
        handles = []
        for name in [name for name in colours if name in set(found["winner"])]:
            words = {DENSE: "nothing pays", "": "does not fit"}.get(name, name)
            handles.append(Patch(facecolor=colours[name], edgecolor="#888888", label=words))
        axes.legend(
            handles=handles, fontsize=9, frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.13)
        )

    return Chart(link or "one rank", draw, "batch", "ranks", height=110.0 + 30.0 * len(ranks))


def _colour(one: Any, colours: dict[str, str]) -> tuple[float, float, float, float]:
    """The winner's, mixed with white where it wins little."""
    red, green, blue, _ = to_rgba(colours[one.winner])
    if one.winner in ("", DENSE):
        return red, green, blue, 1.0
    strength = 0.25 + 0.75 * min(1.0, (one.speedup - 1) / (_STRONGEST - 1))
    return 1 - strength * (1 - red), 1 - strength * (1 - green), 1 - strength * (1 - blue), 1.0
