"""`surgeon explore`: the first command for a model of one's own."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from surgeon.cli.options import DATA_HELP, DefaultOutputOption, MemoryOption, ModelArgument, SeparatorOption, several


def explore(
    model: ModelArgument,
    data: Annotated[
        str | None, typer.Option("--data", help=DATA_HELP + " Of the kind that the model is for; a few pages will do.")
    ] = None,
    output: DefaultOutputOption = "runs/explore",
    *,
    minutes: Annotated[
        float,
        typer.Option("--minutes", help="After which it stops, with what was measured by then."),
    ] = 10,
    hardware: Annotated[
        list[str] | None,
        several(
            "--hardware",
            metavar="NAME|FILE.yaml",
            help="Predict for this hardware beside what is found here, as surgeon predict does.",
        ),
    ] = None,
    separator: SeparatorOption = None,
    memory: MemoryOption = None,
    open_page: Annotated[
        bool, typer.Option("--open", help="Open the page in a browser at the end, where there is a display.")
    ] = False,
) -> None:
    """Find what a model can spare, within some minutes, and put it on one page with what to do next.

    Goes in rounds, each on more text and finer than the one before, until the minutes are over: a screened scan of
    stretches of layers, what each layer owes to the one before (CKA), and a search for the depth at which quality
    breaks off (the knee); with predictions for the hardware found. The page, explore.html, ends each story with the
    command that goes on with it; knee.yaml is the recipe of the program at the knee.

    Interrupted, the same command goes on where it was; with more --minutes, too.
    """
    from surgeon.library.explore import explore as run

    found = run(model, data, output, minutes=minutes, hardware=hardware or (), separator=separator, memory=memory)
    typer.echo(f"{found}\n")
    typer.echo(str(found.page.file))
    if open_page and not _opened(found.page.file):
        print("there is no display to open it on; copy the file to where there is one", file=sys.stderr)


def _opened(page: Path) -> bool:
    """Open a page in the user's browser; not in one that would take the terminal, where there is no display."""
    import webbrowser

    if sys.platform.startswith("linux") and not any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY"))):
        return False
    return webbrowser.open(page.resolve().as_uri())
