"""What training brings back of what edits of the demo model lose: adapters, full training, distillation, equal tokens.

    python scripts/bench/heal.py -o FOLDER [--rows lp-12,ladder-upper,...] [--methods lora,full,distilled] [--steps N]
                                 [--seeds N] [--minutes M] [--rates METHOD=X,...] [--table]

Every row is an edit, every run of it trains the sublayers that the edit touched, on windows of the demo model's own
training text, and is measured on text that the model never saw. `lora` trains adapters of rank 16, `full` the
sublayers' own weights, both on the text; `distilled` trains the same weights as `full`, towards the original's
predictions. All see the same tokens in the same order. `control` trains the *unedited* model like `full`, all of it:
what it gains is what the text is worth, not healing.

The stretches of pairs and the layers left out are those with the least divergence on training text, of their length.
Killed, the same command goes on where it was. --minutes is a limit for each row: when it is reached, no further run of
it begins. FOLDER/ROW/METHOD-SEED.run is a folder that `surgeon report` takes. --table prints the tables of what is
there.
"""

from __future__ import annotations

import argparse
import copy
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from scripts.bench.heal_table import RECORD, WINDOWS, is_whole, show_tables
from scripts.commands import make_parser
from surgeon.checkpoint.config import locate
from surgeon.checkpoint.load import load
from surgeon.checkpoint.stored import Checkpoint
from surgeon.checkpoint.texts import open_tokenizer
from surgeon.language.program import Program
from surgeon.language.recipe import Recipe, parse_recipe
from surgeon.models.edit import edit, recipe_program
from surgeon.processes.files import write_json, write_table
from surgeon.provenance import provenance
from surgeon.quality.data import DEMO, load_windows
from surgeon.quality.sources import DEMO_TRAINING
from surgeon.quality.summary import Values
from surgeon.quality.text import logits_of, text_quality, text_values
from surgeon.training.distiller import Distillation
from surgeon.training.run import train
from surgeon.training.settings import TrainSettings
from surgeon.training.texts import TrainTexts, load_texts

LAYERS, ALL_TEXT = 16, 1_000_000  # tokens: more than a run goes through
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
# Of windows.csv.
COLUMNS = ("original_nll", "edited_nll", "edited_divergence", "healed_nll", "healed_divergence")


