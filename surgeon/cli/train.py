"""`surgeon train`: a model of any program from scratch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from surgeon.cli.options import FormOption, OverwriteOption, ProcessDeviceOption, TrainerArgumentsOption, several


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
    scale: Annotated[
        str | None,
        typer.Option(
            metavar="1/64",
            help="The same shape, small: all widths times this, as many layers, heads and steps, as many tokens for "
            "each parameter, in windows of 128 or more; the vocabulary is the tokenizer's. With --steps the warm-up "
            "keeps its share.",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="A folder, a hub name or demo, in place of the configuration's.")
    ] = None,
    data: Annotated[
        list[str] | None,
        several("--data", help="Text to train on in its place, as surgeon heal takes it, e.g. demo:train."),
    ] = None,
    eval_data: Annotated[str | None, typer.Option(help="Held-out text in its place, e.g. demo.")] = None,
    show_row: Annotated[
        bool, typer.Option("--show-row", help="Print one row of the text, with what is trained on between brackets.")
    ] = False,
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
    from surgeon.training.scratch.scale import parse_scale
    from surgeon.training.texts import texts_by_weight

    found = train_model(
        config,
        output,
        steps=steps,
        seed=seed,
        scale=None if scale is None else parse_scale(scale),
        tokenizer=tokenizer,
        data=None if data is None else texts_by_weight(data),
        eval_data=eval_data,
        arguments=parse_trainer_arguments(trainer_arg or []),
        form=form,
        dtype=dtype,
        overwrite=overwrite,
        show_row=show_row,
        device=device,
    )
    for path in () if found is None else found.files:
        print(path)
