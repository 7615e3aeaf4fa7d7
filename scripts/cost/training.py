"""Predict what a step of a training from scratch costs: a markdown table, by default of recipes/train/papers/.

    python scripts/cost/training.py [CONFIG.yaml ...] [--hardware h100-sxm] [--devices 8 64]

Nothing is read but the configurations: the demo's tokenizer stands in for each one's, and vocabularies are as they say.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from scripts.cost.training_cost import TrainingLoad, TrainingStep, training_step
from surgeon.cost.hardware import Hardware
from surgeon.cost.hardware_file import load_hardware
from surgeon.language.program import Program
from surgeon.models.shapes import ModelShapes
from surgeon.training.scratch.build import Blueprint, blueprint
from surgeon.training.scratch.config import read_config_file
from surgeon.training.settings import DEFAULT_STEPS

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "train" / "papers"


def predict(config: Path, machine: Hardware, devices: Sequence[int]) -> list[tuple[TrainingStep, int]]:
    """Predict a step of a configuration's training for each number of devices, and count its steps.

    Racks train at the same time, each on its share of the devices: the step is that of one with a coda.

    Raises:
        ValueError: if the racks do not divide the devices.
    """
    plan = blueprint(replace(read_config_file(config), tokenizer="demo"))
    load = load_of(plan)
    racks = 1 if plan.racks is None else len(plan.racks)
    for number in devices:
        if number < 1 or number % racks:
            raise ValueError(f"{number} devices do not divide among {racks} racks; take a multiple of {racks}")
    steps = plan.config.settings.steps or DEFAULT_STEPS
    return [(training_step(load, machine, number // racks), steps) for number in devices]


def load_of(plan: Blueprint) -> TrainingLoad:
    """The program of a model, or of its largest rack with a coda, and the text that it is trained on at a time."""
    settings = plan.config.settings
    nodes = plan.program.nodes
    if plan.racks is not None:
        largest = max(plan.racks.ranges[: plan.racks.last], key=lambda rack: len(rack.nodes))
        nodes = tuple(nodes[place] for place in (*largest.nodes, *plan.racks.coda))
    shapes = ModelShapes.of(plan.family.name, plan.architecture)
    micro = settings.micro_batch or settings.batch
    return TrainingLoad(shapes, Program(nodes), settings.batch, micro, plan.config.window)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configurations", type=Path, nargs="*", metavar="CONFIG.yaml")
    parser.add_argument("--hardware", default="h100-sxm", help="a name or a file")
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 64], help="that share the batch")
    given = parser.parse_args()
    rows: dict[tuple[str, ...], list[str]] = {}
    machine = load_hardware(given.hardware)
    for path in given.configurations or sorted(FOLDER.glob("*.yaml")):
        cells = list[str]()
        for step, steps in predict(path, machine, given.devices):
            fits = f"{step.memory / 1e9:.0f}" if step.fits else f"({step.memory / 1e9:.0f})"
            days = steps * step.seconds / 86400
            cells += [step.how, f"{step.seconds:.2f}", fits, f"{step.tokens_per_day / 1e9:.1f}", f"{days:.2f}"]
        rows.setdefault(tuple(cells), []).append(f"`{path.stem}`")
    print("| configuration |" + "".join(f" {number}: how | step s | GB | B a day | days |" for number in given.devices))
    print("|:--|" + ":--|--:|--:|--:|--:|" * len(given.devices))
    for cells, names in rows.items():
        print(f"| {', '.join(names)} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
