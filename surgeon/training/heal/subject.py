"""What is healed: an edited model, and the original that it is compared with and may learn from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from surgeon.analysis.factors.recipe_factors import make_recipe_factors
from surgeon.checkpoint.companions import companions_at
from surgeon.checkpoint.describe import REPORT_FILE
from surgeon.checkpoint.forms.fused import FUSED
from surgeon.checkpoint.read import DEMO, read_json
from surgeon.checkpoint.training import layers_by_recipe
from surgeon.exports.stock import stock_layers_of
from surgeon.exports.unfuse import unfused
from surgeon.language.program import Program
from surgeon.language.recipe import Recipe, parse_recipe
from surgeon.models.edit import decoder_layers, edit, program_of
from surgeon.models.edited_layers import EditedLayers
from surgeon.named import is_hub_name
from surgeon.opened import EditedModel, open_edited


@dataclass(frozen=True)
class HealSubject:
    """An edited model that has not been loaded yet, and its original.

    Attributes:
        edited: a recipe, a model with a program, or a checkpoint that was edited.
        original: None where it is not known.
        report: surgeon.json of an edited checkpoint.
        published: the recipe that is healed, once its factors are made.
    """

    edited: EditedModel
    original: EditedModel | None
    report: dict[str, Any] | None = None
    published: Recipe | None = None

    @property
    def recipe(self) -> Recipe | None:
        """The recipe that is healed, if it is one, with the text that its factors were made with."""
        text = self.edited.recipe
        return self.published or (None if text is None else parse_recipe(text, self.edited.name))

    @property
    def program(self) -> Program:
        """What the edited model runs, in the numbers of the original's layers."""
        return self.edited.program if self.report is None else Program.parse(self.report["program"])

    def with_factors(self, folder: Path) -> HealSubject:
        """The same with the factors that its recipe has calibrated on a text, made in a folder.

        Raises:
            FileNotFoundError, ValueError, OSError: as `make_recipe_factors`.
        """
        recipe = self.recipe
        if recipe is None:
            return self
        made = make_recipe_factors(recipe, self.edited.model, folder)
        if made is None:
            return self
        edited = replace(self.edited, factors=made.found.source, factors_identity=made.identity)
        return replace(self, edited=edited, published=made.published(recipe))

    def student(self) -> PreTrainedModel:
        """The edited model, on the CPU, its weights in 32 bits.

        Raises:
            NotProven: if it does not run the program that it is said to run.
            ValueError: if a fused checkpoint's layers cannot be told apart any more.
        """
        if self.edited.model.form is FUSED and self.edited.asked is None:
            model = unfused(self.edited.model)
        else:
            model = self.edited.load("cpu")
        if not isinstance(decoder_layers(model), EditedLayers):
            edit(model, program_of(model))
        layers_by_recipe(self.program, stock_layers_of(model).program)  # before it is trained
        model.float()
        return model

    @property
    def loads_original(self) -> Callable[[], PreTrainedModel] | None:
        """Loads the original, on the CPU, its weights in 32 bits; None where it is not known."""
        original = self.original
        return None if original is None else partial(_in_float32, original)

    def identity(self) -> dict[str, Any]:
        """What the edited model follows from, as JSON values."""
        return {
            "task": "heal",
            "model": self.edited.model.hash,
            "program": str(self.edited.program),
            "original": None if self.original is None else self.original.model.hash,
            "factors": self.edited.factors_identity,
        }


def _in_float32(unloaded: EditedModel) -> PreTrainedModel:
    model = unloaded.load("cpu")
    model.float()
    return model


def open_heal_subject(name: str, program: str | None = None, teacher: str | None = None) -> HealSubject:
    """Check what is to be healed; weights are read only for their hashes.

    Args:
        name: a recipe (.yaml), a model with a program of the user's, or an edited checkpoint.
        program: to run in place of the model's own.
        teacher: the original, where it is not the model that the recipe or the program is for.

    Raises:
        FileNotFoundError: if there is no such model or recipe.
        ValueError: if it is damaged, unedited without a program, or the teacher is not what the checkpoint was made of.
    """
    edited = open_edited(name, program)
    companions_at(edited.model.folder)  # what cannot go along is refused before it is trained
    if edited.asked is not None:
        unedited = EditedModel(edited.model.name, edited.model)
        return HealSubject(edited, unedited if teacher is None else _original(teacher, edited))
    path = edited.model.folder / REPORT_FILE
    report = read_json(path) if path.is_file() else None
    if report is None and edited.model.form.shipped is not None:
        raise ValueError(
            f"{name} is edited, and has no {REPORT_FILE} that says of what; heal the recipe, or the model and --program"
        )
    if teacher is None and report is not None and _is_found_by_name(report["source"]["model"]):
        return HealSubject(edited, _made_from(report, edited), report)
    return HealSubject(edited, None if teacher is None else _original(teacher, edited), report)


def _is_found_by_name(model: Any) -> bool:
    """Whether a model can be opened by the name in a report, which says of a folder only the last part."""
    return isinstance(model, str) and (model == DEMO or is_hub_name(model))


def _made_from(report: dict[str, Any], edited: EditedModel) -> EditedModel:
    """The model that a checkpoint was made of."""
    source = report["source"]
    found = _original(source["model"], edited)
    if source.get("model_hash") not in (None, found.model.hash):
        raise ValueError(
            f"{edited.name} was made of {source['model']} with other weights than those that are found under this name "
            f"now; give the original with --teacher"
        )
    return found


def _original(name: str, edited: EditedModel) -> EditedModel:
    found = open_edited(name)
    sizes = [int(each.model.config.vocab_size) for each in (found, edited)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"{name} has {sizes[0]:,} tokens and {edited.name} {sizes[1]:,}; a model is healed towards one of the same "
            "vocabulary"
        )
    return found
