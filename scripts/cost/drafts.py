"""Where lossless drafting pays on 2 to 64 GPUs, by the model of costs: a map for each of several acceptances.

    python scripts/cost/drafts.py -o docs/figures/drafts.png      # some minutes

Prints every cell as CSV. A row of maps for each draft, one for each acceptance, and one of the draft alone.
"""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

import surgeon
from scripts.commands import make_parser
from surgeon.findings.drawing import sheet
from surgeon.findings.speeds import drafts_picture
from surgeon.opened import open_model

SHAPES = Path(__file__).resolve().parents[2] / "docs" / "shapes" / "llama-70b-64kv.json"
HARDWARE = "h200-sxm"
DRAFTS = ("ladder-over-lp", "half")  # a variant of the model, and half of its layers
ACCEPTANCES = (0.6, 0.7, 0.8, 0.9, 0.95)
SWEEP = "ranks=2..64,batch=1..64"


def predict(name: str) -> tuple[pd.DataFrame, list[str]]:
    """Predict one draft, in a process of its own: its table, and what was refused."""
    draft = name
    if name == "half":  # without every other layer between the first two and the last two
        layers = open_model(SHAPES, weights=False).num_layers
        draft = " ".join(f"A{k} F{k}" for k in range(layers) if k < 2 or k >= layers - 2 or k % 2)
    found = surgeon.predict(SHAPES, HARDWARE, draft=draft, acceptance=ACCEPTANCES, sweep=SWEEP)
    return found.drafts.assign(draft=name), found.record["refused"]


def main() -> None:
    """Predict, print, draw."""
    parser = make_parser(__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True, help="the picture")
    asked = parser.parse_args()
    with ProcessPoolExecutor(len(DRAFTS)) as pool:
        found = list(pool.map(predict, DRAFTS))
    pd.concat([table for table, _ in found]).to_csv(sys.stdout, index=False)
    for line in dict.fromkeys(line for _, refused in found for line in refused):
        print(f"refused: {line}", file=sys.stderr)
    speeds = {name: table for name, (table, _) in zip(DRAFTS, found, strict=True)}
    title = f"Lossless drafting: {SHAPES.stem} on {HARDWARE}, times dense"
    sheet(drafts_picture(speeds), title).savefig(asked.output)


if __name__ == "__main__":
    main()
