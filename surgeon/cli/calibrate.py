"""`surgeon calibrate`: what this machine can do, as a hardware file for `surgeon predict`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from surgeon.cli.options import CheckpointArgument, DtypeOption, RanksDeviceOption, RoundsOption, parse_counts, several


def calibrate(
    model: CheckpointArgument,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE.yaml", help="The file to write; there must be none yet.")
    ],
    *,
    ranks: Annotated[
        list[str] | None,
        several(
            "--ranks",
            help="Numbers of ranks that are measured, each with all of them at work; 1 among them. Default: 1,2.",
        ),
    ] = None,
    rounds: RoundsOption = 5,
    device: RanksDeviceOption = "auto",
    dtype: DtypeOption = "auto",
) -> None:
    """Measure this machine at a model's shapes, and write a hardware file with intervals.

    Runs the unedited model on real ranks and times the parts of its passes: matrix products by the number of rows,
    attention over the cache, small operations, collectives by size and ranks, what Python takes. Nothing else should
    run meanwhile. Figures are medians over the rounds; the intervals are the least and the largest.

    The file is for this machine and for models of about these shapes: what caches hold, and which part of its peak a
    product reaches, depends on them. Give it to surgeon predict as --hardware FILE.yaml. Ended early, it writes none.
    """
    from surgeon.library.calibrate import calibrate as measure

    measure(model, output, ranks=parse_counts("--ranks", ranks, [1, 2]), rounds=rounds, device=device, dtype=dtype)
    typer.echo(str(output))
