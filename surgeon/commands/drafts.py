"""With what a model drafts on ranks, as `surgeon.generate` and `surgeon.serve` take it."""

from __future__ import annotations

from pathlib import Path

from surgeon.checkpoint.drafts import DRAFT_FILE, HealedDraft
from surgeon.checkpoint.random_weights import RandomCheckpoint
from surgeon.commands.opening import has_weights_of_its_model
from surgeon.language.program import Program
from surgeon.language.recipe import read_recipe
from surgeon.named import is_recipe, on_disk
from surgeon.opened import EditedModel, Model, open_model
from surgeon.runtime.service_options import CODA, LOOKUP


def draft_program(
    model: Model, draft: str | Path | Program | EditedModel | HealedDraft | None
) -> Program | str | HealedDraft | None:
    """Say what drafts tokens for a model, by a program, a recipe (.yaml), an edit, or a healed draft's folder.

    "coda", "lookup" and variants are themselves. Of a model without weights its shapes alone tell whether a draft is of
    another one.

    Raises:
        FileNotFoundError, ValueError: if there is no such recipe, or it or the folder is of another model, or the draft
            would have weights that do not follow from the model's matrices alone.
    """
    there = on_disk(draft) if isinstance(draft, str | Path) and draft not in (CODA, LOOKUP) else None
    if there is not None and there.is_dir():
        if not HealedDraft.is_at(there):
            raise ValueError(
                f"{draft} has no {DRAFT_FILE}, so it is no healed draft: that is a program over the weights of the "
                "model that verifies, with norms or adapters of its own; heal an edit of that model as a draft"
            )
        draft = HealedDraft.read(there)
    weights = model.files is not None and not isinstance(model.checkpoint, RandomCheckpoint)
    if isinstance(draft, HealedDraft):
        if weights:
            draft.require_model(model.name, model.hash)
        return draft
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
