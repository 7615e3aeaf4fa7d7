"""Programs like those that a search meets: of several kinds, most of them chosen by what single edits do."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

import surgeon
from surgeon.checkpoint.read import Checkpoint, locate
from surgeon.checkpoint.texts import open_tokenizer
from surgeon.language.program import Program
from surgeon.models.shapes import ModelShapes
from surgeon.quality.data import Windows, load_windows, window_for
from surgeon.searches.edit import Choice, Edit, as_choice
from surgeon.searches.evaluate import Evaluator
from surgeon.searches.mixture import Mixture
from surgeon.searches.spaces import Searched, parse_spaces

NOISE = 0.7  # of the logarithm of an edit's damage: some choices are near the best guess, some far


@dataclass(frozen=True)
class Opened:
    """A model and the text to measure it on."""

    folder: Path
    model: PreTrainedModel
    windows: Windows
    shapes: ModelShapes

    @property
    def model_hash(self) -> str:
        return Checkpoint(self.folder).model_hash()

    def mixture(self, spaces: str) -> Mixture:
        return Mixture(parse_spaces(spaces), Searched(self.shapes))


def opened(model: str, data: str, tokens: int, threads: int | None) -> Opened:
    """Load both."""
    if threads:
        torch.set_num_threads(threads)
    folder = locate(model)
    loaded = surgeon.load(folder)
    window = window_for(loaded.config, None)
    windows = load_windows(open_tokenizer(folder), data, window, tokens)
    return Opened(folder, loaded, windows, ModelShapes.of(folder.name, loaded.config))


def drawn(mixture: Mixture, evaluator: Evaluator, edits: int, count: int, seed: int) -> dict[Program, Choice]:
    """Different programs of so many edits each, at most `count` of them, with the choices that they come from.

    Args:
        evaluator: measures what each edit does by itself.
    """
    dice = random.Random(seed)
    singles = {edit: mixture.program((edit,)) for edit in mixture.edits}
    measured = evaluator.measure(singles.values())
    damage = {edit: max(measured[program].divergence, 1e-9) for edit, program in singles.items()}
    return {mixture.program(choice): choice for choice in _choices(mixture, damage, edits, count, dice)}


def moved(mixture: Mixture, choice: Choice, dice: random.Random) -> Iterator[Choice]:
    """The choice with one edit in the place of another, in random order."""
    others = [as_choice(other for other in choice if other != edit) for edit in choice]
    near = [as_choice([*kept, edit]) for kept in others for edit in mixture.edits if mixture.is_free(kept, edit)]
    near = [other for other in dict.fromkeys(near) if other != choice]
    dice.shuffle(near)
    return iter(near)


def _choices(
    mixture: Mixture, damage: dict[Edit, float], edits: int, count: int, dice: random.Random
) -> Iterator[Choice]:
    for _ in range(count):
        order = sorted(damage, key=lambda edit: math.log(damage[edit]) + dice.gauss(0, NOISE))
        yield as_choice(_first_that_go_together(mixture, order, edits))


def _first_that_go_together(mixture: Mixture, order: Sequence[Edit], edits: int) -> list[Edit]:
    chosen: list[Edit] = []
    for edit in order:
        if len(chosen) < edits and mixture.is_free(chosen, edit):
            chosen.append(edit)
    return chosen
