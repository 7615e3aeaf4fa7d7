"""`surgeon.calibrate`: what this machine can do, as a hardware file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from surgeon.cost.calibrate import calibrate as measure
from surgeon.cost.hardware import Hardware
from surgeon.cost.hardware_file import load_hardware
from surgeon.library.opening import check_counts
from surgeon.opened import Model
from surgeon.processes.files import write_text


def calibrate(
    model: str | Path | Model,
    output: str | Path,
    *,
    ranks: int | Sequence[int] = (1, 2),
    rounds: int = 5,
    device: str = "auto",
    dtype: str = "auto",
) -> Hardware:
    """Measure this machine at a model's shapes, and write a hardware file with intervals, which `predict` takes.

    Args:
        model: a checkpoint's folder, a hub name, "demo", or a model that is open.
        output: the file to write, *.yaml; there must be none yet.
        ranks: numbers of ranks that are measured, each with all of them at work; 1 among them.
        rounds: how often everything is measured.
        device, dtype: as `surgeon.generate` takes them.

    Raises:
        FileExistsError: if there is such a file.
        FileNotFoundError, ValueError: if the model cannot be run by these ranks here, or the file is none for hardware.
        OSError: if it cannot be written.
    """
    check_counts(rounds=rounds)
    path, ranks = Path(output), [ranks] if isinstance(ranks, int) else ranks
    if path.suffix.lower() != ".yaml":
        raise ValueError(f"{path} must end in .yaml, by which hardware files are known")
    if path.exists():
        raise FileExistsError(f"{path} is there already; remove it, or write another file")
    with path.open("x"):  # so that a folder that is missing, or not ours, is said now
        pass
    path.unlink()
    write_text(path, measure(path.stem, model, ranks, rounds, device, dtype))
    return load_hardware(path)
