"""What a checkpoint or a recipe is: its model, its form, and its program over the layers of the unedited model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surgeon.checkpoint.codas import read_codas
from surgeon.checkpoint.config import read_config_only
from surgeon.checkpoint.forms import Form, form_of
from surgeon.checkpoint.load import open_stored
from surgeon.checkpoint.stored import StoredModel
from surgeon.checkpoint.training import is_no_source
from surgeon.language.program import Program
from surgeon.language.recipe import Recipe, read_recipe
from surgeon.models.edit import recipe_program
from surgeon.named import is_recipe, name_of
from surgeon.words import plural


@dataclass(frozen=True)
class Surgery:
    """What was done to a model, as a checkpoint or a recipe says it.

    Attributes:
        name: of the checkpoint's folder, or of the recipe.
        stored: the checkpoint; of a recipe its model, known by its configuration alone.
        original: the unedited model's name, where it is known, and there was one.
        num_layers: of the unedited model.
        unedited: what that runs.
        program: what is run, over its layers.
        recipe: if it is one.
    """

    name: str
    stored: StoredModel
    original: str | None
    num_layers: int
    unedited: Program
    program: Program
    recipe: Recipe | None = None

    @property
    def steps_per_layer(self) -> int:
        return self.stored.family.steps_per_layer

    @property
    def depth(self) -> float:
        """How many layers run one after the other."""
        return self.program.effective_depth(self.steps_per_layer)

    @property
    def form(self) -> Form | None:
        """The checkpoint's; None for a recipe."""
        if self.recipe is not None:
            return None
        return form_of(self.stored.checkpoint)

    @property
    def report(self) -> dict[str, Any]:
        """What the checkpoint's surgeon.json says; empty if there is none."""
        return ({} if self.recipe is not None else self.stored.report) or {}

    @property
    def sources(self) -> list[tuple[int, ...]]:
        """For each layer of the checkpoint, the unedited model's layers that it comes from."""
        if "stored_layers" in self.report:
            return list(map(tuple, self.report["stored_layers"]))
        if self.form is None or not self.report:  # nothing says that its layers come from other ones
            return [(layer,) for layer in range(self.stored.num_layers)]
        return self.form.sources(self.program, self.stored.family, self.num_layers)

    @property
    def training(self) -> dict[str, Any] | None:
        """What surgeon.json says of the model's (last) training; None where there was none."""
        return self.report.get("trained")

    @property
    def from_scratch(self) -> bool:
        """Whether it was trained from random weights, so that there is no unedited model."""
        return is_no_source(self.report.get("source", {}))

    @property
    def trained(self) -> str | None:
        """That training in a few words; None where there was none."""
        said = self.training
        if said is None:
            return None
        again = "" if "earlier" not in said else "; not for the first time"
        steps = plural(said["steps"], "step")
        tokens = plural(said["tokens"], "token")
        return f"{steps} on {tokens} of {said['data']}, {said['method']}{again}"

    @property
    def codas(self) -> tuple[list[str], int] | None:
        """The racks' ranges of layers and the depth of their codas, where such lie beside it (see codas.py).

        Raises:
            FileNotFoundError, ValueError: if they are damaged.
        """
        if self.recipe is not None:
            found = None
        else:
            found = read_codas(self.stored.folder, check_weights=False)
        if found is None:
            return None
        return (list(found.racks), found.depth)


def describe(what: str | Path) -> Surgery:
    """Describe a recipe file, a checkpoint folder, or a model by its name.

    Raises:
        FileNotFoundError: if there is no such thing.
        ValueError: if it is damaged, or of an architecture that is not supported.
    """
    if is_recipe(what):
        recipe = read_recipe(Path(what))
        model = StoredModel(recipe.model, None, *read_config_only(recipe.model))
        program = recipe_program(recipe, model.config, model.own)
        return Surgery(Path(what).name, model, recipe.model, model.num_layers, model.program, program, recipe)
    stored = open_stored(what)
    if (report := stored.report) is None:
        dense = Program.dense(stored.num_layers, stored.family.steps_per_layer)
        return Surgery(name_of(what), stored, None, stored.num_layers, dense, stored.program)
    source = report["source"]
    layers = report["source"]["num_layers"]
    own = source.get("program")
    if own is None:
        unedited = Program.dense(layers, stored.family.steps_per_layer)
    else:
        unedited = Program.parse(own)
    return Surgery(name_of(what), stored, source["model"], layers, unedited, Program.parse(report["program"]))
