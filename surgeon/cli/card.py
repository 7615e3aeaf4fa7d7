"""`surgeon card`: write an exported checkpoint's model card, with what was measured of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from surgeon.cli.options import ResultsOption


def card(
    checkpoint: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that surgeon export wrote.")],
    results: ResultsOption = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a README.md that you have changed or written yourself, too.")
    ] = False,
) -> None:
    """Write the model card (README.md) of an exported checkpoint, with measurements of it.

    It has the measurements that are given now, and no earlier ones. They must be of this checkpoint's weights, or of
    its source's weights under the same program or unedited: others are refused. A README.md that surgeon did not
    write, or that was changed since, is kept unless you say --overwrite. Prints the file's name.
    """
    from surgeon.checkpoint.inherit import CARD_FILE
    from surgeon.findings.card import identity_of, open_edited, require_own_card, write_card
    from surgeon.findings.measured import Measured, read_measured

    found = open_edited(checkpoint)
    if not overwrite:
        require_own_card(checkpoint)
    measured = read_measured(results, identity_of(found)) if results else Measured()
    write_card(checkpoint, found.name, measured)
    print(checkpoint / CARD_FILE)
