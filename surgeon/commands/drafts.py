"""With what a model drafts on ranks, as `surgeon.generate` and `surgeon.serve` take it."""

from __future__ import annotations

from pathlib import Path

from surgeon.checkpoint.random_weights import RandomCheckpoint
from surgeon.commands.opening import has_weights_of_its_model
from surgeon.language.program import Program
from surgeon.language.recipe import read_recipe
from surgeon.named import is_recipe, on_disk
from surgeon.opened import EditedModel, Model, open_model
from surgeon.runtime.service_options import CODA, LOOKUP


def draft_program(model: Model, draft: str | Path | Program | EditedModel | None) -> Program | str | None:
    """Say what drafts tokens for a model, by a program, a recipe (.yaml), or an edit of it.

    "coda", "lookup" and variants are themselves. Of a model without weights its shapes alone tell whether a draft is of
    another one.

    Raises:
        FileNotFoundError, ValueError: if there is no such recipe, it is of another model, or the draft would have
            weights that do not follow from the model's matrices alone.
    """
    there = on_disk(draft) if isinstance(draft, str | Path) and draft not in (CODA, LOOKUP) else None
    if there is not None and there.is_dir():
        raise ValueError(
            f"{draft} is a folder, and a draft is a program over the weights of the model that verifies; give the "
            "program, a recipe (.yaml) or a variant of the model"
        )
    weights = model.files is not None and not isinstance(model.checkpoint, RandomCheckpoint)
    if isinstance(draft, str | Path) and is_recipe(draft):
        recipe = read_recipe(Path(draft))
        of = open_model(recipe.model, weights)
        draft = EditedModel(recipe.source, of, of.program_of(recipe), recipe)
    if not isinstance(draft, EditedModel):
        return str(draft) if isinstance(draft, Path) else draft
    same = draft.model.folder.resolve() == model.folder.resolve() if weights else draft.model.shapes == model.shapes
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
