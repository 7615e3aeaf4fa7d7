"""`surgeon train`: a model of any program from scratch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from surgeon.cli.options import FormOption, OverwriteOption, ProcessDeviceOption, TrainerArgumentsOption, several

if TYPE_CHECKING:
    from surgeon.results.result import RunResult


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
    trainer_arg: TrainerArgumentsOption = None,
    form: FormOption = "auto",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option(help="Of the written weights.")
    ] = "float32",
    overwrite: OverwriteOption = False,
    sweep: Annotated[
        bool,
        typer.Option(
            "--sweep",
            help="Train every program, seed and learning rate under the configuration's key sweep, each in a folder of "
            "its own in FOLDER, and compare them.",
        ),
    ] = False,
    device: ProcessDeviceOption = "auto",
) -> None:
    """Train a model from scratch, from random weights that are the same for every program on an architecture.

    On transformers' Trainer; under accelerate launch or torchrun in several processes. Killed, the same command goes on
    where it was. The result is a checkpoint as surgeon export writes it, which says that it was trained from scratch.

    With --sweep, programs, seeds and learning rates beside each other: sweep.csv has a row for each model, summary.csv
    means over seeds and differences from the first program with 95% intervals, curves.png perplexity by tokens.
    """
    from surgeon.library.train import train as train_model
    from surgeon.library.train_sweep import train_sweep
    from surgeon.training.arguments import parse_trainer_arguments
    from surgeon.training.scratch.scale import parse_scale
    from surgeon.training.texts import texts_by_weight

    how: dict[str, Any] = {
        "steps": steps,
        "scale": None if scale is None else parse_scale(scale),
        "tokenizer": tokenizer,
        "data": None if data is None else texts_by_weight(data),
        "eval_data": eval_data,
        "arguments": parse_trainer_arguments(trainer_arg or []),
        "form": form,
        "dtype": dtype,
        "device": device,
    }
    if not sweep:
        found: RunResult | None = train_model(config, output, seed=seed, overwrite=overwrite, **how)
    elif seed is not None:
        raise ValueError("--seed is of one model; write the seeds of a sweep into its configuration: seeds: [0, 1, 2]")
    elif overwrite:
        raise ValueError("--overwrite is of one model; a sweep trains what is not there yet, so choose another folder")
    elif (found := train_sweep(config, output, **how)) is not None:
        print(found)
    for path in () if found is None else found.files:
        print(path)
