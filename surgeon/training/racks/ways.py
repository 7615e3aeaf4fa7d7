"""Racks are trained in turn or all at once, as is asked for, and a run of either kind ends in the same way."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from surgeon.processes.files import whole_file
from surgeon.training.checkpoints import checkpoints_of
from surgeon.training.racks.in_turn import RACK_FILE, RacksTrained, rack_folder, train_in_turn
from surgeon.training.racks.partition import Racks
from surgeon.training.racks.run_files import (
    ADDRESS_FILE,
    PLAN_FILE,
    RESULT_FILE,
    SPOOL,
    START,
    TEXTS_FILE,
    ProcessOptions,
)
from surgeon.training.racks.subject import RacksToTrain
from surgeon.training.racks.supervisor import train_in_processes
from surgeon.training.resume import finish_run
from surgeon.training.run_log import HELD_OUT_FILE, TRAINING_FILE


def train_racks(asked: RacksToTrain, options: ProcessOptions | None) -> RacksTrained:
    """Train them as `train_in_turn` does, or as `train_in_processes` where there are options of processes."""
    return train_in_turn(asked) if options is None else train_in_processes(asked, options)


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
            for path in (*checkpoints_of(each).values(), *(own / SPOOL for own in of_processes)):
                shutil.rmtree(path, ignore_errors=True)
            for path in (each / RACK_FILE, each / RESULT_FILE, *(own / ADDRESS_FILE for own in of_processes)):
                path.unlink(missing_ok=True)
    shutil.rmtree(folder / START, ignore_errors=True)
    (folder / TEXTS_FILE).unlink(missing_ok=True)
