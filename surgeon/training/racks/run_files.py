"""Files of a run of racks in processes of their own.

RUN/racks.json            `RacksPlan`
RUN/texts.arrow           the training text, in windows
RUN/texts.safetensors     the held-out text, in windows, and names of both
RUN/start/rack-R.safetensors   the rack as it begins
RUN/start/teacher-R.safetensors   its part of the original, where racks are distilled
RUN/rack-R/               the rack's own run, as every run's folder: run.json, training.csv, held_out.csv, checkpoints
RUN/rack-R/process.json   the number of the process, while it runs
RUN/rack-R/timeline.csv   `rack_log.RackLog`
RUN/rack-R/traffic.json   `rack_log.RackLog`
RUN/rack-R/log.txt        its output
RUN/rack-R/rack.safetensors, result.json   its result

Racks in turn leave the same, but for racks.json, texts.*, start/ and files of processes; their streams lie in
RUN/rack-R/streams/.

Replicas of a rack share RUN/rack-R/. Files of a process (process.json, timeline.csv, traffic.json, log.txt) lie there
for the first one, and in RUN/rack-R/replica-1/, ... for others.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import datasets
from pydantic import TypeAdapter, ValidationError
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from surgeon.checkpoint.tensor_file import read_json
from surgeon.processes.files import whole_file, write_json
from surgeon.quality.data import Windows, digest_of
from surgeon.runtime.comm.collectives import Link
from surgeon.training.checkpoints import HELD_OUT_FILE, TRAINING_FILE, checkpoints_of
from surgeon.training.racks.partition import Racks
from surgeon.training.racks.rack_log import RackPace
from surgeon.training.run import finish_run
from surgeon.training.settings import TrainSettings
from surgeon.training.texts import TrainingText, TrainTexts
from surgeon.training.token_store import write_rows


@dataclass(frozen=True, eq=False)
class RacksToTrain:
    """The racks of a model, and how and where they are trained.

    Attributes:
        whole: the model, edited or not, which is left as it is; racks that take turns need numbers of at least 32 bits.
        racks: of its program.
        folder: of the runs.
        original, identity, device: as `train` takes them.
        seed: of the random numbers that codas begin with; None for copies of the model's last layers.

    Raises:
        ValueError: if the settings are not for racks, or there is nothing to distil from.
    """

    whole: PreTrainedModel
    racks: Racks
    texts: TrainTexts
    settings: TrainSettings
    folder: Path
    original: Callable[[], PreTrainedModel] | None = None
    identity: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        check_settings(self.settings)
        if self.settings.distillation is not None and self.original is None:
            raise ValueError("there is no original to distil from; name it as the teacher")

    def identity_of_racks(self) -> dict[str, Any]:
        distillation = self.settings.distillation
        distilled = {} if distillation is None else {"distillation": asdict(distillation)}
        cut = {"racks": self.racks.texts, "coda": self.racks.depth, "coda_seed": self.seed}
        return {**self.identity} | cut | distilled

    def settings_and_text(self) -> dict[str, Any]:
        """Entries that `train` adds to the identity of a run."""
        texts = {"data": self.texts.training.digest, "held_out": self.texts.held_out.digest}
        return {"settings": replace(self.settings, distillation=None).to_json()} | texts


def check_settings(settings: TrainSettings) -> None:
    """Refuse settings that racks cannot be trained with."""
    if settings.scope == "edited":
        raise ValueError(
            "racks train their codas, too, which no edit has touched; train all weights, or norms"
        )
    if settings.distillation is not None and not settings.distillation.hidden:
        raise ValueError(
            "racks learn the original's streams, each those of its own stretch, and only the last one its predictions; "
            "distil both, or hidden"
        )
    if settings.lora is not None:
        raise ValueError("racks are trained without adapters; leave lora out")
    if settings.patience is not None:
        raise ValueError(
            "racks are trained side by side, and none of them ends before the others; drop patience"
        )


NEVER = "never"
ALWAYS = "always"


def parse_averaging(text: str | int) -> int | None:
    """Parse "never", a number of steps between averages of codas, or "always"; None for never."""
    if text == NEVER:
        return None
    if text == ALWAYS:
        return 1
    steps = int(text) if str(text).isdecimal() else 0
    if steps < 1:
        raise ValueError(
            f"codas are averaged never, always, or every N steps with N from 1, not {text!r}"
        )
    return steps


PLAN_FILE = "racks.json"
PROCESS_FILE = "process.json"
TEXTS_FILE = "texts.safetensors"
TRAINING_TEXT_FILE = "texts.arrow"
RACK_FILE = "rack.safetensors"
RESULT_FILE = "result.json"
LOG_FILE = "log.txt"
STREAMS = "streams"
START = "start"


@dataclass(frozen=True)
class ProcessOptions:
    """Options of racks in processes; without averaging none of them changes the result.

    Attributes:
        average: codas are averaged "never", every so many steps, or "always" (after each).
        ahead: micro-batches that a rack may be ahead of the next one.
        link: emulated between all racks, on one machine.
        pace: of each rack, to make some slower; empty for none.
        away: seconds that racks wait for each other to begin.
        threads: of each process; None for the cores shared out.
        replicas: processes that share each rack's batches, with the result of one process, up to rounding. Each sends
            its windows' streams to the replica of its number in the next rack.
    """

    average: str | int = NEVER
    ahead: int = 4
    link: Link | None = None
    pace: tuple[RackPace, ...] = ()
    away: float = 600.0
    threads: int | None = None
    replicas: int = 1

    def __post_init__(self) -> None:
        parse_averaging(self.average)
        if self.replicas < 1:
            raise ValueError(
                f"a rack is at least 1 process, not {self.replicas}; give 1 replica or more"
            )
        if self.ahead < 1:
            raise ValueError(
                f"a rack must be allowed to be at least 1 micro-batch ahead of the next, not {self.ahead}"
            )


@dataclass(frozen=True)
class RacksPlan:
    """Plan of a run, for all its processes.

    Attributes:
        racks: their number.
        identity: of each rack's run, as JSON values.
        settings: of each rack.
        device: "cpu" or "cuda".
    """

    racks: int
    identity: dict[str, Any]
    settings: TrainSettings
    options: ProcessOptions
    device: str

    def write(self, run: Path) -> None:
        write_json(run / PLAN_FILE, {**asdict(self), "settings": self.settings.to_json()})

    @classmethod
    def read(cls, run: Path) -> RacksPlan:
        """Read a run's plan."""
        said = read_json(run / PLAN_FILE)
        try:
            return TypeAdapter(cls).validate_python(said)
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(
                f"{run / PLAN_FILE} is damaged ({'.'.join(map(str, first['loc']))}: {first['msg']}); remove {run} to "
                "begin the run again"
            ) from error


