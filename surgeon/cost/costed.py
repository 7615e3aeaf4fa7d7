"""What a user names to be predicted: a model by its configuration, a recipe, a program, or a variant by its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from surgeon.checkpoint.config_only import CONFIG, read_config_only
from surgeon.language.operations.variants import DENSE, UPPER_BOUND, is_variant, middle_layers, variant
from surgeon.language.program import Program
from surgeon.language.recipe import read_recipe
from surgeon.models.recipe_program import recipe_program
from surgeon.models.shapes import ModelShapes
from surgeon.named import is_program, is_recipe, on_disk

_LONGEST_NAME = 18  # so that tables fit a terminal


@dataclass(frozen=True)
class Costed:
    """A program of a model.

    Attributes:
        name: for tables.
        program: for so many ranks: tracks have a slice for each.
        connected: whether ranks wait for each other at all.
    """

    name: str
    shapes: ModelShapes
    program: Callable[[int], Program]
    connected: bool = True


def open_costed(
    model: str, compared: Sequence[str], program: str | None = None, layers: range | None = None
) -> list[Costed]:
    """The model first, then what is compared with it, all under different names.

    Args:
        model: a folder with a config.json or one itself, a hub name, "demo", or a recipe.
        compared: any of these, programs, or names of variants of the model's unedited program.
        program: of the model, instead of its own.
        layers: that variants change; all but the first and last two by default.

    Raises:
        FileNotFoundError: if there is no such model or recipe.
        ValueError: if one cannot be read, or a variant is not of this model.
    """
    first = _open(model, program)
    found = [first]
    for text in compared:
        if is_variant(text):
            found.append(_variant(text, first, layers))
        elif is_program(text):
            found.append(_fixed(text, first.shapes, Program.parse(text)))
        else:
            found.append(_open(text))
    names = apart([one.name for one in found])
    return [replace(one, name=name) for one, name in zip(found, names, strict=True)]


def _open(text: str, program: str | None = None) -> Costed:
    if not is_recipe(text):
        config, own = read_config_only(text)
        shapes = ModelShapes.of(_name(text), config)
        dense = Program.dense(shapes.layers, shapes.family.steps_per_layer)
        return _fixed(shapes.name, shapes, own or dense if program is None else Program.parse(program))
    if program is not None:
        raise ValueError(f"{text} is a recipe and has a program of its own; give --program with a model")
    recipe = read_recipe(Path(text))
    config, own = read_config_only(recipe.model)
    return _fixed(Path(text).stem, ModelShapes.of(_name(recipe.model), config), recipe_program(recipe, config, own))


def _name(text: str) -> str:
    path = Path(text) if (there := on_disk(text)) is None else there.resolve()
    return (path.parent if path.name == CONFIG else path).name


def _fixed(name: str, shapes: ModelShapes, program: Program) -> Costed:
    return Costed(short_name(name), shapes, lambda _: program)


def _variant(name: str, first: Costed, layers: range | None) -> Costed:
    if name == UPPER_BOUND:
        return replace(first, name=name, connected=False)
    dense = Program.dense(first.shapes.layers, first.shapes.family.steps_per_layer)
    stretch = range(0) if name == DENSE else layers or middle_layers(first.shapes.layers)
    return replace(first, name=name, program=lambda ranks: variant(name, dense, stretch, ranks))


def short_name(name: str) -> str:
    """A name that leaves room in a table."""
    return name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 3] + "..."


def apart(names: Sequence[str]) -> list[str]:
    """Short names, with a number behind those that occur again."""
    seen: dict[str, int] = {}
    found = []
    for name in names:
        number = seen[name] = seen.get(name, 0) + 1
        suffix = f" ({number})" if number > 1 else ""
        found.append(name[: _LONGEST_NAME - len(suffix)] + suffix)
    return found
