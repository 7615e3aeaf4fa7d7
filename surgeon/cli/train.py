"""`surgeon train`: a model of any program from scratch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from surgeon.cli.options import FormOption, OverwriteOption, ProcessDeviceOption, TrainerArgumentsOption


def train(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG.yaml", help="What to train: architecture, program, text, schedule (see recipes/train/)."
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder of the checkpoint; its run lies in FOLDER.run.")
    ],
    *,
    steps: Annotated[int | None, typer.Option(min=1, help="Of the optimiser, in place of the configuration's.")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of the weights and the order of the text, in its place.")
    ] = None,
    trainer_arg: TrainerArgumentsOption = None,
    form: FormOption = "auto",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option(help="Of the written weights.")
    ] = "float32",
    overwrite: OverwriteOption = False,
    device: ProcessDeviceOption = "auto",
) -> None:
    """Train a model from scratch, from random weights that are the same for every program on an architecture.

    On transformers' Trainer; under accelerate launch or torchrun in several processes. Killed, the same command goes on
    where it was. The result is a checkpoint as surgeon export writes it, which says that it was trained from scratch.
    """
    from surgeon.library.train import train as train_model
    from surgeon.training.arguments import parse_trainer_arguments

    arguments, how = parse_trainer_arguments(trainer_arg or []), {"form": form, "dtype": dtype}
    found = train_model(
        config, output, steps=steps, seed=seed, arguments=arguments, overwrite=overwrite, device=device, **how
    )
    for path in () if found is None else found.files:
        print(path)
