"""How fast what an exploration has found would be: on this machine, and on others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from surgeon.cost.hardware import Hardware
from surgeon.cost.hardware_file import hardware_of, load_hardware
from surgeon.library.check import RANKS
from surgeon.library.predict import Predictions, predict
from surgeon.opened import Model
from surgeon.words import number, plural

HERE = "this-machine.yaml"  # this machine, as it was measured
CALIBRATED = (1, 2)  # ranks
PASSES = 12000  # tokens that one round on so many ranks takes the time of
STARTING = 12.0  # seconds, of the ranks
BATCHES = (1, 8)  # that are predicted


def known_here(measured: Path) -> Hardware | None:
    """This machine, if it has GPUs that are described here or was measured.

    Args:
        measured: the file of that.
    """
    if torch.cuda.is_available() and (name := hardware_of(torch.cuda.get_device_name())):
        return load_hardware(name)
    return load_hardware(measured) if measured.is_file() else None


def predict_on(machine: Hardware, model: Model, knee: Path | None, folder: Path) -> Predictions:
    """What a model, and the program of a recipe over it, would cost on a machine.

    Args:
        folder: for the prediction.

    Raises:
        ValueError: as `predict`.
    """
    most = CALIBRATED[-1] if machine.name == Path(HERE).stem else machine.devices
    axes = {"ranks": [count for count in RANKS if count <= most], "batch": BATCHES}
    compare = [] if knee is None else [knee]
    made = predict(model, machine, compare=compare, sweep=axes, output=folder)
    # Predictions read no weights; here they are known, and the page has it with what was measured of them.
    made = replace(made, record=made.record | {"model_hash": model.hash})
    made.write(folder)
    return made


def fastest(predicted: Predictions) -> str:
    """Where the compared program wins most, or how fast the model is where there is none."""
    table = predicted.speeds[predicted.speeds["fits"] == 1]
    if table.empty:
        return "nothing fits into its memory"
    compared = table[table["program"] != predicted.speeds["program"].iloc[0]]
    by = "tokens_per_second" if compared.empty else "tokens_per_second_speedup"
    best = (table if compared.empty else compared).sort_values(by, ascending=False).iloc[0]
    where = f"on {plural(int(best['ranks']), 'rank')} with batch {int(best['batch'])}"
    if compared.empty:
        return f"{number(float(best[by]), 3)} tokens/s {where}"
    return f"{best['program']}: {number(float(best[by]), 3)} times the model's tokens/s {where}"