def rack_folder(run: Path, index: int, replica: int = 0) -> Path:
    """The folder of a rack's run, or of files of one of its replicas."""
    folder = run / f"rack-{index}"
    if replica:
        return folder / f"replica-{replica}"
    return folder


def start_file(run: Path, index: int) -> Path:
    """A rack as it begins."""
    return run / START / f"rack-{index}.safetensors"


def teacher_file(run: Path, index: int) -> Path:
    """A rack's part of the original."""
    return run / START / f"teacher-{index}.safetensors"


def write_texts(run: Path, texts: TrainTexts) -> None:
    """Write both texts as tokens, whole or not at all."""
    write_rows(run / TRAINING_TEXT_FILE, texts.training.rows)
    training = texts.training
    parts = json.dumps(training.parts)
    said = {
        "training": training.source,
        "held_out": texts.held_out.source,
        "digest": training.digest,
        "parts": parts,
    }
    held_out = {"held_out": texts.held_out.ids, "answers": texts.held_out.answers}
    with whole_file(run / TEXTS_FILE) as beside:
        tensors = {name: tensor.contiguous() for name, tensor in held_out.items() if tensor is not None}
        save_file(tensors, beside, metadata=said)


def read_texts(run: Path) -> TrainTexts:
    """Read both texts."""
    with safe_open(run / TEXTS_FILE, framework="pt") as file:
        said = file.metadata()
        ids = file.get_tensor("held_out")
        answers = file.get_tensor("answers") if "answers" in file.keys() else None  # noqa: SIM118 - no mapping
    parts = tuple((windows, weight) for windows, weight in json.loads(said["parts"]))
    training = TrainingText(
        datasets.Dataset.from_file(str(run / TRAINING_TEXT_FILE)),
        said["training"],
        said["digest"],
        parts=parts,
    )
    return TrainTexts(training, Windows(ids, said["held_out"], digest_of(ids), answers=answers))


def is_done(run: Path, index: int) -> bool:
    """Tell whether a rack is done."""
    done = (rack_folder(run, index) / RESULT_FILE).is_file()
    path = rack_folder(run, index) / RACK_FILE
    if done and not path.is_file():
        raise FileNotFoundError(f"{path} is gone; put it back, or remove {run} to begin the run again")
    return done


def finish_racks(folder: Path, racks: Racks, record: dict[str, Any]) -> None:
    """Complete the record of a run whose result is written, and remove weights, texts and streams.

    Tables stay; the last rack's, of the whole model's prediction, are copied beside the record.
    """
    for name in (TRAINING_FILE, HELD_OUT_FILE):
        with whole_file(folder / name) as beside:
            shutil.copyfile(rack_folder(folder, racks.last) / name, beside)
    finish_run(folder, record)
    (folder / PLAN_FILE).unlink(missing_ok=True)  # before the rest: without it nothing is gone on with
    for rack in racks.ranges:
        each = rack_folder(folder, rack.index)
        for path in checkpoints_of(each).values():
            shutil.rmtree(path, ignore_errors=True)
        for name in (RACK_FILE, RESULT_FILE, PROCESS_FILE):
            for path in each.rglob(name):  # replicas have folders in it
                path.unlink(missing_ok=True)
    shutil.rmtree(folder / START, ignore_errors=True)
    for name in (TEXTS_FILE, TRAINING_TEXT_FILE):
        (folder / name).unlink(missing_ok=True)
