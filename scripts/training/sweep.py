"""Train several models from scratch, by programs, learning rates and seeds, and compare their held-out losses.

    python scripts/training/sweep.py CONFIG.yaml -o FOLDER [--steps N]

CONFIG is a configuration of `surgeon train` (see recipes/train/sweeps/) with one more key:

    sweep:
      programs:                # each has operations, a program or tracks, and racks
        dense: {}
        ladder: {operations: [ladder: {layers: "0:8"}]}
      seeds: [0, 1, 2]         # those of training where this is missing, and so for the rate
      learning_rates: [1.0e-3, 2.0e-3]

Each model is a checkpoint FOLDER/PROGRAM-lrRATE-seedSEED with its run beside it. One that is there is not trained
again, and one that was killed goes on. A loss that is not finite ends its model, not the others. FOLDER/sweep.csv has a
row for each model; the table that is printed has means over seeds, with 95% intervals (Student's t) of the loss and of
its difference from the first program, seed by seed at the same rate.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # surgeon need not be installed

import surgeon
from scripts.commands import make_parser
from surgeon.errors import Diverged
from surgeon.quality.summary import known_interval
from surgeon.training.checkpoints import HELD_OUT_FILE
from surgeon.training.run import run_folder


def configurations(path: Path) -> Iterator[tuple[str, float, int, dict[str, Any]]]:
    """Read the models of a sweep: program, learning rate, seed, and the keys that `surgeon.train` takes."""
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    sweep = document.pop("sweep")
    training = document.pop("training")
    rates = sweep.get("learning_rates", [training.get("learning_rate")])
    seeds = sweep.get("seeds", [training.get("seed", 0)])
    for (program, keys), rate, seed in product(sweep["programs"].items(), rates, seeds):
        yield (
            program,
            rate,
            seed,
            {**document, **keys, "training": {**training, "learning_rate": rate, "seed": seed}},
        )


def train(folder: Path, keys: dict[str, Any], steps: int | None) -> float:
    """Train a model, unless it is there; its held-out loss in nats per token, infinite if it diverged."""
    if not (folder / "config.json").is_file():
        try:
            surgeon.train(keys, folder, steps=steps)
        except Diverged as error:
            print(f"{folder.name}: {error}", file=sys.stderr)
            return math.inf
    held_out = pd.read_csv(run_folder(folder) / HELD_OUT_FILE)
    return math.log(held_out["perplexity"].iloc[-1])


def summarise(runs: pd.DataFrame) -> list[str]:
    """Write a line of a table for each program and rate."""
    first = runs["program"].iloc[0]
    lines = ["| program | rate | seeds | loss | minus the first program's |", "|:--|--:|--:|--:|--:|"]
    for (program, rate), same in runs.groupby(["program", "learning_rate"], sort=False):
        losses = same.set_index("seed")["loss"]
        reference = runs[(runs["program"] == first) & (runs["learning_rate"] == rate)].set_index("seed")[
            "loss"
        ]
        difference = (
            "" if program == first else in_words((losses - reference).dropna().to_numpy(), "+.4f")
        )
        lines.append(
            f"| {program} | {rate:g} | {len(losses)} | {in_words(losses.to_numpy(), '.4f')} | {difference} |"
        )
    return lines


def in_words(values: np.ndarray[Any, np.dtype[np.float64]], how: str) -> str:
    """Write a mean, and its interval if there is one."""
    if not len(values):
        return ""
    low, high = known_interval(values)
    shown = f" ({low:{how}} to {high:{how}})" if np.isfinite(low) else ""
    return f"{values.mean():{how}}{shown}"


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("config", type=Path, metavar="CONFIG.yaml")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--steps", type=int, help="in place of the configuration's")
    options = parser.parse_args(arguments)
    rows = []
    for program, rate, seed, keys in configurations(options.config):
        folder = options.output / f"{program}-lr{rate:g}-seed{seed}"
        loss = train(folder, keys, options.steps)
        rows.append({"program": program, "learning_rate": rate, "seed": seed, "loss": loss})
    runs = pd.DataFrame(rows)
    runs.to_csv(options.output / "sweep.csv", index=False)
    print("\n".join(summarise(runs)))


if __name__ == "__main__":
    main()
