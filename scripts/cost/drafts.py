"""Where lossless drafting pays on 2 to 64 GPUs, by the model of costs: a map for each of several acceptances.

    python scripts/cost/drafts.py -o docs/figures/drafts.png      # some minutes

Prints every cell as CSV. A row of maps for each draft, one for each acceptance, and one of the draft alone.
"""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

import surgeon
from scripts.commands import make_parser
from surgeon.findings.drawing import sheet
from surgeon.findings.prediction import drafts_picture
from surgeon.opened import open_model

SHAPES = Path(__file__).resolve().parents[2] / "docs" / "shapes"
ACCEPTANCES = (0.6, 0.7, 0.8, 0.9, 0.95)
SWEEP = "ranks=2..64,batch=1..64"
HALF = "half"


def half(layers: int) -> str:
    """A program without every other layer between the first two and the last two."""
    return " ".join(f"A{one} F{one}" for one in range(layers) if one < 2 or one >= layers - 2 or one % 2)


def predict(shapes: str, hardware: str, draft: str) -> tuple[pd.DataFrame, list[str]]:
    """Predict one draft, in a process of its own: its table, and what was refused."""
    found = surgeon.predict(shapes, hardware, draft=draft, acceptance=ACCEPTANCES, sweep=SWEEP)
    return found.drafts, found.record["refused"]


def main() -> None:
    """Predict, print, draw."""
    parser = make_parser(__doc__)
    parser.add_argument("--shapes", default=str(SHAPES / "llama-70b-64kv.json"))
    parser.add_argument("--hardware", default="h200-sxm")
    parser.add_argument(
        "--drafts", default="ladder-over-lp,half", help="variants of the model, or half of its layers"
    )
    parser.add_argument("-o", "--output", type=Path, required=True, help="the picture")
    asked = parser.parse_args()
    layers = open_model(asked.shapes, weights=False).num_layers
    names = asked.drafts.split(",")
    predicted = partial(predict, asked.shapes, asked.hardware)
    with ProcessPoolExecutor(len(names)) as pool:
        results = pool.map(predicted, [half(layers) if name == HALF else name for name in names])
        found = dict(zip(names, results, strict=True))
    speeds = {name: table for name, (table, _) in found.items()}
    pd.concat([table.assign(draft=name) for name, table in speeds.items()]).to_csv(
        sys.stdout, index=False
    )
    for line in dict.fromkeys(line for _, refused in found.values() for line in refused):
        print(f"refused: {line}", file=sys.stderr)
    title = f"Lossless drafting: {Path(asked.shapes).stem} on {asked.hardware}, times dense"
    sheet(drafts_picture(speeds), title).savefig(asked.output)


if __name__ == "__main__":
    main()
