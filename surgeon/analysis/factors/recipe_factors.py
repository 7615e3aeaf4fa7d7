"""The factors that a recipe asks for, where it says how they are calibrated."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from surgeon.analysis.factors.factor_folder import FactorFolder
from surgeon.analysis.factors.factor_plan import plan_factors
from surgeon.language.operations.lowrank import Calibration
from surgeon.language.recipe import Recipe, parse_recipe
from surgeon.opened import EditedModel, Model
from surgeon.provenance import provenance


@dataclass(frozen=True)
class RecipeFactors:
    """What a recipe's calibrated factors are.

    Attributes:
        found: the factors, and what there is to know of them.
        calibration: the text that they were made with, as a recipe records it.
        identity: what their values follow from, as JSON values.
    """

    found: FactorFolder
    calibration: Calibration
    identity: dict[str, Any]

    def published(self, recipe: Recipe) -> Recipe:
        """The recipe with the text that was used; a file goes by its bare name, not by where it lies here."""
        data = Path(self.calibration["data"])
        named = {**self.calibration, "data": data.name if data.is_absolute() else str(data)}
        entries = (
            replace(entry, parameters={**entry.parameters, "calibration": named})
            if entry.parameters.get("method", "plain") != "plain"
            else entry
            for entry in recipe.operations
        )
        return replace(recipe, operations=tuple(entries))


def make_recipe_factors(
    recipe: Recipe,
    model: Model,
    folder: Path,
    memory: int | None = None,
    kept: torch.dtype | None = None,
) -> RecipeFactors | None:
    """Make the factors of a recipe in a folder, or go on with those there; None if no factors go by a text.

    Args:
        kept: what they will be stored in, where that is not the model's own dtype.

    Raises:
        FileNotFoundError: if the text is gone.
        ValueError: if the text has changed or cannot be used, or as `make_factors`.
        OSError: if the folder cannot be written to.
    """
    plan = plan_factors(recipe, model)
    if not plan.is_calibrated:
        return None
    # What makes them takes a second to import, which most recipes have no use for.
    from surgeon.analysis.factors.calibration import load_recorded, recorded
    from surgeon.analysis.factors.make_factors import make_factors
    from surgeon.analysis.subject import load_for_analysis

    windows = load_recorded(model, plan.calibration)
    kept, loaded = kept or model.dtype, load_for_analysis(model, memory)
    used = recorded(windows, plan.calibration.get("after", 0))
    for way in ("sequential", "update"):
        if plan.calibration.get(way):
            used[way] = True
    record = provenance(recipe.model, model.hash, calibration_text=used)
    found = make_factors(loaded, plan, windows, folder, model_hash=model.hash, memory=memory, record=record, kept=kept)
    notes = (*windows.notes, *found.notes)
    return RecipeFactors(replace(found, notes=notes), used, plan.to_json() | {"calibration": windows.digest})


def with_factors(edited: EditedModel, folder: Path) -> EditedModel:
    """An edited model with the factors that its recipe has calibrated on a text, as `make_recipe_factors` makes them.

    Its recipe names the text that was used then. What there is to know of the factors is a warning.

    Raises:
        FileNotFoundError, ValueError, OSError: as `make_recipe_factors`.
    """
    recipe = None if edited.recipe is None else parse_recipe(edited.recipe, edited.name)
    made = None if recipe is None else make_recipe_factors(recipe, edited.model, folder)
    if recipe is None or made is None:
        return edited
    for note in made.found.notes:
        warnings.warn(note, stacklevel=2)
    text = made.published(recipe).to_yaml()
    return replace(edited, recipe=text, factors=made.found.source, factors_identity=made.identity)
