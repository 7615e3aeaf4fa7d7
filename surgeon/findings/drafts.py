"""Where lossless drafting pays by the model of costs, as a table for a terminal and as a map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import pandas as pd
from matplotlib.axes import Axes

from surgeon.findings.drawing import Chart, Picture
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

    @property
    def picture_title(self) -> str:
        return self.heading

    def pictures(self) -> dict[str, Picture]:
        """`drafts`: a map for each acceptance, and one of the draft alone; none where all was refused."""
        if self.speeds.empty:
            return {}
        return {"drafts": drafts_picture({"": self.speeds})}


def drafts_picture(found: dict[str, pd.DataFrame]) -> Picture:
    """Maps of each draft by its name: ranks down, batches across, of the first prompt and number of tokens."""
    panels = []
    for name, speeds in found.items():
        drawn = speeds[(speeds[["prompt", "new"]] == speeds[["prompt", "new"]].iloc[0]).all(axis="columns")]
        for chance, cells in drawn.groupby("acceptance"):
            panels.append(_panel(f"{name} {chance:g} accepted".strip(), cells, "speedup", ahead=True))
        alone = drawn.drop_duplicates(["ranks", "batch"])
        panels.append(_panel(f"{name} alone (lossy)".strip(), alone, "alone_speedup", ahead=False))
    caption = (
        "How many times as fast texts are as without drafts, and below it how many tokens are drafted. The draft alone "
        "is lossy. Cells that were refused stay empty."
    )
    return Picture(panels, caption)


def _panel(title: str, cells: pd.DataFrame, column: str, ahead: bool) -> Chart:
    wide = cells.pivot(index="ranks", columns="batch", values=column)

    def draw(axes: Axes) -> None:
        axes.imshow(wide.to_numpy(), cmap="YlGnBu", vmin=1.0, vmax=_DARKEST, aspect="auto")
        axes.set_xticks(range(wide.shape[1]), labels=[f"{value:g}" for value in wide.columns])
        axes.set_yticks(range(wide.shape[0]), labels=[f"{value:g}" for value in wide.index])
        axes.grid(visible=False)
        for _, cell in cells.iterrows():
            text = f"{cell[column]:.2f}"
            if ahead and not cell["ahead"]:
                text = "off"
            elif ahead:
                text += f"\n+{cell['ahead']:.0f}"
            colour = "#333333"
            if cell[column] > (1 + 2 * _DARKEST) / 3:
                colour = "white"
            x = list(wide.columns).index(cell["batch"])
            y = list(wide.index).index(cell["ranks"])
            axes.text(x, y, text, ha="center", va="center", fontsize=7, color=colour)

    return Chart(title, draw, "batch", "ranks", height=60.0 + 34.0 * len(wide))
