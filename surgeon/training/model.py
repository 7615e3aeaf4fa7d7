"""Training of a whole model, at once or rack by rack: what is healed, its checks, messages, and the record."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import PartialState
from transformers import PreTrainedModel

from surgeon.checkpoint.belongings import companions_of
from surgeon.checkpoint.config import DEMO
from surgeon.checkpoint.describe import Training, layers_by_recipe
from surgeon.checkpoint.forms.fused import FUSED
from surgeon.checkpoint.stored import REPORT_FILE
from surgeon.exports.export import layout_of, source_record
from surgeon.exports.in_memory import stock_model
from surgeon.exports.prove import Proof, original_model
from surgeon.exports.unfuse import unfuse
from surgeon.language.program import Program
from surgeon.language.recipe import Recipe
from surgeon.models.edit import EditedLayers, decoder_layers, edit, edited_layers
from surgeon.named import hub_name
from surgeon.opened import EditedModel, Model, open_edited
from surgeon.quality.summary import Quality
from surgeon.training.racks.model import require_known
from surgeon.training.racks.process import commands_by_hand, prepare, train_in_processes
from surgeon.training.racks.run import RackOptions, RacksToTrain, finish_racks, train_in_turn
from surgeon.training.run import TrainedModel, finish_run, train
from surgeon.training.scope import adapter_targets, shapes_to_train
from surgeon.training.settings import TrainSettings, describe_devices
from surgeon.training.texts import TrainingText, TrainTexts
from surgeon.training.token_store import IGNORED


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
    edited: EditedModel, settings: TrainSettings, racks: RackOptions | None, form: str | None
) -> None:
    """Refuse an edit that cannot be trained, or written, before a text or a weight is read for it.

    Args:
        form: to write; None for none.

    Raises:
        ValueError: as the code that trains and writes it.
    """
    model = edited.model
    if racks is not None:
        racks.cut(program_to_heal(edited))
    # An edited checkpoint's own layers decide the form once they are read.
    if edited.asked is None and (model.report is not None or model.form.shipped is not None):
        return
    shapes_to_train(model, edited.program, settings)
    if racks is not None:
        require_known(original_model(model, buffers=False)[0])
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


def train_model(
    model: PreTrainedModel,
    texts: TrainTexts,
    settings: TrainSettings,
    folder: Path,
    *,
    program: Program,
    identity: Mapping[str, Any],
    original: Callable[[], PreTrainedModel] | None = None,
    racks: RackOptions | None,
    by_hand: bool = False,
    seed: int | None = None,
    device: str,
) -> TrainedModel | None:
    """Train a model as `surgeon.training.run.train` does, or its racks; a run that was killed resumes.

    Args:
        racks: how it is cut into racks and trained by them; None for at once.
        by_hand: print how the processes of racks are started by hand, unless they are done.
        seed: of the codas' first numbers; None for copies of the model's last layers.

    Returns:
        None in all processes but the first, and where racks are yet to be started by hand.

    Raises:
        ValueError, OSError: as `train`, `train_in_turn` and `train_in_processes`.
    """
    if racks is None:
        one = train(model, texts, settings, folder, original, program, dict(identity), device)
        if one is None:
            return None
        return TrainedModel(one, folder, settings.method)
    cut = racks.cut(program)
    asked = RacksToTrain(model, cut, texts, settings, folder, original, identity, seed, device)
    if by_hand and (commands := commands_by_hand(folder, prepare(asked, racks))):
        print(*commands, sep="\n")
        return None
    if racks.processes or by_hand:
        return train_in_processes(asked, racks)
    return train_in_turn(asked)


def finish(found: TrainedModel, record: dict[str, Any]) -> None:
    """Complete a run's record and remove what only the run needed, once the checkpoint is written."""
    if found.racks is None:
        finish_run(found.folder, record)
    else:
        finish_racks(found.folder, found.racks, record)


_MARKS = ("\u27e6", "\u27e7")  # white square brackets, around what is learned
_ROWS_AT_ONCE = 1000


def learned_lines(text: TrainingText, tokenizer: Any, show_row: bool = False) -> list[str]:
    """Describe how many tokens of a text are learned, where not all but the first of each window are.

    Args:
        show_row: add the first row, as text with what is learned of it between brackets.
    """
    lines = []
    if "labels" in text.rows.column_names:
        blocks = text.rows.select_columns("labels").with_format("numpy").iter(_ROWS_AT_ONCE)
        learned = sum(int((block["labels"] != IGNORED).sum()) for block in blocks)
        total = len(text) * text.window
        lines.append(f"of the {total:,} tokens to train on, padding among them, {learned:,} are learned")
    if show_row:
        row = text.rows.with_format("numpy")[0]
        ids = row["input_ids"]
        in_loss = row.get("labels", row["input_ids"]) != IGNORED
        if "position_ids" in row:
            begins = np.flatnonzero(row["position_ids"] == 0)
        else:
            begins = np.zeros(1, int)
        end = begins[1] if len(begins) > 1 else len(ids)
        # From what is learned to what is not, and back.
        turns = np.flatnonzero(np.diff(in_loss[:end])) + 1
        parts = [
            (tokenizer.decode(ids[first:last]), in_loss[first])
            for first, last in pairwise([0, *turns, end])
        ]
        lines += [
            f"one row, what is learned of it between {' '.join(_MARKS)}:",
            "".join(
                f"{_MARKS[0]}{part}{_MARKS[1]}" if is_learned else part for part, is_learned in parts
            ),
        ]
    return lines


def announce(
    processes: PartialState,
    where: str,
    what: str,
    texts: TrainTexts,
    settings: TrainSettings,
    tokenizer: Any,
    show_row: bool = False,
) -> None:
    """Print once for all processes what is trained on what, and warn of notes on the texts."""
    # Refuses too little text, in every process.
    notes = (*texts.notes, *settings.notes_on(len(texts.training)))
    if processes.is_main_process:
        learned = learned_lines(texts.training, tokenizer, show_row)
        say(f"{what}; {texts.line()}", *learned, describe_devices(processes, where))
        for note in notes:
            warnings.warn(note, stacklevel=1)


def say_stages(stages: Mapping[str, Quality | None]) -> None:
    """Print the model's quality at each stage."""
    width = max(map(len, stages))
    say(
        *(
            f"{stage:<{width}} {quality.line()}"
            for stage, quality in stages.items()
            if quality is not None
        )
    )


def say_proof(proof: Proof, whose: str) -> None:
    """Print a proof; `whose` the program is."""
    say(
        f"proof: the program is {whose}; on {proof.tokens} random tokens the logits differ from the trained "
        f"model's {proof.differ}."
    )


def say(*lines: str) -> None:
    """Print lines on standard error, without empty ones."""
    for line in filter(None, lines):
        print(line, file=sys.stderr, flush=True)
