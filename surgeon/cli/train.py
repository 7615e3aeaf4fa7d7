"""`surgeon train`: a model of any program from scratch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from surgeon.cli.opening import warn
from surgeon.cli.proofs import proof_line

MOST_SHOWN = 60  # characters of a program

if TYPE_CHECKING:
    from surgeon.training.scratch.build import Blueprint


def train(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG.yaml",
            help="What to train: architecture, program, text, schedule (see recipes/train/).",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="Folder of the checkpoint; its run lies in FOLDER.run.", show_default=False
        ),
    ],
    *,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Of the optimiser, in place of the configuration's.", show_default=False)
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Of the weights and the order of the text, in its place.", show_default=False),
    ] = None,
    trainer_arg: Annotated[
        list[str] | None,
        typer.Option(
            "--trainer-arg",
            metavar="NAME=VALUE",
            help="An argument of transformers' TrainingArguments, e.g. bf16=true, fsdp=true; may be repeated. One that "
            "would do nothing is refused.",
            show_default=False,
        ),
    ] = None,
    form: Annotated[Literal["auto", "plain", "fused", "program"], typer.Option(help="As of surgeon export.")] = "auto",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option(help="Of the written weights.")
    ] = "float32",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing checkpoint.")] = False,
    device: Annotated[
        str, typer.Option(help="cpu, cuda (one GPU for each process), or auto: cuda where there is one.")
    ] = "auto",
) -> None:
    """Train a model from scratch, from random weights that are the same for every program on an architecture.

    On transformers' Trainer; under accelerate launch or torchrun in several processes. Killed, the same command goes on
    where it was. The result is a checkpoint as surgeon export writes it, which says that it was trained from scratch.
    """
    from surgeon.exports.staging import check_target
    from surgeon.training.arguments import describe_devices, join_processes, parse_trainer_arguments
    from surgeon.training.resume import run_folder
    from surgeon.training.scratch.build import blueprint
    from surgeon.training.scratch.config import read_config_file
    from surgeon.training.scratch.run import train_blueprint as run
    from surgeon.training.scratch.write import record_of, story_of, write_trained

    check_target(output, overwrite)
    read = read_config_file(config)
    wanted = blueprint(read.with_settings(steps=steps, seed=seed, arguments=parse_trainer_arguments(trainer_arg or [])))
    processes, where = join_processes(device)
    texts = wanted.texts()
    if processes.is_main_process:
        typer.echo(f"{_what(wanted)}; {texts.line()}", err=True)
        if devices := describe_devices(processes, where):
            typer.echo(devices, err=True)
        warn(texts.notes)
    folder = run_folder(output)
    found = run(wanted, texts, folder, where)
    if found is None:
        return
    for line in found.lines():
        typer.echo(line, err=True)
    story = story_of(wanted, texts, found)
    proof = write_trained(found, wanted, story, output, form, dtype, overwrite)
    typer.echo(proof_line(proof, "the configuration's"), err=True)
    found.finish(folder=folder, record=record_of(output, story))
    print(output)


def _what(wanted: Blueprint) -> str:
    """What is trained, in a few words."""
    program, seed = str(wanted.program), wanted.config.settings.seed
    program = program if len(program) <= MOST_SHOWN else f"{program[: MOST_SHOWN - 3]}..."
    return f"{wanted.family.name} of {wanted.parameters:,} random weights (seed {seed}), program {program}"