@dataclass(frozen=True)
class Run:
    """One training of one edit."""

    row: str
    method: str
    seed: int
    rate: float

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.method}-{self.seed}.run"

    def settings(self, steps: int, batch: int) -> TrainSettings:
        """What it does."""
        return TrainSettings(
            scope="all" if self.method == CONTROL else "edited",
            lora=RANK if self.method == "lora" else None,
            distillation=Distillation() if self.method == "distilled" else None,
            steps=steps,
            batch=batch,
            learning_rate=self.rate,
            warmup=max(1, steps // 20),
            seed=self.seed,
            evaluate_every=max(1, steps // MEASUREMENTS),
            save_every=max(1, steps // MEASUREMENTS),
        )


class Bench:
    """The demo model, its text, and where results go."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.checkpoint = Checkpoint(locate(DEMO))
        self.model_hash = self.checkpoint.model_hash()
        self.original = load(self.checkpoint.folder, dtype=torch.float32)
        self.tokenizer = open_tokenizer(self.checkpoint.folder)
        self.kept: dict[bytes, Tensor] = {}
        self.edited: dict[str, list[Values]] = {}

    @cached_property
    def texts(self) -> TrainTexts:
        """The beginning of the training text, and held-out text."""
        tokens = self.arguments.eval_tokens
        window = self.arguments.window
        return load_texts(self.tokenizer, DEMO_TRAINING, window, ALL_TEXT, DEMO, tokens)

    def recipe(self, row: str) -> Recipe:
        """Of a row's edits the one with the least divergence on training text."""
        recipes = ROWS[row]
        if len(recipes) == 1:
            return recipes[0]
        ids = load_windows(self.tokenizer, DEMO_TRAINING, self.arguments.window, CHOSEN_ON).ids
        edited = copy.deepcopy(self.original)
        found = []
        for recipe in recipes:
            program = recipe_program(recipe, self.original.config)
            quality = text_quality(
                logits_of(edit(edited, program)), ids, logits_of(self.original), bar=False
            )
            found.append((quality.divergence, recipe))
        return min(found, key=lambda one: (one[0] is None, one[0]))[1]

    def run(self, run: Run, recipe: Recipe | None) -> None:
        """Train, and write what came of it; nothing if that is there."""
        folder = self.arguments.output / run.row / run.name
        if is_whole(folder):
            return
        program = Program.dense(LAYERS)
        if recipe is not None:
            program = recipe_program(recipe, self.original.config)
        texts = self.texts
        settings = run.settings(self.arguments.steps, self.arguments.batch)
        student = edit(copy.deepcopy(self.original), program)
        values = self._edited_values(student, str(program))
        identity = {
            "original": self.model_hash,
            "program": str(program),
            "row": run.row,
            "method": run.method,
        }
        healed = train(
            student, texts, settings, folder, lambda: copy.deepcopy(self.original), program, identity
        )
        assert healed is not None
        assert healed.original is not None
        nll = text_values(self._original, texts.held_out.ids, bar=False)["nll"]
        table = pd.DataFrame(
            dict(zip(COLUMNS, [nll, *values, *self._values(healed.model)], strict=True))
        )
        write_table(folder / WINDOWS, table)
        record = provenance(
            DEMO,
            self.model_hash,
            seed=run.seed,
            program=str(program),
            recipe=None if recipe is None else recipe.to_yaml(),
            row=run.row,
            method=run.method,
            data=texts.training.source,
            data_hash=texts.training.digest,
            held_out=texts.held_out.source,
            held_out_hash=texts.held_out.digest,
            settings=settings.to_json(),
            steps=healed.steps,
            tokens=healed.tokens,
            seconds=healed.seconds,
            original=healed.original.to_json(),
            edited=healed.before.to_json(),
            healed=healed.after.to_json(),
        )
        write_json(folder / RECORD, record)
        for checkpoint in folder.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)

    def _values(self, model: PreTrainedModel) -> list[Values]:
        """Negative log-likelihood and divergence of every held-out window."""
        found = text_values(logits_of(model.eval()), self.texts.held_out.ids, self._original, bar=False)
        return [found["nll"], found["divergence"]]

    def _edited_values(self, student: PreTrainedModel, program: str) -> list[Values]:
        """The same before training, once for every edit."""
        if program not in self.edited:
            self.edited[program] = self._values(student)
        return self.edited[program]

    def _original(self, window: Tensor) -> Tensor:
        """What the original predicts on a held-out window, computed once."""
        key = window.numpy().tobytes()
        if key not in self.kept:
            self.kept[key] = logits_of(self.original)(window)
        return self.kept[key]


def measure(bench: Bench, row: str, methods: Sequence[str], seeds: int, rates: dict[str, float]) -> None:
    """All runs of a row, the first seed of every method before the second of any."""
    arguments = bench.arguments
    began = time.monotonic()
    recipe = None
    own: Sequence[str] = [CONTROL]
    if row != CONTROL:
        recipe = bench.recipe(row)
        own = methods
    for run in (Run(row, method, seed, rates[method]) for seed in range(seeds) for method in own):
        if time.monotonic() - began > 60 * arguments.minutes:
            print(f"{row}: {arguments.minutes:g} minutes are over; {run.name} is left out", flush=True)
            continue
        bench.run(run, recipe)


def _rates(text: str) -> list[tuple[str, float]]:
    """Methods and learning rates from lora=3e-3,full=5e-4."""
    return [
        (method, float(rate))
        for method, _, rate in (entry.partition("=") for entry in text.split(",") if entry)
    ]


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--rows", default=",".join(ROWS), help=f"of {', '.join(ROWS)}, {CONTROL}")
    parser.add_argument("--methods", default="lora,full,distilled")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=4, help="windows in a step")
    parser.add_argument("--window", type=int, default=256, help="tokens in a window")
    parser.add_argument("--eval-tokens", type=int, default=16384)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=40.0)
    parser.add_argument("--rates", default="", type=_rates, help="by method: lora=3e-3,full=5e-4")
    parser.add_argument("--table", action="store_true", help="print what is there, and run nothing")
    return parser.parse_args()


def main() -> None:
    arguments = _parse()
    rows = arguments.rows.split(",")
    methods = arguments.methods.split(",")
    if not arguments.table:
        bench = Bench(arguments)
        for row in rows:
            measure(bench, row, methods, arguments.seeds, RATES | dict(arguments.rates))
    show_tables(arguments.output)


if __name__ == "__main__":
    main()
