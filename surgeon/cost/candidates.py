"""Candidates of predictions and measurements: a model, a recipe, a program, or a variant by its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from surgeon.checkpoint.config import DEMO
from surgeon.errors import did_you_mean
from surgeon.language.operations.variants import (
    HALVES,
    UPPER_BOUND,
    is_variant,
    variant_names,
    variant_of,
)
from surgeon.language.program import Program
from surgeon.language.recipe import Recipe, read_recipe
from surgeon.named import is_program, is_recipe, on_disk
from surgeon.opened import EditedModel, Model, open_model
from surgeon.runtime.plan.specification import HalvesMode

_LONGEST_NAME = 18  # so that tables fit a terminal


@dataclass(frozen=True)
class Candidate:
    """A program of a model.

    Attributes:
        name: for tables.
        program: for so many ranks: tracks have a slice for each.
        connected: whether ranks wait for each other; without, results are wrong and nothing can be faster.
        recipe: that made it, if one did.
        halves: which of its passes are computed in two halves.
    """

    name: str
    model: Model
    program: Callable[[int], Program]
    connected: bool = True
    recipe: Recipe | None = None
    halves: HalvesMode = "off"


def open_candidates(
    model: str | Path | Model | EditedModel,
    compared: Sequence[str] = (),
    program: Program | str | None = None,
    layers: range | None = None,
    weights: bool = False,
) -> list[Candidate]:
    """Open the model first, then what is compared with it, all under different names.

    Args:
        model: as `open_model` takes it, a recipe, or a model that is open, edited or not.
        compared: any of these, programs, or names of variants of the model's unedited program.
        layers: that variants change; all but the first and last two by default.
        weights: whether they have to be there.

    Raises:
        FileNotFoundError, ValueError: if there is no such model or recipe, one cannot be read, or they do not fit.
    """
    first = _open(model, weights, program)
    found = [first]
    for text in compared:
        if text == UPPER_BOUND:
            found.append(replace(first, name=text, connected=False))
        elif text == HALVES:
            found.append(replace(first, name=text, halves="on"))
        elif is_variant(text):
            own = first.model
            varied = variant_of(text, own.num_layers, own.family.steps_per_layer, layers)
            found.append(Candidate(text, own, varied))
        elif is_program(text):
            found.append(_fixed_candidate(text, first.model, Program.parse(text)))
        elif not (is_recipe(text) or "/" in text or text == DEMO or on_disk(text)):
            missing = f"there is no model folder {text}, nor a variant of a model;"
            raise FileNotFoundError(f"{missing} {did_you_mean(text, variant_names())}")
        else:
            found.append(_open(text, weights))
    names = apart([one.name for one in found])
    return [replace(one, name=name) for one, name in zip(found, names, strict=True)]


def _open(
    what: str | Path | Model | EditedModel, weights: bool, program: Program | str | None = None
) -> Candidate:
    path = Path(what) if isinstance(what, str | Path) and is_recipe(what) else None
    if program is not None and (path is not None or isinstance(what, EditedModel)):
        given = f"{path} is a recipe and" if path is not None else f"{what!r}"
        raise ValueError(f"{given} has a program of its own; give a program with a model")
    if isinstance(what, EditedModel):
        return replace(_fixed_candidate(what.model.label, what.model, what.program), recipe=what.recipe)
    if path is not None:
        recipe = read_recipe(path)
        model = open_model(recipe.model, weights)
        return replace(_fixed_candidate(path.stem, model, model.program_of(recipe)), recipe=recipe)
    model = what if isinstance(what, Model) else open_model(what, weights)
    parsed = Program.parse(program) if isinstance(program, str) else program
    return _fixed_candidate(model.label, model, model.program if parsed is None else parsed)


def _fixed_candidate(name: str, model: Model, program: Program) -> Candidate:
    if model.files is None:
        _ = model.shapes  # a configuration of impossible sizes is refused now
    return Candidate(name, model, lambda _: program)


def apart(names: Sequence[str]) -> list[str]:
    """Shorten names, with a number behind those that occur again."""
    seen: dict[str, int] = {}
    found = []
    for name in (
        name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 3]}..." for name in names
    ):
        number = seen[name] = seen.get(name, 0) + 1
        suffix = f" ({number})" if number > 1 else ""
        found.append(name[: _LONGEST_NAME - len(suffix)] + suffix)
    return found
