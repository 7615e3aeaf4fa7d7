"""`surgeon search --heal`: the winner of a search and its runners-up are healed, and compared once more."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from surgeon.checkpoint.load import load
from surgeon.commands.heal import heal
from surgeon.language.recipe import Recipe
from surgeon.opened import Model
from surgeon.quality.data import Windows, load_windows, shared_windows
from surgeon.quality.summary import estimate
from surgeon.searches.trial import MeasuredProgram, Trial
from surgeon.searches.winners import HealedFinalists, HeldOutComparison, compare
from surgeon.training.distill.distiller import Distillation
from surgeon.training.held_out import HeldOutQuality
from surgeon.training.settings import TrainSettings

FOLDER = "healed"


def heal_finalists(
    before: HeldOutComparison,
    recipe_of: Callable[[Trial], Recipe],
    original: Model,
    unseen: Windows,
    folder: Path,
    data: str,
    steps: int,
    batch: int,
) -> HealedFinalists:
    """Heal each finalist as `surgeon.heal` does, into a checkpoint of its own, and compare them on held-out text."""
    window = unseen.ids.shape[1]
    distilled = Distillation() if before.by == "divergence" else None
    settings = TrainSettings(steps=steps, batch=batch, scope="edited", distillation=distilled, evaluate_every=steps + 1)
    judge = HeldOutQuality(unseen, load(original.folder).float())
    winner = before.chosen
    after = []
    for one in (winner, *(other for other in before.finalists if other.trial != winner.trial)):
        key = json.dumps([one.trial.proposal.key, data, window, settings.to_json()], sort_keys=True)
        target = folder / FOLDER / hashlib.sha256(key.encode()).hexdigest()[:12]
        if not target.exists():  # a search that was killed heals what is missing
            print(f"search: healing trial {one.trial.number} into {target}", file=sys.stderr, flush=True)
            heal(recipe_of(one.trial), data, target, settings=settings, window=window, separator=unseen.separator)
        values = judge.values(load(target).float())
        nll = values["nll"]
        divergence = values["divergence"]
        measured = MeasuredProgram.of(estimate(nll, divergence), unseen.predicted, nll, divergence)
        after.append(replace(one, unseen=measured))
    how = f"healed for {steps:,} steps ({settings.method}) on {data}, in {folder / FOLDER}"
    return HealedFinalists(before, compare(after[0], after[1:], before.original, before.by), how)


def require_text_to_heal(model: Model, data: str, tokens: int, searched: Windows, unseen: Windows) -> None:
    """Refuse text that candidates are chosen or judged by: a model is not judged by what it was trained on."""
    text = load_windows(model.tokenizer, data, searched.ids.shape[1], tokens, searched.separator, at_most=True)
    for other in (searched, unseen):
        if again := shared_windows(text, other):
            raise ValueError(
                f"{again} windows of {data}, to be healed on, are in the text of the search or in what it holds out "
                f"({other.source}), too; heal on other text"
            )
