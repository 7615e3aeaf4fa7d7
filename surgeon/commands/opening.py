"""Helpers of commands: layers, lists, results of other passes, models for ranks and drafts, warnings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from surgeon.analysis.factors.factor_plan import plan_factors
from surgeon.checkpoint.random_weights import RandomCheckpoint
from surgeon.commands.options import ServiceFlags, flags_in
from surgeon.findings.result import RunResult
from surgeon.language.program import Program
from surgeon.language.recipe import read_recipe
from surgeon.machine import parse_size
from surgeon.named import is_gguf, is_recipe, on_disk
from surgeon.opened import EditedModel, Model, open_model
from surgeon.runtime.service import CODA, LOOKUP, ServiceOptions
from surgeon.runtime.worker.rank import RankOptions


def name_of(model: object) -> str:
    """The name of a model that is open, or of one that the user names."""
    return str(getattr(model, "name", model))


def as_folder(found: str | Path | RunResult) -> Path:
    """The folder of a pass, given by its path or its result."""
    if not isinstance(found, RunResult):
        return Path(found)
    if not found.files:
        raise ValueError(f"{found!r} was written to no folder; give the output folder of a run")
    return found.files[0].parent


def service_options(
    model: Model,
    program: Program | str | None,
    flags: ServiceFlags,
    memory: int | str | None = None,
    **more: Any,
) -> ServiceOptions:
    """The options of a service, with a program and other fields in place of a command's flags."""
    chosen = flags_in(ServiceFlags, flags) | more
    chosen |= {"ranks": RankOptions.of(flags.get("ranks", 1)), "program": program}
    chosen["draft"] = draft_program(model, flags.get("draft"))
    chosen["memory"] = parse_size(memory) if isinstance(memory, str) else memory
    return ServiceOptions(**chosen)


def open_stored(
    model: str | Path | Model | EditedModel, program: Program | str | None
) -> tuple[Model, Program | str | None]:
    """Open the model as it is stored, with the program that ranks run in place of its own.

    Raises:
        ValueError: if an edited model is given a program, too, or its weights do not follow from its matrices alone.
    """
    if not isinstance(model, EditedModel):
        return open_model(model), program
    if program is not None:
        raise ValueError(
            f"{model.name} was edited, and has a program of its own; give the program with its model"
        )
    if not has_weights_of_its_model(model):
        raise ValueError(
            f"{model.name} was edited to have factors, heads or neurons that its matrices alone do not tell; export "
            "it, and give the folder"
        )
    return model.model, model.asked


def has_weights_of_its_model(edited: EditedModel) -> bool:
    """True if all weights of an edited model follow from the matrices of its model."""
    return edited.factors is None and (
        edited.recipe is None or plan_factors(edited.recipe, edited.model).is_of_weights
    )


def draft_program(
    model: Model, draft: str | Path | Program | EditedModel | None
) -> Program | str | None:
    """The program that drafts for a model, given by itself, a recipe (.yaml), or an edit of the model.

    "coda", "lookup" and variants stay as they are. Of a model without weights its shapes alone tell whether a draft is
    of another one.
    """
    if isinstance(draft, str | Path) and draft not in (CODA, LOOKUP):
        there = on_disk(draft)
    else:
        there = None
    if there is not None and (there.is_dir() or is_gguf(there)):
        kind = "folder" if there.is_dir() else "model"
        raise ValueError(
            f"{draft} is a {kind}, and a draft is a program over the weights of the model that verifies; give the "
            "program, a recipe (.yaml) or a variant of the model"
        )
    weights = model.files is not None and not isinstance(model.checkpoint, RandomCheckpoint)
    if isinstance(draft, str | Path) and is_recipe(draft):
        recipe = read_recipe(Path(draft))
        of = open_model(recipe.model, weights)
        draft = EditedModel(recipe.source, of, of.program_of(recipe), recipe)
    if not isinstance(draft, EditedModel):
        if isinstance(draft, Path):
            return str(draft)
        return draft
    if weights:
        same = draft.model.folder.resolve() == model.folder.resolve()
    else:
        same = draft.model.shapes == model.shapes
    if not same:
        raise ValueError(
            f"{draft.name} edits {draft.model.name}, and a draft is a program over the weights of the model that "
            f"verifies, {model.name}; draft with an edit of that"
        )
    if not has_weights_of_its_model(draft):
        raise ValueError(
            f"{draft.name} has factors, heads or neurons that the model's matrices alone do not tell, and drafts have "
            "the model's weights; draft without them, or with low ranks that go by no text"
        )
    return draft.program
