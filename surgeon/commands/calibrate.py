"""`surgeon calibrate`, `surgeon.calibrate`: this machine as a hardware file for `surgeon predict`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from surgeon.commands.command import command, option, several
from surgeon.commands.options import Checkpoint, Dtype, RanksDevice, Rounds

if TYPE_CHECKING:
    from surgeon.cost.hardware import Hardware


def _show(call: partial[Hardware]) -> None:
    call()
    print(call.keywords["output"])


@command(_show)
def calibrate(
    model: Checkpoint,
    output: Annotated[
        str | Path,
        option("The file to write; there must be none yet.", "--output", "-o", metavar="FILE.yaml"),
    ],
    *,
    ranks: Annotated[
        int | Sequence[int],
        several(
            "Numbers of ranks that are measured, each with all of them at work; 1 among them. Default: 1,2."
        ),
    ] = (1, 2),
    rounds: Rounds = 5,
    device: RanksDevice = "auto",
    dtype: Dtype = "auto",
) -> Hardware:
    """Measure this machine at a model's shapes, and write a hardware file.

    Times, on real ranks, matrix products of the model's sizes by rows, collectives by size and ranks, and whole passes
    of the unedited model. Nothing else should run meanwhile. Figures are medians over the rounds.

    The file is for this machine and for models of about these shapes: what caches hold, and which part of its peak a
    product reaches, depends on them. Give it to surgeon predict as --hardware FILE.yaml. Ended early, it writes none.

    Raises:
        FileExistsError: if there is such a file.
        FileNotFoundError, ValueError: if the model cannot be run by these ranks, or the file's name has another ending.
        OSError: if it cannot be written.
    """
    from surgeon.commands.command import as_several
    from surgeon.cost.calibrate import calibrate as measure
    from surgeon.cost.hardware import load_hardware
    from surgeon.processes.files import write_text

    path = Path(output)
    if path.suffix.lower() != ".yaml":
        raise ValueError(f"{path} must end in .yaml, by which hardware files are known")
    if path.exists():
        raise FileExistsError(f"{path} is there already; remove it, or write another file")
    with path.open("x"):  # so that a folder that is missing, or not ours, is said now
        pass
    path.unlink()
    write_text(path, measure(path.stem, model, as_several(ranks), rounds, device, dtype))
    return load_hardware(path)
