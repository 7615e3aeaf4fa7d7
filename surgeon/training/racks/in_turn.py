"""Racks trained in one process, one after the other.

Nothing comes back from a rack to those before it. So all racks at once, each a micro-batch behind the one before, come
to the same as one rack through the whole run, then the next one on the streams that it has left: at each step a rack
gets what the rack before it computed with the weights that it had at that step. It takes the memory of one rack, beside
the whole model's weights, and the streams of a whole run on the disk. Processes, one for each rack, come to the same
bits.
"""

from __future__ import annotations

import math
import shutil
from functools import cache

from accelerate import PartialState

from surgeon.training.held_out import HeldOutQuality
from surgeon.training.racks.build import rack_of
from surgeon.training.racks.distilled import teacher_of
from surgeon.training.racks.run_files import STREAMS, rack_folder
from surgeon.training.racks.streams import KeptStreams, RackStreams
from surgeon.training.racks.subject import RacksToTrain
from surgeon.training.racks.task import rack_task
from surgeon.training.racks.trained import RacksTrained, gather, is_done, train_rack
from surgeon.training.resume import alone, finish_run, open_run


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
