"""Weights of a recipe: calibrated factors, and units that it chooses."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import torch

from surgeon.analysis.factors.factor_plan import WAYS, FactorPlan, plan_factors
from surgeon.language.operations.width import CRITERIA, chosen_by
from surgeon.models.weights import FactorSource, ScoredUnits, UnitsByLayer
from surgeon.opened import EditedModel


def with_factors(
    edited: EditedModel, folder: Path, memory: int | None = None, kept: torch.dtype | None = None
) -> EditedModel:
    """Make or find the factors that a recipe has calibrated on a text, and choose heads and neurons by it.

    The recipe then names the text that was used; notes on the factors are warnings. A model without such a recipe, or
    with factors already, comes back as it is.

    Args:
        memory: the most that making them may take, in bytes.
        kept: the dtype they will be stored in, where that is not the model's own.
    """
    recipe = edited.recipe
    model = edited.model
    if recipe is None or edited.factors is not None:
        return edited
    plan = plan_factors(recipe, model)
    if not plan.is_calibrated:
        return with_units(edited, plan)
    # What makes them takes a second to import, which most recipes have no use for.
    from surgeon.analysis.factors.make_factors import make_factors
    from surgeon.analysis.importance import unit_importance
    from surgeon.analysis.subject import calibration_entry, load_for_analysis, load_recorded

    windows = load_recorded(model, plan.calibration)
    loaded = load_for_analysis(model, memory)
    notes = list(windows.notes)
    used = calibration_entry(windows, plan.calibration.get("after", 0))
    by = plan.importance
    found = unit_importance(loaded, by, windows, folder, model_hash=model.hash, memory=memory)
    scored = {part: ScoredUnits(values, by[part]) for part, values in found.items()}
    units = {**plan.units, **scored}
    source: FactorSource = UnitsByLayer(units)
    if plan.has_calibrated_factors:
        ways = {way: True for way in WAYS if plan.calibration.get(way)}
        record = model.provenance(calibration_text={**used, **ways}) | {"model": recipe.model}
        made = make_factors(
            loaded,
            plan,
            windows,
            folder,
            model_hash=model.hash,
            memory=memory,
            record=record,
            kept=kept or model.dtype,
            units=units,
        )
        source = made.source
        notes = [*notes, *made.notes]
    for note in notes:
        warnings.warn(note, stacklevel=2)
    # The recipe names the text that was used; a file goes by its bare name, not by where it lies here.
    data = Path(used["data"])
    named = {**used, "data": data.name if data.is_absolute() else str(data)}
    entries = []
    for entry in recipe.operations:
        given = entry.parameters
        criterion = chosen_by(given) if entry.name == "width" else None
        if given.get("method", "plain") == "plain" and criterion not in CRITERIA:
            entries.append(entry)
            continue
        ways = {way: True for way in WAYS if given.get("calibration", {}).get(way)}
        entries.append(replace(entry, parameters={**given, "calibration": {**named, **ways}}))
    published = replace(recipe, operations=tuple(entries))
    identity = plan.to_json() | {"calibration": windows.digest}
    return replace(edited, recipe=published, factors=source, factors_identity=identity)


def with_units(edited: EditedModel, plan: FactorPlan) -> EditedModel:
    """Choose an edited model's heads and neurons that its recipe names without a text."""
    if plan.source is None:
        return edited
    return replace(edited, factors=plan.source, factors_identity=plan.to_json())
