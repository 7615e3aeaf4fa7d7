"""Racks trained in one process, one after the other.

Nothing comes back from a rack to those before it. So all racks at once, each a micro-batch behind the one before, come
to the same as one rack through the whole run, then the next one on the streams that it has left: at each step a rack
gets what the rack before it computed with the weights that it had at that step. It takes the memory of one rack, beside
the whole model's weights, and the streams of a whole run on the disk. Processes, one for each rack, come to the same
bits.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import PreTrainedModel

from surgeon.checkpoint.codas import Coda
from surgeon.training.held_out import HeldOutQuality
from surgeon.training.racks.build import assemble, rack_of
from surgeon.training.racks.distilled import teacher_of
from surgeon.training.racks.files import open_rack, save_rack
from surgeon.training.racks.model import RackModel
from surgeon.training.racks.streams import KeptStreams
from surgeon.training.racks.subject import RacksToTrain
from surgeon.training.racks.task import own_settings, rack_task
from surgeon.training.resume import RECORD_FILE, add_to_record, alone, finish_run, open_run, read_record
from surgeon.training.run import RunFigures, train
from surgeon.training.texts import TrainTexts

RACK_FILE, STREAMS = "rack.safetensors", "streams"
_DONE = "trained"  # in the record of a rack's run


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
    results: tuple[RunFigures, ...]


def rack_folder(folder: Path, index: int) -> Path:
    """The folder of a rack's run."""
    return folder / f"rack-{index}"


def train_in_turn(asked: RacksToTrain) -> RacksTrained:
    """Train the racks of a model; a run that was killed goes on where it was. Each rack's run is as `train` leaves it.

    Raises:
        ValueError: as `train`; or if there are several processes.
        OSError: if the folder cannot be written, or the disk is too full.
    """
    if PartialState(cpu=asked.device == "cpu").num_processes > 1:
        raise ValueError("racks are trained by one process here; leave accelerate launch or torchrun out")
    turn = _Turn(asked, _Once(asked.texts, asked.original))
    with alone(asked.folder, asked.device):
        open_run(asked.folder, asked.identity_of_racks() | asked.settings_and_text())
        done = [turn.trained(index) for index in range(len(asked.racks))]
    found, results = [rack for rack, _ in done], tuple(result for _, result in done)
    codas = tuple(rack.coda() for rack in found[:-1])
    return RacksTrained(assemble(asked.whole, asked.racks, found), codas, results)


class _Once:
    """What all racks are measured on, made when the first of them is."""

    def __init__(self, texts: TrainTexts, original: Callable[[], PreTrainedModel] | None) -> None:
        self.texts, self.original = texts, original
        self._made: HeldOutQuality | None = None

    def __call__(self) -> HeldOutQuality:
        if self._made is None:
            self._made = HeldOutQuality(self.texts.held_out, None if self.original is None else self.original())
        return self._made


@dataclass(frozen=True)
class _Turn:
    """The run of all racks, one of which is trained at a time."""

    asked: RacksToTrain
    held_out: _Once

    def trained(self, index: int) -> tuple[RackModel, RunFigures]:
        """A rack at the end of its run; one that is there already is read.

        Raises:
            FileNotFoundError: if one was, and is gone.
        """
        asked, folder = self.asked, rack_folder(self.asked.folder, index)
        begun = any((folder / name).is_file() for name in (RECORD_FILE, RACK_FILE))
        result = self._known(index) if begun else None
        if result is None:
            rack = rack_of(asked.whole, asked.racks, index, asked.seed)
            result = self._train(rack, folder)
        elif not (folder / RACK_FILE).is_file():  # its streams may be gone, too
            raise FileNotFoundError(
                f"{folder} says that its rack is trained, and has no {RACK_FILE}; put it back, or remove "
                f"{asked.folder} to begin the run again"
            )
        else:
            rack = open_rack(folder / RACK_FILE)
        finish_run(folder, {})
        if index > 0:  # what was kept for this rack is of no more use
            shutil.rmtree(rack_folder(asked.folder, index - 1) / STREAMS, ignore_errors=True)
        return rack, result

    def _known(self, index: int) -> RunFigures | None:
        """What is known of a rack that is trained; None if it is one of another run, which `train` will refuse."""
        record = read_record(rack_folder(self.asked.folder, index))
        mine = self._identity(index) | self.asked.settings_and_text()
        if _DONE not in record or record.get("identity") != json.loads(json.dumps(mine)):
            return None
        return RunFigures.from_json(record[_DONE])

    def _identity(self, index: int) -> dict[str, Any]:
        return self.asked.identity_of_racks() | {"task": "rack", "rack": index}

    def _train(self, rack: RackModel, folder: Path) -> RunFigures:
        source = None if rack.is_first else self._streams(rack, rack.index - 1)
        sink = None if rack.is_last else self._streams(rack, rack.index)
        if sink is not None:
            sink.require_room(*self._windows_of_run())
        asked, distilled = self.asked, self.asked.settings.distillation
        teacher = None if distilled is None else self._teacher(rack.index)
        task = rack_task(rack, self.held_out(), source, sink, teacher, distilled)
        settings, identity = own_settings(asked.settings), self._identity(rack.index)
        found = train(rack.model, asked.texts, settings, folder, None, None, identity, asked.device, task)
        assert found is not None
        rack.model = found.model.cpu()
        save_rack(rack, folder / RACK_FILE)
        add_to_record(folder, {_DONE: found.figures.to_json()})
        return found.figures

    def _teacher(self, index: int) -> RackModel:
        assert self.asked.original is not None
        return teacher_of(self.asked.original(), self.asked.racks, index)

    def _streams(self, rack: RackModel, index: int) -> KeptStreams:
        """Those that a rack hands on; all racks' are alike."""
        width, dtype = int(rack.model.config.hidden_size), rack.model.dtype
        tokens = self.asked.texts.training.ids.shape[1]
        beside = 1 if self.asked.settings.distillation is None else 2
        return KeptStreams(rack_folder(self.asked.folder, index) / STREAMS, tokens, width, dtype, beside)

    def _windows_of_run(self) -> tuple[int, int]:
        """Of the training text, and of held-out text."""
        texts, settings = self.asked.texts, self.asked.settings
        steps = settings.steps_on(len(texts.training.ids))
        measured = 2 + steps // settings.evaluate_every
        return steps * settings.batch, measured * len(texts.held_out.ids)
