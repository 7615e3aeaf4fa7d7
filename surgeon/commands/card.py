"""`surgeon card`: write an exported checkpoint's model card, with what was measured of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from surgeon.commands.command import command, option
from surgeon.commands.options import Results

if TYPE_CHECKING:
    from surgeon.findings.measured import CardScore


@command()
def card(
    checkpoint: Annotated[str | Path, option("A folder that surgeon export wrote.", metavar="DIR")],
    results: Results = (),
    overwrite: Annotated[bool, option("Replace a README.md that you have changed or written yourself, too.")] = False,
) -> Path:
    """Write the model card (README.md) of an exported checkpoint, with measurements of it.

    It has the measurements that are given now, and no earlier ones. They must be of this checkpoint's weights, or of
    its source's weights under the same program or unedited: others are refused. A README.md that surgeon did not
    write, or that was changed since, is kept unless you say --overwrite. Prints the file's name.
    """
    from surgeon.checkpoint.belongings import CARD_FILE
    from surgeon.commands.opening import as_list
    from surgeon.findings.card import identity_of, open_edited, require_own_card, write_card
    from surgeon.findings.measured import read_measured

    folder = Path(checkpoint)
    found = open_edited(folder)
    if not overwrite:
        require_own_card(folder)
    measured: Sequence[CardScore] = ()
    if results:
        measured = read_measured([*map(Path, as_list(results))], identity_of(found))
    write_card(folder, found.name, measured)
    return folder / CARD_FILE
