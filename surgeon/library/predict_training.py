"""`surgeon.library.predict_training`: what a step of a configuration's training costs on hardware that is described."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from surgeon.cost.hardware import Hardware
from surgeon.cost.hardware_file import load_hardware
from surgeon.cost.training import TrainingLoad, TrainingStep, training_step
from surgeon.language.program import Program
from surgeon.models.shapes import ModelShapes
from surgeon.training.scratch.build import Blueprint, blueprint
from surgeon.training.scratch.config import ScratchConfig, read_config_file
from surgeon.training.settings import DEFAULT_STEPS


def predict_training(
    config: str | Path | ScratchConfig,
    hardware: str | Path | Hardware,
    devices: Sequence[int],
    *,
    tokenizer: str | None = None,
) -> dict[int, tuple[TrainingStep, int]]:
    """What a step of a training from scratch takes; nothing runs, and no text is read.

    Racks train at the same time, each on its share of the devices: the step is that of one with a coda.

    Args:
        config: a YAML file, as recipes/train/ has them, or what was read of one.
        hardware: a name such as "h100-sxm", a file as `surgeon calibrate` writes it, or one that is read.
        devices: how many share the batch; several numbers, one after the other.
        tokenizer: in place of the configuration's, which need not be there where the model has a vocab_size.

    Returns:
        By devices what a step takes, and how many steps there are.

    Raises:
        FileNotFoundError: if there is no such configuration, tokenizer or hardware.
        ValueError: if one of them cannot be used, or the batch is not shared out to so many devices.
    """
    read = config if isinstance(config, ScratchConfig) else read_config_file(Path(config))
    plan = blueprint(read if tokenizer is None else replace(read, tokenizer=tokenizer))
    machine = hardware if isinstance(hardware, Hardware) else load_hardware(hardware)
    load, racks = _load(plan), 1 if plan.racks is None else len(plan.racks)
    for number in devices:
        if number < 1 or number % racks:
            raise ValueError(f"{number} devices do not divide among {racks} racks; take a multiple of {racks}")
    steps = plan.config.settings.steps or DEFAULT_STEPS
    return {number: (training_step(load, machine, number // racks), steps) for number in devices}


def _load(plan: Blueprint) -> TrainingLoad:
    settings, racks, nodes = plan.config.settings, plan.racks, plan.program.nodes
    if racks is not None:
        largest = max(racks.ranges[: racks.last], key=lambda rack: len(rack.nodes))
        nodes = tuple(nodes[place] for place in (*largest.nodes, *racks.coda))
    shapes = ModelShapes.of(plan.family.name, plan.architecture)
    micro = settings.micro_batch or settings.batch
    return TrainingLoad(shapes, Program(nodes), settings.batch, micro, plan.config.window)
