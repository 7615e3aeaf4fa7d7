"""`surgeon check`: what would work with a model, before anything of it is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def check(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A folder, a config.json, owner/name[@revision], or demo."),
    ],
    ranks: Annotated[str, typer.Option(help="Numbers of ranks to look at, by commas.")] = "1,2,4,8",
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="[float32|bfloat16|float16]", help="What ranks compute in. Default: as the weights are stored."
        ),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="[RECIPE|PROGRAM|VARIANT|FOLDER]",
            help="Whether this can draft for it (--draft of surgeon generate and serve), and on which ranks.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object for each answer.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder for check.csv and check.json.")] = None,
) -> None:
    """Say what would work with a model, what not and why, and how much memory each would take.

    In seconds, of a config.json alone: programs of every operation are put to the code that would refuse them later, on
    the shapes of the model's tensors. Nothing is loaded, and of a hub name the configuration alone is fetched. Of an
    architecture that surgeon does not know it says which one is nearest and what is otherwise; the exit status is then
    1, as it is where a file cannot be read.
    """
    try:
        numbers = [int(one) for one in ranks.split(",")]
    except ValueError as error:
        raise ValueError(f"--ranks are numbers with commas between, as in 1,2,4, not {ranks!r}") from error
    from surgeon.library.check import check as check_model

    found = check_model(model, ranks=numbers, dtype=dtype, draft=draft, output=output)
    typer.echo(json.dumps(found.to_json(), indent=2) if as_json else str(found))
    if found.refused is not None:
        raise typer.Exit(1)
