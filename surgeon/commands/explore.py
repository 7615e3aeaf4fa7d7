"""`surgeon explore`, `surgeon.explore`: what a model can spare, the first command for a model of one's own."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from surgeon.commands.command import command, keyword, option
from surgeon.commands.options import DATA_HELP, Memory, ModelName, Output, Separator
from surgeon.words import hang_indent

if TYPE_CHECKING:
    from surgeon.findings.explore import Exploration


@command()
def explore(
    model: ModelName,
    data: Annotated[
        str | Path | None,
        option(DATA_HELP + " Of the kind that the model is for; a few pages will do.", kind=str),
    ] = None,
    output: Output = "runs/explore",
    *,
    minutes: Annotated[float, option("After which it stops, with what was measured by then.")] = 10,
    separator: Separator = None,
    memory: Memory = None,
    say: Annotated[
        Callable[[str], Any] | None,
        keyword("Gets a line about each step as it begins; by default it goes to standard error."),
    ] = None,
) -> Exploration:
    """Find what a model can spare, within some minutes, and put it on one page with what to do next.

    Goes in rounds, each on more text and finer than the one before, until the minutes are over: a screened scan of
    stretches of layers, what each layer owes to the one before (CKA), and a search for the depth at which quality
    breaks off (the knee). The page, explore.html, ends each story with the command that goes on with it; knee.yaml is
    the recipe of the program at the knee.

    Interrupted, the same command goes on where it was; with more --minutes, too.

    Raises:
        FileNotFoundError, ValueError: if model or text cannot be used, the text is too short, or the folder holds
            another exploration.
        OSError: if it cannot be written to.
    """
    from surgeon.commands.check import check
    from surgeon.commands.exploring import Exploring, rounds_for
    from surgeon.opened import open_model
    from surgeon.quality.sources import DEMO

    if not 0 < minutes < math.inf:
        raise ValueError(
            f"minutes must be a number above 0, not {minutes:g}; an exploration takes about 10"
        )
    begun = time.monotonic()
    opened = open_model(model)
    # A model can spare other layers on other kinds of text.
    if data is None and opened.name != DEMO:
        raise ValueError(
            f"no text was given to explore {opened.name} on; give one of the kind that the model is for, a few pages "
            "or more: a UTF-8 file, a .jsonl or .parquet file, a dataset's name, or demo (Python source files)"
        )
    source = DEMO if data is None else str(data)
    checked = check(opened)
    if checked.refusal is not None:
        raise ValueError(checked.refusal)
    rounds = rounds_for(opened, source, separator)
    record = opened.provenance(data=source, separator=separator, minutes=minutes)
    record |= {"memory": memory}
    tell = say or (lambda line: print(hang_indent("", line), file=sys.stderr, flush=True))
    exploring = Exploring(opened, source, checked, Path(output), rounds, record, tell, begun)
    exploring.resume()
    return exploring.run()
