"""What comes of racks, whichever way they are trained: each one's result, the model of all, and how a run ends."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import PreTrainedModel

from surgeon.checkpoint.codas import Coda
from surgeon.checkpoint.read import read_json
from surgeon.processes.files import whole_file, write_json
from surgeon.training.checkpoints import checkpoints_of
from surgeon.training.held_out import HeldOutQuality
from surgeon.training.racks.build import assemble, rack_of
from surgeon.training.racks.model import RackModel, open_rack, save_rack
from surgeon.training.racks.partition import Racks
from surgeon.training.racks.run_files import (
    PLAN_FILE,
    PROCESS_FILE,
    RACK_FILE,
    RESULT_FILE,
    START,
    STREAMS,
    TEXTS_FILE,
    TRAINING_TEXT_FILE,
    RacksToTrain,
    own_settings,
    rack_folder,
)
from surgeon.training.racks.streams import KeptStreams, RackStreams
from surgeon.training.racks.task import rack_task, teacher_of
from surgeon.training.resume import alone, finish_run, open_run
from surgeon.training.run import Trained, TrainingTask, train
from surgeon.training.run_log import HELD_OUT_FILE, TRAINING_FILE
from surgeon.training.settings import TrainSettings
from surgeon.training.texts import TrainTexts


@dataclass(frozen=True)
class RacksTrained:
    """What training racks came to.

    Attributes:
        model: the whole model, in memory.
        codas: of every rack but the last.
        results: of every rack, by its coda's prediction; the last one's are the whole model's.
    """

    model: PreTrainedModel
    codas: tuple[Coda, ...]
    results: tuple[Trained, ...]


def train_rack(
    rack: RackModel,
    task: TrainingTask,
    texts: TrainTexts,
    settings: TrainSettings,
    run: Path,
    identity: Mapping[str, Any],
    device: str,
) -> None:
    """Train a rack, or go on with it, and write what comes of it: one that has a result is done.

    Args:
        run: of all racks.
        identity: of all racks, as JSON values.

    Raises:
        ValueError, OSError: as `train`.
    """
    folder = rack_folder(run, rack.index)
    own = {**identity, "task": "rack", "rack": rack.index}
    found = train(rack.model, texts, own_settings(settings), folder, identity=own, device=device, task=task)
    if found is not None:  # this is the first of the rack's processes
        rack.model = found.model.cpu()
        save_rack(rack, folder / RACK_FILE)
        write_json(folder / RESULT_FILE, found.to_json())


def is_done(run: Path, index: int) -> bool:
    """Whether a rack is.

    Raises:
        FileNotFoundError: if it was, and is gone.
    """
    done = (rack_folder(run, index) / RESULT_FILE).is_file()
    path = rack_folder(run, index) / RACK_FILE
    if done and not path.is_file():
        raise FileNotFoundError(f"{path} is gone; put it back, or remove {run} to begin the run again")
    return done


def gather(whole: PreTrainedModel, racks: Racks, run: Path) -> RacksTrained:
    """What came of the racks of a run that is done.

    Raises:
        FileNotFoundError: if one is not, or is gone.
        ValueError: if a file is damaged.
    """
    for index in range(len(racks)):
        if not is_done(run, index):
            path = rack_folder(run, index) / RESULT_FILE
            raise FileNotFoundError(f"{path} is gone; put it back, or remove {run} to begin the run again")
    folders = [rack_folder(run, index) for index in range(len(racks))]
    found = [open_rack(each / RACK_FILE) for each in folders]
    results = tuple(Trained.from_json(read_json(each / RESULT_FILE)) for each in folders)
    return RacksTrained(assemble(whole, racks, found), tuple(rack.coda() for rack in found[:-1]), results)


def finish_racks(folder: Path, racks: Racks, record: dict[str, Any]) -> None:
    """Complete the record of a run of racks whose result is written, and remove weights, texts and what was kept.

    Tables stay. The last rack's are put beside the record, since what it predicts is the whole model's prediction.

    Raises:
        OSError: if the folder cannot be written.
    """
    for name in (TRAINING_FILE, HELD_OUT_FILE):
        with whole_file(folder / name) as beside:
            shutil.copyfile(rack_folder(folder, racks.last) / name, beside)
    finish_run(folder, record)
    (folder / PLAN_FILE).unlink(missing_ok=True)  # before the rest: without it nothing is gone on with
    for rack in racks.ranges:
        each = rack_folder(folder, rack.index)
        if each.is_dir():
            of_processes = [each, *each.glob("replica-*")]
            for path in checkpoints_of(each).values():
                shutil.rmtree(path, ignore_errors=True)
            for path in (each / RACK_FILE, each / RESULT_FILE, *(own / PROCESS_FILE for own in of_processes)):
                path.unlink(missing_ok=True)
    shutil.rmtree(folder / START, ignore_errors=True)
    for name in (TEXTS_FILE, TRAINING_TEXT_FILE):
        (folder / name).unlink(missing_ok=True)


def train_in_turn(asked: RacksToTrain) -> RacksTrained:
    """Train the racks of a model; a run that was killed goes on where it was. Each rack's run is as `train` leaves it.

    Raises:
        ValueError: as `train`; or if there are several processes.
        OSError: if the folder cannot be written, or the disk is too full.
    """
    if PartialState(cpu=asked.device == "cpu").num_processes > 1:
        raise ValueError("racks are trained by one process here; leave accelerate launch or torchrun out")
    if asked.settings.arguments.get("fsdp"):
        raise ValueError(
            "fsdp shares a rack's parameters out among its processes, and racks in turn have one; ask for processes, "
            "and 2 replicas or more of each"
        )

    @cache
    def held_out() -> HeldOutQuality:
        return HeldOutQuality(asked.texts.held_out, None if asked.original is None else asked.original())

    with alone(asked.folder, asked.device):
        open_run(asked.folder, asked.identity_of_racks() | asked.settings_and_text())
        for index in range(len(asked.racks)):
            folder = rack_folder(asked.folder, index)
            if not is_done(asked.folder, index):
                _train(asked, index, held_out())
            finish_run(folder, {})
            if index > 0:  # what was kept for this rack is of no more use
                shutil.rmtree(rack_folder(asked.folder, index - 1) / STREAMS, ignore_errors=True)
        return gather(asked.whole, asked.racks, asked.folder)


def _train(asked: RacksToTrain, index: int, held_out: HeldOutQuality) -> None:
    rack = rack_of(asked.whole, asked.racks, index, asked.seed)
    settings = asked.settings
    if rack.is_first:
        source = None
    else:
        source = KeptStreams(rack_folder(asked.folder, index - 1) / STREAMS)
    if rack.is_last:
        sink = None
    else:
        sink = KeptStreams(rack_folder(asked.folder, index) / STREAMS)
    teacher = None
    if settings.distillation is not None:
        assert asked.original is not None
        teacher = teacher_of(asked.original(), asked.racks, index)
    if sink is not None:
        text = asked.texts.training
        steps = settings.steps_on(len(asked.texts.training))
        training = steps * settings.batch * (1 if teacher is None else 2)  # beside it the original's
        measured = (2 + steps // settings.evaluate_every) * len(asked.texts.held_out.ids)
        window = math.prod((text.window, int(rack.model.config.hidden_size), rack.model.dtype.itemsize))
        sink.require_room((training + measured) * window)
    streams = RackStreams(settings.batch, source, sink)
    task = rack_task(rack, held_out, streams, teacher, settings.distillation)
    train_rack(rack, task, asked.texts, settings, asked.folder, asked.identity_of_racks(), asked.device)
