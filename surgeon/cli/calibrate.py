"""`surgeon calibrate`: what this machine can do, as a hardware file for `surgeon predict`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from surgeon.cli.options import CheckpointArgument, DtypeOption, RanksDeviceOption

SHORTEST = 64  # tokens: texts are so long that attention over a cache can be told from the rest
LONGEST = 512


def calibrate(
    model: CheckpointArgument,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE.yaml", help="The file to write; there must be none yet.")
    ],
    *,
    ranks: Annotated[
        str, typer.Option(help="Numbers of ranks that are measured, each with all of them at work; 1 among them.")
    ] = "1,2",
    rounds: Annotated[int, typer.Option(min=1, help="How often everything is measured.")] = 5,
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
    from surgeon.checkpoint.load import read_config
    from surgeon.checkpoint.read import Checkpoint
    from surgeon.cost.calibrate import WAYS, MachineCalibration, check_ranks, hardware_text
    from surgeon.cost.shapes import ModelShapes
    from surgeon.progress import progress
    from surgeon.provenance import write_text
    from surgeon.runtime.plan.checks import make_plan
    from surgeon.runtime.processes.ranks import choose_device

    counts = _counts(ranks)
    check_ranks(counts)
    _check_output(output)
    chosen = choose_device(device, max(counts))
    # What a captured graph does cannot be taken apart; on GPUs the same passes are computed without one.
    decoding = "static" if chosen == "cuda" else "auto"
    first = make_plan(model, 1, None, device=chosen, dtype=dtype)
    length = min(LONGEST, first.max_tokens)
    if length < SHORTEST:
        raise ValueError(f"{model} takes texts of {length} tokens at most, and measuring needs {SHORTEST}")
    plans = {count: make_plan(model, count, length, device=chosen, dtype=dtype, decoding=decoding) for count in counts}
    shapes = ModelShapes.of(Path(model).resolve().name, read_config(Checkpoint(first.folder)))
    calibration = MachineCalibration(shapes, plans, chosen, rounds, WAYS[chosen])
    with progress("calibrate", calibration.steps, "measurements") as advance:
        measured = calibration.measure(advance)
    write_text(output, hardware_text(output.stem, calibration, measured))
    typer.echo(str(output))


def _counts(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"--ranks {text!r} is no list of numbers of ranks; write e.g. 1,2")
    return [int(part) for part in parts]


def _check_output(path: Path) -> None:
    """Say what is wrong with the file to write before anything is measured.

    Raises:
        ValueError: if it is no hardware file's name.
        FileExistsError: if there is one.
        OSError: if it cannot be written.
    """
    if path.suffix != ".yaml":
        raise ValueError(f"--output {path} must end in .yaml, by which hardware files are known")
    if path.exists():
        raise FileExistsError(f"{path} is there already; remove it, or write another file")
    with path.open("x"):  # so that a folder that is missing, or not ours, is said now
        pass
    path.unlink()
