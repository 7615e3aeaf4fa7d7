"""`surgeon heal`, `surgeon.heal`: training an edited model back."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, Unpack

from surgeon.commands.command import command, later, option, several
from surgeon.commands.options import (
    DATA_HELP,
    Form,
    Overwrite,
    ProcessDevice,
    ProgramText,
    Separator,
    TrainerArguments,
    Window,
)

if TYPE_CHECKING:
    from surgeon.findings.training import HealRun
    from surgeon.language.recipe import Recipe
    from surgeon.opened import EditedModel, Model
    from surgeon.training.racks.run import RackOptions
    from surgeon.training.settings import TrainSettings

# Weight of the streams beside the logits: in three of three edits it left a lower divergence than 1.
HIDDEN_WEIGHT = 10.0


class TrainFlags(TypedDict, total=False):
    """Settings of a training run."""

    router: Annotated[
        Literal["trained", "frozen"],
        option(
            "Whether routers of mixtures of experts are trained where they are among what is.",
            default="trained",
        ),
    ]
    lora: Annotated[
        int | None, option("Train adapters of this rank on the matrices (peft).", metavar="RANK")
    ]
    steps: Annotated[int | None, option("Of the optimiser. Default: 1000.")]
    epochs: Annotated[float | None, option("Passes over the text, in place of --steps.")]
    batch: Annotated[int | None, option("Windows per step, over all processes. Default: 8.")]
    micro_batch: Annotated[
        int | None, option("Windows per forward pass of a process. Default: all of its share.")
    ]
    learning_rate: Annotated[float | None, option("At its highest. Default: 1e-4, or 1e-3 with --lora.")]
    schedule: Annotated[str | None, option("linear, cosine, constant, ... Default: linear.")]
    warmup: Annotated[int | None, option("Steps in which the learning rate rises. Default: 0.")]
    seed: Annotated[
        int, option("Of the order of the text, dropout, adapters, and text of --data self.", default=0)
    ]
    evaluate_every: Annotated[int, option("Steps between measurements on held-out text.", default=100)]
    save_every: Annotated[int, option("Steps between checkpoints of the run.", default=100)]
    patience: Annotated[
        int | None,
        option("End after so many measurements without a better one, with the best one's weights."),
    ]


def settings_of(
    preset: Annotated[
        str | None,
        option(
            "A paper's hyperparameters, which other options change: lp (Layer Parallelism, table 2) or ladder (Ladder "
            "Residual, table 4)."
        ),
    ] = None,
    train: Annotated[
        Literal["edited", "all", "norms", "edited-norms", "routers"] | None,
        option(
            "edited: the sublayers that the edit touches; all: every weight; norms: norms only; edited-norms: those of "
            "edited sublayers only; routers: those of mixtures of experts only. Default: edited."
        ),
    ] = None,
    distill: Annotated[
        Literal["logits", "hidden", "both"] | None,
        option(
            "Learn from the original: its predictions (logits), its stream wherever the program's has a counterpart "
            "(hidden), or both. Default: from the text alone."
        ),
    ] = None,
    temperature: Annotated[float, option("Of the distilled predictions.")] = 1.0,
    text_weight: Annotated[
        float, option("Weight of the text's own loss beside a distillation's.")
    ] = 0.0,
    teacher_top: Annotated[
        int | None,
        option(
            "Keep the original's K highest predictions of each token on disk once, so that it need not stay in memory.",
            metavar="K",
        ),
    ] = None,
    trainer_arg: TrainerArguments = None,
    *,
    by_racks: bool,
    **flags: Unpack[TrainFlags],
) -> TrainSettings:
    """The preset's settings, which a line names, and over them the user's."""
    from surgeon.training import settings as known
    from surgeon.training.settings import Distillation, parse_trainer_arguments

    given: dict[str, Any] = {**flags}
    if train is not None or by_racks:
        given["scope"] = train or "all"
    useless = {
        "--temperature": temperature != 1.0,
        "--text-weight": text_weight != 0.0,
        "--teacher-top": teacher_top is not None,
    }
    if distill is not None:
        weights = {"logits": (1.0, 0.0), "hidden": (0.0, 1.0), "both": (1.0, HIDDEN_WEIGHT)}[distill]
        given["distillation"] = Distillation(*weights, text_weight, temperature, teacher_top)
    elif any(useless.values()):
        name = next(name for name, is_given in useless.items() if is_given)
        raise ValueError(
            f"{name} says how to distil, and nothing is distilled; add --distill logits, or drop it"
        )
    given["arguments"] = parse_trainer_arguments(trainer_arg)
    if preset is None:
        return known.TrainSettings(**given)
    chosen = known.preset(preset)
    values = chosen.values | given
    for name, other in (("steps", "epochs"), ("epochs", "steps")):
        if name in given and other not in given:
            values.pop(other, None)  # of the paper's, which the user's replaces
    settings = known.TrainSettings(**values)
    said = ", ".join(
        f"{name} {values[name]}" for name in values if name in (*chosen.values, "steps", "epochs")
    )
    data = f"; the paper's data is {chosen.data}" if chosen.data else ""
    print(f"preset {preset} ({chosen.source}): {said}{data}", file=sys.stderr)
    return settings


def racks_of(
    racks: Annotated[
        Sequence[str],
        several(
            "Cut the model by depth into racks (0:8,8:16 are layers 0 to 7 and 8 to 15), each trained by a loss "
            "of its own; no gradient goes from one to another. All weights are trained. With --distill both each rack "
            "learns the original's streams, which heals far better than the text does.",
            metavar="RANGES",
        ),
    ] = (),
    coda: Annotated[
        int | None,
        option(
            "With --racks: private layers that every rack but the last predicts with, begun as copies of the model's "
            "last ones and kept beside the checkpoint. Default: 1.",
            metavar="LAYERS",
        ),
    ] = None,
    rack_processes: Annotated[
        bool,
        option(
            "Train all racks at once, each in a process of its own, and start them again where one is killed. By "
            "default one after the other, with the same result."
        ),
    ] = False,
    average: Annotated[
        str,
        option(
            "With --rack-processes: average the codas over the racks every N steps, or after each one.",
            metavar="never|N|always",
        ),
    ] = "never",
    rack_ahead: Annotated[
        int, option("With --rack-processes: micro-batches that a rack may be ahead of the next one.")
    ] = 4,
    rack_replicas: Annotated[
        int,
        option(
            "With --rack-processes: processes that share each rack's batches; the result is that of one, up to "
            "rounding."
        ),
    ] = 1,
    *,
    by_hand: bool,
) -> RackOptions | None:
    """The cut into racks, and their training; None without racks."""
    from surgeon.training.racks.run import RackOptions

    processes = rack_processes or by_hand
    for name, is_given, needed, is_there in (
        ("--coda", coda is not None, "--racks", racks),
        ("--rack-processes", processes, "--racks", racks),
        ("--average", average != "never", "--rack-processes", processes),
        ("--rack-replicas", rack_replicas != 1, "--rack-processes", processes),
    ):
        if is_given and not is_there:
            raise ValueError(f"{name} is for {needed}, which is not there; add {needed}, or drop it")
    if not racks:
        return None
    return RackOptions(
        [*racks], 1 if coda is None else coda, processes, average, rack_ahead, rack_replicas
    )


def _show(
    call: partial[HealRun | None],
    settings: Annotated[Any, option("", made_by=later(settings_of))] = None,
    racks: Annotated[Any, option("", made_by=later(racks_of))] = None,
    as_json: Annotated[
        bool,
        option(
            "Print quality before and after as JSON, acceptance as a draft with it, in place of the folder.",
            "--json",
        ),
    ] = False,
) -> None:
    cut = racks(by_hand=call.keywords["racks_by_hand"])
    keeps_adapter = call.keywords["keep_adapter"]
    if cut is not None and keeps_adapter:
        raise ValueError("--racks trains the weights themselves; leave --keep-adapter out")
    if keeps_adapter and "lora" not in settings.keywords:
        raise ValueError("--keep-adapter keeps an adapter, and there is none; add --lora RANK")
    found = call(settings=settings(by_racks=cut is not None), racks=cut)
    if found is None:
        return
    if as_json:
        print(
            json.dumps({name: found.record[name] for name in ("original", "edited", "healed")}, indent=2)
        )
        return
    for path in found.files:
        print(path)


@command(_show)
def heal(
    model: Annotated[
        str | Path | Recipe | Model | EditedModel,
        option(
            "What to heal: a recipe (.yaml), a checkpoint that surgeon has edited, or a model with --program.",
            metavar="MODEL|RECIPE|DIR",
        ),
    ],
    data: Annotated[
        str | Path | Sequence[str] | Mapping[str, float],
        several(
            "Text to train on; as --eval-data, or demo:train (what demo leaves out). Rows with messages, "
            "conversations, or prompt and completion (or chosen) are conversations, of which answers alone are trained "
            "on. Several texts with their shares of the windows: --data A=0.7 --data B=0.3. self: the original "
            "writes the text itself, and its predictions are learned (by racks also its streams) unless --distill says "
            "otherwise.",
            "--data",
        ),
    ],
    output: Annotated[
        str | Path,
        option("Folder of the healed checkpoint; its run lies in FOLDER.run.", "--output", "-o"),
    ],
    *,
    tokens: Annotated[
        int | None, option("Training tokens, from the start of the data. Default: what the steps need.")
    ] = None,
    eval_data: Annotated[
        str | Path | None,
        option(DATA_HELP + " Default: the end of --data, which is not trained on.", kind=str),
    ] = None,
    eval_tokens: Annotated[
        int | None,
        option(
            "Tokens to measure on, in whole windows. Default: 16384 at most, and of --data no more than a tenth.",
            least=2,
        ),
    ] = None,
    self_temperature: Annotated[
        float,
        option(
            "At which the original draws the text of --data self: at 1 what it holds likely, as often; below that less "
            "varied text."
        ),
    ] = 1.0,
    window: Window = None,
    separator: Separator = None,
    chat_template: Annotated[
        str | Path | None,
        option("A file with the chat template to write conversations in. Default: the tokenizer's own."),
    ] = None,
    show_row: Annotated[
        bool, option("Print one row as text, with what is trained on of it between brackets.")
    ] = False,
    documents: Annotated[
        Literal["joined", "apart", "whole"],
        option(
            "How documents share windows: joined: as one running text; apart: positions and attention are each "
            "document's own; whole: as apart, and none is cut that fits a window."
        ),
    ] = "joined",
    settings: Annotated[
        TrainSettings | str | None,
        option(
            "What is trained, towards what, for how long; a paper's by its name, lp or ladder; by default the edited "
            "sublayers on the text.",
            made_by=settings_of,
        ),
    ] = None,
    keep_adapter: Annotated[
        bool, option("Write DIR/base and DIR/adapter in place of a merged checkpoint.")
    ] = False,
    teacher: Annotated[
        str | Path | Model | None,
        option("The original, where it is not the model that the recipe or program is for."),
    ] = None,
    program: ProgramText = None,
    racks: Annotated[
        RackOptions | None,
        option(
            "How it is cut into racks and trained one by one; all weights or norms then.",
            made_by=racks_of,
        ),
    ] = None,
    racks_by_hand: Annotated[
        bool,
        option(
            "Prepare processes that are started by hand, on several machines say, and print their commands; given "
            "again when all are done, gather the result."
        ),
    ] = False,
    form: Form = "auto",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        option("Of the written weights. Default: the original's."),
    ] = None,
    overwrite: Overwrite = False,
    device: ProcessDevice = "auto",
) -> HealRun | None:
    """Train an edited model until it does again what the original did.

    On transformers' Trainer; under accelerate launch or torchrun in several processes. Killed, the same command goes on
    where it was. The result is a checkpoint as surgeon export writes it, proven to run the same program.

    Returns:
        The run in `output.run`, with the checkpoint as its file; None in every process but the first (torchrun,
        accelerate launch), and where racks are yet to be started by hand.

    Raises:
        FileNotFoundError, ValueError: if model, text or settings cannot be used, or `output.run` is of another run.
        NotProven: if the checkpoint does not compute what was trained.
        OSError: if the output is in the way or cannot be written.
    """
    from surgeon.analysis.factors.make_factors import with_factors
    from surgeon.exports.export import DTYPES, check_storage, check_target
    from surgeon.exports.in_memory import check_form, export_with_adapter
    from surgeon.findings.training import HealRun
    from surgeon.quality.data import window_for
    from surgeon.training.model import (
        announce,
        check_adapter,
        check_shapes,
        finish,
        identity_of,
        open_to_heal,
        program_to_heal,
        record_of,
        say,
        say_proof,
        say_stages,
        student_of,
        train_model,
        training_of,
    )
    from surgeon.training.run import check_settings_kept, run_folder
    from surgeon.training.self_text import SelfText
    from surgeon.training.settings import join_processes
    from surgeon.training.texts import load_texts, parse_texts, with_chat_template
    from surgeon.training.token_store import SELF

    by_weight = parse_texts(data)
    is_own = SELF in ([by_weight] if isinstance(by_weight, str) else by_weight)
    how = _settings(settings, racks is not None, is_own, tokens)
    _check_self(is_own, self_temperature, eval_data, separator if by_weight == SELF else None)
    target = Path(output)
    check_storage(form, dtype)
    check_target(target, overwrite)
    processes, where = join_processes(device)
    folder = run_folder(target)
    edited, original = open_to_heal(model, program, teacher)
    runs = program_to_heal(edited)
    check_shapes(edited, how, racks, None if keep_adapter else form)
    size = window_for(edited.model.config, window)
    tokenizer = with_chat_template(edited.model.tokenizer, chat_template)
    own = None
    if is_own:
        if original is None:
            raise ValueError(
                "the original is to write the text, and is not known; name it as the teacher"
            )
        own = SelfText(
            original,
            tokenizer,
            size,
            folder / "self",
            documents,
            seed=how.seed,
            temperature=self_temperature,
            device=where,
        )
        if racks is None:  # which takes longest
            check_settings_kept(folder, how)
    texts = load_texts(
        tokenizer,
        by_weight,
        size,
        tokens or how.tokens_on(size),
        None if eval_data is None else str(eval_data),
        eval_tokens,
        separator,
        documents,
        own=own,
    )
    if own is not None and processes.is_main_process:
        say(own.line())
    with processes.main_process_first():
        edited = with_factors(edited, folder / "factors")
    announce(processes, where, how.method, texts, how, edited.model.tokenizer, show_row)
    packed = how.lora is not None  # of a base that stays as it is
    student = student_of(edited, packed)
    if keep_adapter:
        check_adapter(student, how, runs)
    elif form != "auto":
        check_form(student, form)
    found = train_model(
        student,
        texts,
        how,
        folder,
        program=runs,
        identity=identity_of(edited, original),
        original=None if original is None else lambda: original.load("cpu", packed).float(),
        racks=racks,
        by_hand=racks_by_hand,
        device=where,
    )
    if found is None:
        return None
    whole = found.whole
    say(*found.lines())
    say_stages({"original": whole.original, "edited": whole.before, "healed": whole.after})
    record = record_of(edited, original, texts, how, found)
    if own is not None:
        record |= {"written": own.record(), "method": f"{record['method']}; the original wrote self"}
    if keep_adapter:
        export_with_adapter(
            whole.model, target, base_of=edited if edited.model.checkpoint.quantised else None
        )
    else:
        stored: Any = dtype or next(
            (name for name, own in DTYPES.items() if own == edited.model.dtype), "float32"
        )
        training = training_of(edited, record)
        proof = found.write(target, form=form, dtype=stored, overwrite=overwrite, training=training)
        say_proof(proof, "the recipe's")
    finish(found, record)
    return replace(HealRun.read(folder), files=(target,))


def _check_self(
    is_own: bool, temperature: float, eval_data: str | Path | None, separator: str | None
) -> None:
    if temperature != 1.0 and not is_own:
        raise ValueError(
            "self_temperature is of text that the original writes; train on self, or leave it out"
        )
    if eval_data is not None and str(eval_data) == "self":
        raise ValueError(
            "self is written to train on, and by default the end of it is held out; name no text for that"
        )
    if separator is not None and eval_data is None:
        raise ValueError("a separator divides text that is read, and self is written; leave it out")


def _settings(
    asked: TrainSettings | str | None, by_racks: bool, is_own: bool, tokens: int | None
) -> TrainSettings:
    """Settings of a run; on a text of its own towards the original's predictions, of racks also its streams."""
    from surgeon.training.settings import Distillation, TrainSettings, preset

    if isinstance(asked, str):
        how = TrainSettings(**preset(asked).values)
    elif asked is None:
        how = TrainSettings(scope="all" if by_racks else "edited")
    else:
        how = asked
    if not is_own:
        return how
    if how.epochs is not None and tokens is None:
        raise ValueError(
            "epochs go through a text, and the original writes as much as is asked for; say how much by tokens, or "
            "give steps in place of epochs"
        )
    hidden = HIDDEN_WEIGHT if by_racks else 0.0
    return replace(how, distillation=how.distillation or Distillation(hidden=hidden))
