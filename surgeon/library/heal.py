"""`surgeon.heal`: an edited model is trained back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from surgeon.analysis.factors.recipe_factors import with_factors
from surgeon.errors import shown
from surgeon.exports.adapters import export_with_adapter
from surgeon.exports.export import DTYPES
from surgeon.exports.in_memory import check_form
from surgeon.exports.plan import check_storage
from surgeon.exports.staging import check_target
from surgeon.findings.heal import HealRun
from surgeon.language.program import Program
from surgeon.language.recipe import Recipe
from surgeon.library.training import announce, say, say_proof, say_stages
from surgeon.opened import EditedModel, Model
from surgeon.quality.data import window_for
from surgeon.training.arguments import join_processes
from surgeon.training.conversations import in_template, load_texts
from surgeon.training.heal import (
    check_adapter,
    check_shapes,
    identity_of,
    open_to_heal,
    program_to_heal,
    record_of,
    student_of,
    training_of,
)
from surgeon.training.model import RackOptions, train_model
from surgeon.training.packing import Documents
from surgeon.training.resume import run_folder
from surgeon.training.settings import TrainSettings, preset


def heal(
    model: str | Path | Recipe | Model | EditedModel,
    data: str | Path | Mapping[str, float],
    output: str | Path,
    *,
    program: Program | str | None = None,
    teacher: str | Path | Model | None = None,
    settings: TrainSettings | str | None = None,
    racks: RackOptions | None = None,
    racks_by_hand: bool = False,
    tokens: int | None = None,
    eval_data: str | Path | None = None,
    eval_tokens: int | None = None,
    window: int | None = None,
    separator: str | None = None,
    chat_template: str | Path | None = None,
    show_row: bool = False,
    documents: Documents = "joined",
    keep_adapter: bool = False,
    form: str = "auto",
    dtype: str | None = None,
    overwrite: bool = False,
    device: str = "auto",
) -> HealRun | None:
    """Train an edited model until it does again what the original did; a run that was killed goes on where it was.

    Args:
        model: a recipe or its path (.yaml), a checkpoint that surgeon has edited, or a model, by name or open, with a
            program.
        data: text to train on, as `load_windows` takes it, or several texts with their weights, or conversations
            (`surgeon.quality.conversations`).
        output: folder of the healed checkpoint; its run lies beside it, in `output.run`.
        program: to run in place of the model's own.
        teacher: the original, where it is not the model that the recipe or the program is for.
        settings: what is trained, towards what, for how long; a paper's by its name, "lp" or "ladder"; by default the
            edited sublayers on the text.
        racks: train it rack by rack; all weights or norms then.
        racks_by_hand: print how the racks' processes are started, on several machines say, and gather what they came to
            once all are done.
        tokens: training tokens, from the start of the data; by default what the steps need.
        eval_data: text to measure on; by default the end of `data`, which is not trained on.
        eval_tokens: of it, in whole windows; by default 16,384 at most, and a tenth of `data` at most.
        window: tokens in a window.
        separator, documents: what is between documents of the text, and how they share windows: "joined", "apart" or
            "whole" (`surgeon.training.packing`).
        chat_template: a file with the template that conversations are written in, in place of the tokenizer's own.
        show_row: print one row as text, with what is trained on of it between marks.
        keep_adapter: write `output/base` and `output/adapter` in place of a checkpoint with merged adapters.
        form, dtype, overwrite: as `surgeon.export` takes them; by default weights are stored as the original's.
        device: "cpu", "cuda" (one GPU for each process), or "auto".

    Returns:
        What `output.run` holds, with the checkpoint as its file; None in every process but the first, where there are
        several (torchrun, accelerate launch), and where racks are yet to be started by hand.

    Raises:
        FileNotFoundError, ValueError: if the model, a text or the settings cannot be used, or `output.run` is of
            another run.
        NotProven: if what was written does not compute what was trained.
        OSError: if the output is in the way or cannot be written, or the disk is too full.
    """
    if settings is None or isinstance(settings, str):
        values = {"scope": "edited" if racks is None else "all"} if settings is None else preset(settings).values
        settings = TrainSettings(**values)
    if not isinstance(settings, TrainSettings):
        raise ValueError(f"settings are TrainSettings(...), or a paper's by name, not {shown(settings)}")
    target = Path(output)
    check_storage(form, dtype)
    check_target(target, overwrite)
    processes, where = join_processes(device)
    folder = run_folder(target)
    edited, original = open_to_heal(model, program, teacher)
    runs = program_to_heal(edited)
    cut = None if racks is None else racks.cut(runs)
    check_shapes(edited, settings, cut, None if keep_adapter else form)
    size = window_for(edited.model.config, window)
    texts = load_texts(
        in_template(edited.model.tokenizer, chat_template),
        data if isinstance(data, Mapping) else str(data),
        size,
        tokens or settings.tokens_on(size),
        None if eval_data is None else str(eval_data),
        eval_tokens,
        separator,
        documents,
    )
    with processes.main_process_first():
        edited = with_factors(edited, folder / "factors")
    announce(processes, where, settings.method, texts, settings, edited.model.tokenizer, show_row)
    packed = settings.lora is not None  # of a base that stays as it is
    student = student_of(edited, packed)
    if keep_adapter:
        check_adapter(student, settings, runs)
    elif form != "auto":
        check_form(student, form)
    found = train_model(
        student,
        texts,
        settings,
        folder,
        program=runs,
        identity=identity_of(edited, original),
        original=None if original is None else lambda: original.load("cpu", packed).float(),
        racks=cut,
        processes=None if racks is None else racks.process_options,
        by_hand=racks_by_hand,
        device=where,
    )
    if found is None:
        return None
    whole = found.whole
    say(*found.lines())
    say_stages({"original": whole.original, "edited": whole.before, "healed": whole.after})
    record = record_of(edited, original, texts, settings, found)
    if keep_adapter:
        export_with_adapter(whole.model, target, base_of=edited if edited.model.checkpoint.quantised else None)
    else:
        stored = dtype or next((name for name, own in DTYPES.items() if own == edited.model.dtype), "float32")
        training = training_of(edited, record)
        proof = found.write(target, form=form, dtype=stored, overwrite=overwrite, training=training)
        say_proof(proof, "the recipe's")
    found.finish(record)
    return replace(HealRun.read(folder), files=(target,))
