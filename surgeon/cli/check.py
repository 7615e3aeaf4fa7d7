"""`surgeon check`: what would work with a model, before anything of it is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from surgeon.cli.options import parse_counts, several


def check(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A folder, a config.json, owner/name[@revision], or demo."),
    ],
    ranks: Annotated[
        list[str] | None, several("--ranks", help="Numbers of ranks to look at. Default: 1,2,4,8.")
    ] = None,
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
    from surgeon.library.check import RANKS
    from surgeon.library.check import check as check_model

    found = check_model(model, ranks=parse_counts("--ranks", ranks, RANKS), dtype=dtype, draft=draft, output=output)
    typer.echo(json.dumps(found.to_json(), indent=2) if as_json else str(found))
    if found.refused is not None:
        raise typer.Exit(1)
