"""Where lossless drafting pays on 2 to 64 GPUs, by the model of costs: a map for each of several acceptances.

    python scripts/cost/drafts.py -o docs/figures/drafts.png      # about a minute

Prints every cell as CSV. A panel of each draft and acceptance: ranks down, batches across, coloured by how many times
as fast as without drafts, with the number of tokens ahead below. The last column has the draft alone, which is lossy.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from surgeon.library.predict import DraftPredictions, predict_drafts
from surgeon.opened import open_model

ACCEPTANCES = (0.6, 0.7, 0.8, 0.9, 0.95)
SWEEP = {"ranks": [2, 4, 8, 16, 32, 64], "batch": [1, 4, 16, 64]}
HALF = "half"
MOST = 2.0  # times as fast: the darkest colour


def half(layers: int) -> str:
    """A program without every other layer between the first two and the last two."""
    return " ".join(f"A{one} F{one}" for one in range(layers) if one < 2 or one >= layers - 2 or one % 2)


def predictions(
    shapes: str, hardware: str, drafts: list[str], sweep: dict[str, list[int]]
) -> dict[str, DraftPredictions]:
    """Of each draft: a variant by name, or `half`."""
    layers = open_model(shapes, weights=False).num_layers
    programs = {name: half(layers) if name == HALF else name for name in drafts}
    asked = partial(predict_drafts, shapes, hardware, acceptance=ACCEPTANCES, sweep=sweep)
    with ProcessPoolExecutor(len(programs)) as pool:
        return dict(zip(programs, pool.map(asked, programs.values()), strict=True))


def draw(path: Path, found: dict[str, DraftPredictions], title: str) -> None:
    """A row of panels for each draft."""
    rows, columns = len(found), len(ACCEPTANCES) + 1
    figure = Figure(figsize=(2.5 * columns, 0.7 + 2.6 * rows), layout="constrained", dpi=130)
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for row, (name, predicted) in zip(panels, found.items(), strict=True):
        for panel, acceptance in zip(row, ACCEPTANCES, strict=False):
            cells = predicted.speeds[predicted.speeds["acceptance"] == acceptance]
            fill(panel, cells, "speedup", "ahead")
            panel.set_title(f"{name}, {acceptance:g} accepted", fontsize=9)
        cells = predicted.speeds[predicted.speeds["acceptance"] == ACCEPTANCES[0]]
        fill(row[-1], cells, "alone_speedup")
        row[-1].set_title(f"{name} alone (lossy)", fontsize=9)
        row[0].set_ylabel("ranks", fontsize=9)
    for panel in panels[-1]:
        panel.set_xlabel("batch", fontsize=9)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path)


def fill(axes: Axes, cells: pd.DataFrame, speedup: str, ahead: str | None = None) -> None:
    """One panel; cells that were refused stay empty."""
    wide = cells.pivot_table(index="ranks", columns="batch", values=speedup)
    axes.imshow(wide.to_numpy(), cmap="YlGnBu", vmin=1.0, vmax=MOST, aspect="auto")
    ranks, batches = list(wide.index), list(wide.columns)
    axes.set_xticks(range(len(batches)), labels=list(map(str, batches)), fontsize=8)
    axes.set_yticks(range(len(ranks)), labels=list(map(str, ranks)), fontsize=8)
    axes.tick_params(length=0)
    for _, cell in cells.iterrows():
        text = f"{cell[speedup]:.2f}" if ahead is None or cell[ahead] else "off"
        text += f"\n+{cell[ahead]:.0f}" if ahead is not None and cell[ahead] else ""
        colour = "white" if cell[speedup] > (1 + 2 * MOST) / 3 else "#333333"
        place = batches.index(cell["batch"]), ranks.index(cell["ranks"])
        axes.text(*place, text, ha="center", va="center", fontsize=7, color=colour)


def main() -> None:
    """Predict, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="docs/shapes/llama-70b-64kv.json")
    parser.add_argument("--hardware", default="h100-sxm")
    parser.add_argument("--drafts", default="ladder-over-lp,half", help="variants of the model, or half of its layers")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the picture")
    asked = parser.parse_args()
    found = predictions(asked.shapes, asked.hardware, asked.drafts.split(","), SWEEP)
    pd.concat([one.speeds.assign(draft=name) for name, one in found.items()]).to_csv(sys.stdout, index=False)
    for line in dict.fromkeys(line for one in found.values() for line in one.refused):
        print(f"refused: {line}", file=sys.stderr)
    draw(
        asked.output,
        found,
        f"Lossless drafting: {Path(asked.shapes).stem} on {asked.hardware}, times dense, tokens ahead",
    )


if __name__ == "__main__":
    main()
