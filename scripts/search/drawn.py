"""Programs like those that a search meets: of several kinds, most of them chosen by what single edits do."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

import torch

from surgeon.analysis.subject import Subject, open_subject
from surgeon.language.program import Program
from surgeon.results.edit import Choice, Edit, as_choice
from surgeon.searches.evaluate import Evaluator
from surgeon.searches.mixture import Mixture
from surgeon.searches.spaces import parse_spaces

NOISE = 0.7  # of the logarithm of an edit's damage: some choices are near the best guess, some far


def mixture_of(subject: Subject, spaces: str) -> Mixture:
    """Spaces on its model."""
    return Mixture(parse_spaces(spaces), subject.opened)


def opened(model: str, data: str, tokens: int, threads: int | None) -> Subject:
    """Load a model and the text to measure it on."""
    if threads:
        torch.set_num_threads(threads)
    return open_subject(model, data, tokens)


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
