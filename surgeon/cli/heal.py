"""`surgeon heal`: train an edited model back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from surgeon.cli.grouped import grouped
from surgeon.cli.heal_racks import HealRacksArguments
from surgeon.cli.options import (
    DATA_HELP,
    FormOption,
    OverwriteOption,
    ProcessDeviceOption,
    ProgramOption,
    SeparatorOption,
    TrainerArgumentsOption,
    WindowOption,
    several,
)

if TYPE_CHECKING:
    from surgeon.training.distill.distiller import Distillation
    from surgeon.training.settings import TrainSettings

HIDDEN_WEIGHT = 10.0  # of the streams beside the logits: in three of three edits it left a lower divergence than 1


@dataclass(frozen=True)
class HealTextArguments:
    """What is trained and measured on; a group of options (see grouped.py)."""

    data: Annotated[
        list[str],
        several(
            "--data",
            help="Text to train on; as --eval-data, or demo:train (what demo leaves out). Rows with messages, "
            "conversations, or prompt and completion (or chosen) are conversations, of which answers alone are trained "
            "on. Several texts with their shares of the windows: --data A=0.7 --data B=0.3.",
        ),
    ]
    tokens: Annotated[
        int | None, typer.Option(help="Training tokens, from the start of the data. Default: what the steps need.")
    ] = None
    eval_data: Annotated[
        str | None,
        typer.Option("--eval-data", help=DATA_HELP + " Default: the end of --data, which is not trained on."),
    ] = None
    eval_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens to measure on, in whole windows. Default: 16384 at most, and of --data no more than a tenth."
        ),
    ] = None
    window: WindowOption = None
    separator: SeparatorOption = None
    chat_template: Annotated[
        Path | None,
        typer.Option(help="A file with the chat template to write conversations in. Default: the tokenizer's own."),
    ] = None
    show_row: Annotated[
        bool,
        typer.Option("--show-row", help="Print one row as text, with what is trained on of it between brackets."),
    ] = False
    documents: Annotated[
        Literal["joined", "apart", "whole"],
        typer.Option(
            help="How documents share windows: joined: as one running text; apart: positions and attention are each "
            "document's own; whole: as apart, and none is cut that fits a window."
        ),
    ] = "joined"


@dataclass(frozen=True)
class MethodArguments:
    """What is trained, and towards what; a group of options (see grouped.py)."""

    preset: Annotated[
        str | None,
        typer.Option(
            help="A paper's hyperparameters, which other options change: lp (Layer Parallelism, table 2) or ladder "
            "(Ladder Residual, table 4)."
        ),
    ] = None
    train: Annotated[
        Literal["edited", "all", "norms", "edited-norms", "routers"] | None,
        typer.Option(
            help="edited: the sublayers that the edit touches; all: every weight; norms: norms only; edited-norms: "
            "those of edited sublayers only; routers: those of mixtures of experts only. Default: edited."
        ),
    ] = None
    router: Annotated[
        Literal["trained", "frozen"],
        typer.Option(help="Whether routers of mixtures of experts are trained where they are among what is."),
    ] = "trained"
    lora: Annotated[
        int | None, typer.Option(metavar="RANK", help="Train adapters of this rank on the matrices (peft).")
    ] = None
    keep_adapter: Annotated[
        bool, typer.Option("--keep-adapter", help="Write DIR/base and DIR/adapter in place of a merged checkpoint.")
    ] = False
    distill: Annotated[
        Literal["logits", "hidden", "both"] | None,
        typer.Option(
            help="Learn from the original: its predictions (logits), its stream wherever the program's has a "
            "counterpart (hidden), or both. Default: from the text alone."
        ),
    ] = None
    temperature: Annotated[float, typer.Option(help="Of the distilled predictions.")] = 1.0
    text_weight: Annotated[float, typer.Option(help="Weight of the text's own loss beside a distillation's.")] = 0.0
    teacher_top: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            help="Keep the original's K highest predictions of each token on disk once, so that it need not stay in "
            "memory.",
        ),
    ] = None
    teacher: Annotated[
        str | None, typer.Option(help="The original, where it is not the model that the recipe or program is for.")
    ] = None


@dataclass(frozen=True)
class ScheduleArguments:
    """For how long, how fast; a group of options (see grouped.py)."""

    steps: Annotated[int | None, typer.Option(help="Of the optimiser. Default: 1000.")] = None
    epochs: Annotated[float | None, typer.Option(help="Passes over the text, in place of --steps.")] = None
    batch: Annotated[int | None, typer.Option(help="Windows per step, over all processes. Default: 8.")] = None
    micro_batch: Annotated[
        int | None, typer.Option(help="Windows per forward pass of a process. Default: all of its share.")
    ] = None
    learning_rate: Annotated[float | None, typer.Option(help="At its highest. Default: 1e-4, or 1e-3 with --lora.")] = (
        None
    )
    schedule: Annotated[str | None, typer.Option(help="linear, cosine, constant, ... Default: linear.")] = None
    warmup: Annotated[int | None, typer.Option(help="Steps in which the learning rate rises. Default: 0.")] = None
    seed: Annotated[int, typer.Option(help="Of the order of the text, dropout and adapters.")] = 0
    evaluate_every: Annotated[int, typer.Option(help="Steps between measurements on held-out text.")] = 100
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints of the run.")] = 100
    patience: Annotated[
        int | None,
        typer.Option(help="End after so many measurements without a better one, with the best one's weights."),
    ] = None
    trainer_arg: TrainerArgumentsOption = None


@dataclass(frozen=True)
class WrittenArguments:
    """How the result is written; a group of options (see grouped.py)."""

    form: FormOption = "auto"
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Of the written weights. Default: the original's."),
    ] = None
    overwrite: OverwriteOption = False


@grouped
def heal(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|RECIPE|DIR",
            help="What to heal: a recipe (.yaml), a checkpoint that surgeon has edited, or a model with --program.",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder of the healed checkpoint; its run lies in FOLDER.run.")
    ],
    *,
    text: HealTextArguments,
    method: MethodArguments,
    program: ProgramOption = None,
    by_racks: HealRacksArguments,
    schedule: ScheduleArguments,
    written: WrittenArguments,
    device: ProcessDeviceOption = "auto",
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print quality before and after as JSON, acceptance as a draft with it, in place of the folder.",
        ),
    ] = False,
) -> None:
    """Train an edited model until it does again what the original did.

    On transformers' Trainer; under accelerate launch or torchrun in several processes. Killed, the same command goes on
    where it was. The result is a checkpoint as surgeon export writes it, proven to run the same program.
    """
    from surgeon.library.heal import heal as train_back
    from surgeon.training.texts import texts_by_weight

    by_racks.check(method.keep_adapter)
    if method.keep_adapter and method.lora is None:
        raise ValueError("--keep-adapter keeps an adapter, and there is none; add --lora RANK")
    found = train_back(
        model,
        texts_by_weight(text.data),
        output,
        program=program,
        teacher=method.teacher,
        settings=_settings(method, schedule, by_racks.racks is not None),
        racks=by_racks.options(),
        racks_by_hand=by_racks.racks_by_hand,
        keep_adapter=method.keep_adapter,
        device=device,
        **{name: value for name, value in vars(text).items() if name != "data"},
        **vars(written),
    )
    if found is not None and as_json:
        typer.echo(json.dumps({name: found.record[name] for name in ("original", "edited", "healed")}, indent=2))
    for path in () if found is None or as_json else found.files:
        print(path)


def _settings(method: MethodArguments, schedule: ScheduleArguments, by_racks: bool) -> TrainSettings:
    """The run's settings: the preset's, and over them what the user gives; printed where there is a preset."""
    from surgeon.training.arguments import parse_trainer_arguments
    from surgeon.training.settings import TrainSettings, preset

    given: dict[str, Any] = {
        name: getattr(schedule, name)
        for name in ("steps", "epochs", "batch", "micro_batch", "learning_rate", "schedule", "warmup", "patience")
    }
    given |= {
        "scope": method.train,
        "router": method.router,
        "lora": method.lora,
        "distillation": _distillation(method),
    }
    given = {name: value for name, value in given.items() if value is not None}
    if by_racks:
        given.setdefault("scope", "all")
    given |= {name: getattr(schedule, name) for name in ("seed", "evaluate_every", "save_every")}
    given["arguments"] = parse_trainer_arguments(schedule.trainer_arg or [])
    if method.preset is None:
        return TrainSettings(**given)
    chosen = preset(method.preset)
    settings = TrainSettings(**chosen.values | given)
    values = ", ".join(f"{name} {getattr(settings, name)}" for name in chosen.values)
    data = f"; the paper's data is {chosen.data}" if chosen.data else ""
    typer.echo(f"preset {method.preset} ({chosen.source}): {values}{data}", err=True)
    return settings


def _distillation(method: MethodArguments) -> Distillation | None:
    """What is learned from the original."""
    from surgeon.training.distill.distiller import Distillation

    if method.distill is None:
        given = {
            "--temperature": method.temperature != 1.0,
            "--text-weight": method.text_weight != 0.0,
            "--teacher-top": method.teacher_top is not None,
        }
        for name in (name for name, is_given in given.items() if is_given):
            raise ValueError(f"{name} says how to distil, and nothing is distilled; add --distill logits, or drop it")
        return None
    logits, hidden = {"logits": (1.0, 0.0), "hidden": (0.0, 1.0), "both": (1.0, HIDDEN_WEIGHT)}[method.distill]
    return Distillation(logits, hidden, method.text_weight, method.temperature, method.teacher_top)
