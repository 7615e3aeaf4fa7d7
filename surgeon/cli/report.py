"""The `report` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Folders that explore, scan, similarity, sensitivity, spectrum, search, heal, train, export, eval or "
            "predict wrote.",
            metavar="RUN",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The page, an .html file; replaced if it is there.")
    ] = Path("report.html"),
) -> None:
    """Put what was measured into one HTML page that needs no network and no other file.

    It begins with a summary: which layers can be touched, at which cost, and which cannot. Runs of the same weights
    go together; other models get chapters of their own. Layers count from 0; stretches are named by both their ends.
    """
    from surgeon.library.report import report as write_report

    typer.echo(str(write_report(runs, output)))
