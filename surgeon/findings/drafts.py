"""Where lossless drafting pays by the model of costs, as a table for a terminal and as a map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from surgeon.findings.result import RunResult, TableFile
from surgeon.words import aligned, hanging, three_digits

DRAFT_COLUMNS = (
    *("ranks", "batch", "prompt", "new", "acceptance", "ahead", "draft_ms", "verify_ms", "per_token_ms"),
    *("dense", "drafted", "alone", "speedup", "alone_speedup"),
)
_DARKEST = 2.0  # times as fast


@dataclass(frozen=True, repr=False)
class DraftRun(RunResult):
    """The result of a prediction of drafts.

    Attributes:
        speeds: one row per ranks, load and acceptance, as in `drafts.csv`: times in ms, tokens per second without
            drafts (`dense`), with them (`drafted`) and of the draft alone (`alone`), and how often the first is in the
            others.
    """

    COMMAND = "predict"
    RECORD = "drafts.json"
    TABLES: ClassVar = {"speeds": TableFile("drafts.csv", DRAFT_COLUMNS, may_be_empty=True)}

    speeds: pd.DataFrame

    @property
    def refused(self) -> Sequence[str]:
        """Why there are none for some ranks or loads."""
        return [str(reason) for reason in self.record["refused"]]

    def __str__(self) -> str:
        """A table of at most 80 columns, and below it what was refused."""
        lines = [["ranks", "batch", "accepted", "ahead", "draft", "verify", "tokens/s", "dense", "times", "alone"]]
        lines.append(["", "", "", "", "ms", "ms", "", "", "", "times"])
        for _, row in self.speeds.iterrows():
            begin = [f"{row[name]:g}" for name in ("ranks", "batch", "acceptance", "ahead")]
            spent = [three_digits(row[name]) for name in ("draft_ms", "verify_ms", "drafted", "dense")]
            speedups = [f"{row[name]:.2f}" for name in ("speedup", "alone_speedup")]
            lines.append([*begin, *spent, *speedups])
        refused = [hanging("refused: ", reason) for reason in self.refused]
        return "\n".join([hanging("", self.heading), "", aligned(lines, ()), *refused])

    def pictures(self) -> dict[str, Figure]:
        """`drafts`: a map for each acceptance, and one of the draft alone; none where all was refused."""
        return {} if self.speeds.empty else {"drafts": draw_drafts({"drafts": self.speeds}, self.heading)}


def draw_drafts(found: dict[str, pd.DataFrame], title: str) -> Figure:
    """A row of maps for each draft, by its name: ranks down, batches across, of the first prompt and number of tokens.

    A cell has how many times as fast texts are as without drafts, and below it how many tokens are drafted. The last
    map is of the draft alone, which is lossy. Cells that were refused stay empty.
    """
    chances = sorted({chance for speeds in found.values() for chance in speeds["acceptance"]})
    axes = {name: sorted({value for speeds in found.values() for value in speeds[name]}) for name in ("ranks", "batch")}
    width, height = 0.7 + 0.36 * len(axes["batch"]), 0.7 + 0.31 * len(axes["ranks"])
    size = (0.4 + max(2.1, width) * (len(chances) + 1), 0.5 + height * len(found))
    figure = Figure(figsize=size, layout="constrained", dpi=150)
    rows = figure.subplots(len(found), len(chances) + 1, squeeze=False, sharex=True, sharey=True)
    for row, (name, speeds) in zip(rows, found.items(), strict=True):
        drawn = speeds[(speeds[["prompt", "new"]] == speeds[["prompt", "new"]].iloc[0]).all(axis="columns")]
        for panel, chance in zip(row, chances, strict=False):
            _fill(panel, drawn[drawn["acceptance"] == chance], axes, "speedup", ahead=True)
            panel.set_title(f"{name}, {chance:g} accepted", fontsize=9)
        _fill(row[-1], drawn.drop_duplicates(["ranks", "batch"]), axes, "alone_speedup")
        row[-1].set_title(f"{name} alone (lossy)", fontsize=9)
        row[0].set_ylabel("ranks", fontsize=9)
    for panel in rows[-1]:
        panel.set_xlabel("batch", fontsize=9)
    figure.suptitle(title, fontsize=11)
    return figure


def _fill(panel: Axes, cells: pd.DataFrame, axes: dict[str, list[int]], column: str, ahead: bool = False) -> None:
    wide = cells.pivot(index="ranks", columns="batch", values=column).reindex(
        index=axes["ranks"], columns=axes["batch"]
    )
    panel.imshow(wide.to_numpy(), cmap="YlGnBu", vmin=1.0, vmax=_DARKEST, aspect="auto")
    panel.set_xticks(range(len(axes["batch"])), labels=[f"{value:g}" for value in axes["batch"]], fontsize=8)
    panel.set_yticks(range(len(axes["ranks"])), labels=[f"{value:g}" for value in axes["ranks"]], fontsize=8)
    panel.tick_params(length=0)
    for _, cell in cells.iterrows():
        text = "off" if ahead and not cell["ahead"] else f"{cell[column]:.2f}"
        text += f"\n+{cell['ahead']:.0f}" if ahead and cell["ahead"] else ""
        colour = "white" if cell[column] > (1 + 2 * _DARKEST) / 3 else "#333333"
        place = axes["batch"].index(cell["batch"]), axes["ranks"].index(cell["ranks"])
        panel.text(*place, text, ha="center", va="center", fontsize=6.5, color=colour)
