"""Healing: an edited model is trained back. Its sources, its checks, and the record of the result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from surgeon.checkpoint.belongings import companions_of
from surgeon.checkpoint.config import DEMO
from surgeon.checkpoint.describe import Training, layers_by_recipe
from surgeon.checkpoint.forms.fused import FUSED
from surgeon.checkpoint.stored import REPORT_FILE
from surgeon.exports.export import layout_of, source_record
from surgeon.exports.in_memory import stock_model
from surgeon.exports.prove import original_model
from surgeon.exports.unfuse import unfuse
from surgeon.language.program import Program
from surgeon.language.recipe import Recipe
from surgeon.models.edit import decoder_layers, edit, edited_layers
from surgeon.models.edited_layers import EditedLayers
from surgeon.named import hub_name
from surgeon.opened import EditedModel, Model, open_edited
from surgeon.training.racks.build import require_known
from surgeon.training.racks.model import tensors_of
from surgeon.training.racks.partition import Racks
from surgeon.training.racks.task import TrainedModel
from surgeon.training.scope import adapter_targets, shapes_to_train
from surgeon.training.settings import TrainSettings
from surgeon.training.texts import TrainTexts


def open_to_heal(
    what: str | Path | Recipe | Model | EditedModel,
    program: Program | str | None,
    teacher: str | Path | Model | None,
) -> tuple[EditedModel, EditedModel | None]:
    """Open the model to heal and its original, None where that is unknown; weights are read only for their hashes.

    Args:
        what: a recipe or its path (.yaml), a model with a program of the user's, or an edited checkpoint.
        program: to run in place of the model's own.
        teacher: the original, where it is not the model that the recipe or the program is for.

    Raises:
        FileNotFoundError: if there is no such model or recipe.
        ValueError: if it is damaged, unedited without a program, or the teacher is not what the checkpoint was made of.
    """
    edited = open_edited(what, program)
    companions_of(edited.model.folder)  # what cannot go along is refused before it is trained
    if teacher is not None:
        original: EditedModel | None = _open_original(teacher, edited)
    elif edited.asked is not None:
        original = EditedModel(edited.model.name, edited.model)
    else:
        original = None
        source = {} if edited.model.report is None else edited.model.report["source"]
        name = source.get("model")
        # What a checkpoint was made of, where its name finds it.
        if isinstance(name, str) and (name == DEMO or hub_name(name) is not None):
            original = _open_original(name, edited)
            if source.get("model_hash") not in (None, original.model.hash):
                raise ValueError(
                    f"{edited.name} was made of {name} with other weights than those that are found under this name "
                    "now; give the original as the teacher"
                )
    ours = edited.model.form.shipped is not None and not edited.model.checkpoint.imported
    if edited.asked is None and edited.model.report is None and ours:
        raise ValueError(
            f"{edited.name} is edited, and has no {REPORT_FILE} that says of what; heal the recipe, or the model with "
            "its program"
        )
    return edited, original


def _open_original(what: str | Path | Model, edited: EditedModel) -> EditedModel:
    found = open_edited(what)
    sizes = [int(each.model.config.vocab_size) for each in (found, edited)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"{found.name} has {sizes[0]:,} tokens and {edited.name} {sizes[1]:,}; a model is healed towards one of "
            "the same vocabulary"
        )
    return found


def _report(edited: EditedModel) -> dict[str, Any] | None:
    if edited.asked is None:
        return edited.model.report
    return None


def program_to_heal(edited: EditedModel) -> Program:
    """An edited model's program, in the numbers of the original's layers."""
    report = _report(edited)
    if report is None:
        return edited.program
    return Program.parse(report["program"])


def check_shapes(
    edited: EditedModel, settings: TrainSettings, racks: Racks | None, form: str | None
) -> None:
    """Refuse an edit that cannot be trained, or written, before a text or a weight is read for it.

    Args:
        form: to write; None for none.

    Raises:
        ValueError: as the code that trains and writes it.
    """
    model = edited.model
    # An edited checkpoint's own layers decide the form once they are read.
    if edited.asked is None and (model.report is not None or model.form.shipped is not None):
        return
    shapes_to_train(model, edited.program, settings)
    if racks is not None:
        require_known(tensors_of(original_model(model, buffers=False)[0]))
    if form is not None:
        layout_of(model, edited.program, form)


def student_of(edited: EditedModel, packed: bool) -> PreTrainedModel:
    """Load an edited model to be trained, on the CPU, its weights in 32 bits.

    Args:
        packed: keep quantised matrices that are not edited as they are stored, for adapters on them.

    Raises:
        NotProven: if it does not run its program.
        ValueError: if a fused checkpoint's layers cannot be told apart any more.
    """
    is_fused = edited.model.form is FUSED and edited.asked is None
    model = unfuse(edited.model) if is_fused else edited.load("cpu", packed)
    if not isinstance(decoder_layers(model), EditedLayers):
        edit(model, edited.program)
    layers_by_recipe(program_to_heal(edited), stock_model(model).program)  # before it is trained
    model.float()
    return model


def check_adapter(student: PreTrainedModel, settings: TrainSettings, program: Program) -> None:
    """Refuse, before training, what could not be written as a base and an adapter.

    Args:
        program: the student's, in the numbers of the original's layers.

    Raises:
        ValueError: if there are no adapters, some lie on experts, or the edit has sublayers that no layer has.
    """
    if settings.lora is None:
        raise ValueError("an adapter is to be kept, and there is none; train one of some rank (lora)")
    layers = edited_layers(student)
    derived = next(filter(layers.is_derived, layers.program.sublayers()), None)
    if derived is not None:
        raise ValueError(
            f"{derived} is stored as a layer that the model has not while it is trained, so that an adapter does not "
            "fit it; do not keep the adapter, and it is merged"
        )
    _, stacked = adapter_targets(student, settings.scope, program, settings.router)
    if stacked:
        raise ValueError(
            f"adapters would lie on {stacked[0]}, which is a parameter of many experts and no module, so that they "
            "cannot be kept apart; do not keep the adapter, and it is merged"
        )


def identity_of(edited: EditedModel, original: EditedModel | None) -> dict[str, Any]:
    """Identity of an edited model, as JSON values."""
    return {
        "task": "heal",
        "model": edited.model.hash,
        "program": str(edited.program),
        "original": None if original is None else original.model.hash,
        "factors": edited.factors_identity,
    }


def record_of(
    edited: EditedModel,
    original: EditedModel | None,
    texts: TrainTexts,
    settings: TrainSettings,
    found: TrainedModel,
) -> dict[str, Any]:
    """Record of a run, as JSON values, for run.json and the checkpoint."""
    qualities = {
        "original": found.whole.original,
        "edited": found.whole.before,
        "healed": found.whole.after,
    }
    record = (original or edited).model.provenance(
        seed=settings.seed,
        program=str(program_to_heal(edited)),
        recipe=edited.recipe and edited.recipe.to_yaml(),
        **found.record(texts, settings),
        **{name: None if quality is None else quality.to_json() for name, quality in qualities.items()},
    )
    return record | {"model": edited.model.name}


def training_of(edited: EditedModel, record: dict[str, Any]) -> Training:
    """Describe a healed checkpoint's training; its recipe names the model publicly.

    Args:
        record: of the run (`record_of`).
    """
    entries = {
        name: value
        for name, value in record.items()
        if name not in ("command", "model", "recipe", "program")
    }
    model = edited.model
    report = _report(edited)
    if report is not None:
        recipe = report.get("recipe")
        source = report["source"]
        entries |= {"earlier": report["trained"]} if "trained" in report else {}
    else:
        if edited.recipe is None:
            recipe = None
        else:
            recipe = replace(edited.recipe, model=model.public_name).to_yaml()
        source = source_record(model)
    return Training(recipe, program_to_heal(edited), source, entries)
