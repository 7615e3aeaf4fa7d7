"""What training brings back of what edits of the demo model lose: adapters, full training, distillation, equal tokens.

    python scripts/bench/heal.py -o FOLDER [--rows lp-12,ladder-upper,...] [--methods lora,full,distilled] [--steps N]
                                 [--minutes M] [--rates METHOD=X,...] [--table]

Every row is an edit, every run of it trains the sublayers that the edit touched, on windows of the demo model's own
training text, and is measured on text that the model never saw. `lora` trains adapters of rank 16, `full` the
sublayers' own weights, both on the text; `distilled` trains the same weights as `full`, towards the original's
predictions. All see the same tokens in the same order. `control` trains the *unedited* model like `full`, all of it:
what it gains is what the text is worth, not healing.

The stretches of pairs and the layers left out are those with the least divergence on training text, of their length.
Killed, the same command goes on where it was. --minutes is a limit for each row: when it is reached, no further run of
it begins. FOLDER/ROW/METHOD.run is a folder that `surgeon report` takes. --table prints the tables of what is
there.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from scripts.commands import add_defaults, make_parser
from scripts.markdown import format_table
from surgeon.checkpoint.config import locate
from surgeon.checkpoint.stored import Checkpoint
from surgeon.checkpoint.tensor_file import read_json
from surgeon.checkpoint.texts import open_tokenizer
from surgeon.language.program import Program
from surgeon.language.recipe import Recipe, parse_recipe
from surgeon.models.edit import edit, recipe_program
from surgeon.opened import load, provenance
from surgeon.processes.files import write_table
from surgeon.quality.data import load_windows
from surgeon.quality.head import HeldOutQuality
from surgeon.quality.sources import DEMO, DEMO_TRAINING
from surgeon.quality.summary import Values, interval
from surgeon.training.run import finish_run, train
from surgeon.training.settings import Distillation, TrainSettings
from surgeon.training.texts import load_texts

LAYERS = 16
ALL_TEXT = 1_000_000  # tokens: more than a run goes through
RATES = {"lora": 1e-3, "full": 1e-4, "distilled": 3e-4, "control": 1e-4}  # the best on lp-9 of several
RANK = 16
CHOSEN_ON = 4096  # tokens of training text that stretches are chosen by
MEASUREMENTS = 3  # on held-out text, while a run goes on


def recipe_of(operations: str) -> Recipe:
    """A recipe for the demo model."""
    return parse_recipe(f"surgeon: 1\nmodel: demo\noperations: [{operations}]\n")


def lp(pairs: int) -> list[Recipe]:
    """Every stretch of so many pairs."""
    return [
        recipe_of(f'{{pair: {{layers: "{first}:{first + 2 * pairs}"}}}}')
        for first in range(LAYERS - 2 * pairs + 1)
    ]


ROWS: dict[str, list[Recipe]] = {
    "lp-12": lp(4),
    "lp-10": lp(6),
    "lp-9": lp(7),
    "ladder-upper": [recipe_of('{ladder: {layers: "8:16"}}')],
    "ladder-10": [recipe_of('{ladder: {layers: "6:16"}}')],
    "lowrank-0.6": [recipe_of('{lowrank: {layers: "0:16", keep: 0.6, method: plain}}')],
    **{
        f"tracks-{depth}": [recipe_of(f'{{tracks: {{layers: "0:16", count: 2, depth: {depth}}}}}')]
        for depth in (1, 2, 4)
    },
    "prune-3": [
        recipe_of(f'{{prune: {{layers: "{first}:{first + 3}"}}}}') for first in range(LAYERS - 2)
    ],
}
CONTROL = "control"
RECORD = "run.json"
WINDOWS = "windows.csv"
DRAWN = 4000  # samples of windows for the intervals of shares
COLUMNS = [
    "edit",
    "method",
    "rate",
    "tokens",
    "perplexity",
    "95%",
    "regained",
    "divergence",
    "95%",
    "regained",
    "minutes",
]


class Bench:
    """The demo model, its text, and where results go."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        checkpoint = Checkpoint(locate(DEMO))
        self.model_hash = checkpoint.model_hash()
        self.original = load(checkpoint.folder, dtype=torch.float32)
        self.tokenizer = open_tokenizer(checkpoint.folder)
        self.texts = load_texts(
            self.tokenizer, DEMO_TRAINING, arguments.window, ALL_TEXT, DEMO, arguments.eval_tokens
        )
        self.held_out = HeldOutQuality(self.texts.held_out, self.original)

    def recipe(self, row: str) -> Recipe:
        """Of a row's edits the one with the least divergence on training text."""
        recipes = ROWS[row]
        if len(recipes) == 1:
            return recipes[0]
        windows = load_windows(self.tokenizer, DEMO_TRAINING, self.arguments.window, CHOSEN_ON)
        seen = HeldOutQuality(windows, self.original)
        edited = copy.deepcopy(self.original)
        damage = [
            seen.measure(edit(edited, recipe_program(recipe, self.original.config))).divergence
            for recipe in recipes
        ]
        return recipes[damage.index(min(damage))]

    def settings(self, method: str, rate: float) -> TrainSettings:
        """What a run does."""
        steps = self.arguments.steps
        pause = max(1, steps // MEASUREMENTS)
        own: dict[str, dict[str, Any]] = {
            "lora": {"lora": RANK},
            "distilled": {"distillation": Distillation()},
            CONTROL: {"scope": "all"},
        }
        return TrainSettings(
            **{"scope": "edited"} | own.get(method, {}),
            steps=steps,
            batch=self.arguments.batch,
            learning_rate=rate,
            warmup=max(1, steps // 20),
            evaluate_every=pause,
            save_every=pause,
        )

    def run(self, folder: Path, recipe: Recipe | None, rate: float) -> None:
        """Train, and write what came of it."""
        row = folder.parent.name
        method = folder.stem
        program = Program.dense(LAYERS)
        if recipe is not None:
            program = recipe_program(recipe, self.original.config)
        settings = self.settings(method, rate)
        student = edit(copy.deepcopy(self.original), program)
        values = {"original": self.held_out.values(self.original)}
        values["edited"] = self.held_out.values(student)
        identity = {"original": self.model_hash, "program": str(program), "row": row, "method": method}
        healed = train(
            student,
            self.texts,
            settings,
            folder,
            lambda: copy.deepcopy(self.original),
            program,
            identity,
        )
        assert healed is not None
        assert healed.original is not None
        values["healed"] = self.held_out.values(healed.model)
        table = {
            f"{state}_{name}": found[name]
            for state, found in values.items()
            for name in ("nll", "divergence")
        }
        write_table(folder / WINDOWS, pd.DataFrame(table))
        record = provenance(
            DEMO,
            self.model_hash,
            program=str(program),
            recipe=None if recipe is None else recipe.to_yaml(),
            row=row,
            method=method,
            data=self.texts.training.source,
            data_hash=self.texts.training.digest,
            held_out=self.texts.held_out.source,
            held_out_hash=self.texts.held_out.digest,
            settings=settings.to_json(),
            steps=healed.steps,
            tokens=healed.tokens,
            seconds=healed.seconds,
            original=healed.original.to_json(),
            edited=healed.before.to_json(),
            healed=healed.after.to_json(),
        )
        finish_run(folder, record)


def measure(bench: Bench, row: str, methods: Sequence[str], rates: dict[str, float]) -> None:
    """All runs of a row that are not there yet."""
    arguments = bench.arguments
    began = time.monotonic()
    recipe = None if row == CONTROL else bench.recipe(row)
    for method in [CONTROL] if recipe is None else methods:
        folder = arguments.output / row / f"{method}.run"
        if is_whole(folder):
            continue
        if time.monotonic() - began > 60 * arguments.minutes:
            print(f"{row}: {arguments.minutes:g} minutes are over; {method} is left out", flush=True)
            continue
        bench.run(folder, recipe, rates[method])


def is_whole(folder: Path) -> bool:
    """Whether the run in a folder has ended."""
    record = folder / RECORD
    return record.is_file() and "healed" in read_json(record)


@dataclass(frozen=True)
class Healed:
    """A run that has ended.

    Attributes:
        windows: what windows.csv has.
    """

    record: dict[str, Any]
    windows: pd.DataFrame

    @property
    def row(self) -> str:
        return str(self.record["row"])

    @property
    def method(self) -> str:
        return str(self.record["method"])

    def share(self, of: str) -> str:
        """The part of the loss that is regained, with its 95% interval over windows (bootstrap)."""
        if self.record["recipe"] is None:
            return ""
        edited = self.windows[f"edited_{of}"].to_numpy()
        regained = edited - self.windows[f"healed_{of}"].to_numpy()
        lost = edited - self.windows[f"original_{of}"].to_numpy()
        drawn = np.random.default_rng(0).integers(0, len(edited), (DRAWN, len(edited)))
        low, high = np.quantile(regained[drawn].mean(1) / lost[drawn].mean(1), (0.025, 0.975))
        return f"{regained.mean() / lost.mean():.0%} ({low:.0%} to {high:.0%})"

    def numbers(self, state: str) -> list[str]:
        """The cells of a state, edited or healed."""
        nll = self.windows[f"{state}_nll"].to_numpy()
        divergence = self.windows[f"{state}_divergence"].to_numpy()
        shares = {"nll": "", "divergence": ""}
        if state == "healed":
            shares = {of: self.share(of) for of in shares}
        least, most = map(math.exp, interval(nll))
        low, high = interval(divergence)
        perplexities = [f"{math.exp(nll.mean()):.3f}", f"{least:.2f} to {most:.2f}", shares["nll"]]
        ends = f"{low:.4f} to {high:.4f}"
        return [*perplexities, f"{divergence.mean():.4f}", ends, shares["divergence"]]


def show_tables(folder: Path) -> None:
    """Print all that is there as markdown, in the order in which it was made."""
    whole = [path for path in folder.glob(f"*/*.run/{RECORD}") if is_whole(path.parent)]
    runs = [
        Healed(read_json(path), pd.read_csv(path.with_name(WINDOWS)))
        for path in sorted(whole, key=lambda path: path.stat().st_mtime)
    ]
    if not runs:
        return
    rows = []
    for row in dict.fromkeys(one.row for one in runs):
        of_row = [one for one in runs if one.row == row]
        recipe = of_row[0].record["recipe"] or "operations: unedited"
        edited = f"{row}: " + recipe.partition("operations:")[2].strip(" -\n")
        original = f"as edited (original {math.exp(of_row[0].windows['original_nll'].mean()):.3f})"
        rows.append([edited, original, "", "", *of_row[0].numbers("edited"), ""])
        for one in of_row:
            record = one.record
            start = ["", one.method, f"{record['settings']['learning_rate']:g}", f"{record['tokens']:,}"]
            rows.append([*start, *one.numbers("healed"), f"{record['seconds'] / 60:.1f}"])
    print("\n".join(format_table(COLUMNS, rows, left=(0, 1))))
    print("\n" + "\n".join(_sentences(runs)))


def _sentences(runs: list[Healed]) -> Iterator[str]:
    """Differences over the same windows: the rest of the loss, and distillation less plain training."""
    by_name = {(one.row, one.method): one.windows for one in runs}
    for one in runs:
        windows = one.windows
        if one.record["recipe"] is not None:
            rest = _difference(windows["healed_nll"], windows["original_nll"])
            yield f"- {one.row}, {one.method}: log-perplexity less the original's: {rest}"
        plain = by_name.get((one.row, "full"))
        if one.method == "distilled" and plain is not None:
            nll, divergence = (
                _difference(windows[name], plain[name]) for name in ("healed_nll", "healed_divergence")
            )
            yield f"- {one.row}, distilled less full: log-perplexity {nll}, divergence {divergence}"


def _difference(one: pd.Series[float], other: pd.Series[float]) -> str:
    difference: Values = (one - other).to_numpy()
    low, high = interval(difference)
    return f"{difference.mean():+.4f} ({low:+.4f} to {high:+.4f})"


def _rates(text: str) -> list[tuple[str, float]]:
    """Methods and learning rates from lora=3e-3,full=5e-4."""
    return [
        (method, float(rate))
        for method, _, rate in (entry.partition("=") for entry in text.split(",") if entry)
    ]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--rows", default=",".join(ROWS), help=f"of {', '.join(ROWS)}, {CONTROL}")
    add_defaults(
        parser,
        methods="lora,full,distilled",
        steps=200,
        batch=(4, "windows in a step"),
        window=(256, "tokens in a window"),
        eval_tokens=16384,
        minutes=40.0,
        table=(False, "print what is there, and run nothing"),
    )
    parser.add_argument("--rates", default="", type=_rates, help="by method: lora=3e-3,full=5e-4")
    arguments = parser.parse_args()
    rows = arguments.rows.split(",")
    methods = arguments.methods.split(",")
    if not arguments.table:
        bench = Bench(arguments)
        for row in rows:
            measure(bench, row, methods, RATES | dict(arguments.rates))
    show_tables(arguments.output)


if __name__ == "__main__":
    main()
