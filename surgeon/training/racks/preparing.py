"""What the processes of racks begin with, and the commands that start them by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from surgeon.training.arguments import share_of_batch
from surgeon.training.racks.build import rack_of
from surgeon.training.racks.distilled import teacher_of
from surgeon.training.racks.model import save_rack
from surgeon.training.racks.run_files import (
    PLAN_FILE,
    START,
    TEXTS_FILE,
    TRAINING_TEXT_FILE,
    ProcessOptions,
    RacksPlan,
    start_file,
    teacher_file,
    write_texts,
)
from surgeon.training.racks.subject import RacksToTrain
from surgeon.training.racks.trained import is_done
from surgeon.training.resume import open_run
from surgeon.training.settings import TrainSettings


def prepare(asked: RacksToTrain, options: ProcessOptions | None = None) -> RacksPlan:
    """Write what the racks' processes begin with, where it is not there; errors as of `train_in_processes`."""
    racks = asked.racks
    settings = asked.settings
    folder = asked.folder
    settings.steps_on(len(asked.texts.training))
    options = options or ProcessOptions()
    _check_shares(settings, options.replicas)
    if options.pace and len(options.pace) != len(racks):
        raise ValueError(f"there are {len(racks)} racks, and the pace of {len(options.pace)} is given")
    averaged = {"processes": True, "average": str(options.average), "replicas": options.replicas}
    of_racks = asked.identity_of_racks() | averaged
    open_run(folder, of_racks | asked.settings_and_text())
    if (folder / PLAN_FILE).is_file():
        plan = replace(RacksPlan.read(folder), options=options, device=asked.device)
    else:
        plan = RacksPlan(len(racks), of_racks, settings, options, asked.device)
    files = [start_file(folder, index) for index in range(len(racks))]
    files += [] if settings.distillation is None else [teacher_file(folder, index) for index in range(len(racks))]
    if not all(path.is_file() for path in (*files, folder / TRAINING_TEXT_FILE, folder / TEXTS_FILE)):
        _write_racks(asked)
        write_texts(folder, asked.texts)
    plan.write(folder)  # the last one: a run that has it is prepared
    return plan


def _write_racks(asked: RacksToTrain) -> None:
    """Every rack as it begins, and its part of the original where it is distilled."""
    racks = asked.racks
    folder = asked.folder
    (folder / START).mkdir(exist_ok=True)
    for index in range(len(racks)):
        save_rack(rack_of(asked.whole, racks, index, asked.seed), start_file(folder, index))
    if asked.settings.distillation is not None:
        assert asked.original is not None
        teacher = asked.original()
        for index in range(len(racks)):
            save_rack(teacher_of(teacher, racks, index), teacher_file(folder, index))


def _check_shares(settings: TrainSettings, replicas: int) -> None:
    """Refuse a batch that the processes of a rack cannot share out, and weights that one alone would."""
    if settings.arguments.get("deepspeed") and replicas > 1:
        raise ValueError("deepspeed does not know racks; share their parameters out by fsdp")
    if settings.arguments.get("fsdp") and replicas == 1:
        raise ValueError("fsdp shares a rack's parameters out among its processes; ask for 2 replicas or more of each")
    share_of_batch(settings, replicas)


def commands_by_hand(folder: Path, racks: int) -> list[str]:
    """How the racks of a run that was prepared are started by hand; none where all are done."""
    if all(is_done(folder, index) for index in range(racks)):
        return []
    replicas = RacksPlan.read(folder).options.replicas
    if replicas == 1:
        python = "python"
    else:
        python = f"torchrun --standalone --nproc-per-node {replicas}"
    module = f"{python} -m surgeon.training.racks.process {folder}"
    return [f"{module} {index} --meet HOST0:PORT" for index in range(racks)]
