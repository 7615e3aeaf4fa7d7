"""A run of racks: its options and files, training of a rack, of all in turn, and the result of all.

Racks in processes of their own leave

RUN/racks.json            `RacksPlan`
RUN/texts.arrow           the training text, in windows
RUN/texts.safetensors     the held-out text, in windows, and names of both
RUN/start/rack-R.safetensors   the rack as it begins
RUN/start/teacher-R.safetensors   its part of the original, where racks are distilled
RUN/rack-R/               the rack's own run, as every run's folder: run.json, training.csv, held_out.csv, checkpoints
RUN/rack-R/process.json   the number of the process, while it runs
RUN/rack-R/timeline.csv   `RackLog`
RUN/rack-R/traffic.json   `RackLog`
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
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

import datasets
import torch
from accelerate import PartialState
from datasets.arrow_writer import ArrowWriter
from pydantic import ConfigDict, Field, Strict, TypeAdapter, ValidationError
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgeon.checkpoint.tensor_file import read_json
from surgeon.language.program import Program
from surgeon.models.families import family_of
from surgeon.processes.files import whole_file, write_json
from surgeon.quality.data import Windows
from surgeon.quality.head import HeldOutQuality, logits_of
from surgeon.quality.summary import Quality
from surgeon.runtime.comm.collectives import Link
from surgeon.training.checkpoints import HELD_OUT_FILE, TRAINING_FILE, checkpoints_of
from surgeon.training.distiller import (
    ask_teacher,
    counterparts,
    distilled_loss,
    require_unedited_teacher,
)
from surgeon.training.head_loss import LossParts, text_loss
from surgeon.training.racks.model import RackModel, assemble, feed_stream, open_rack, rack_of, save_rack
from surgeon.training.racks.partition import Racks
from surgeon.training.racks.streams import (
    ItemKey,
    ItemKind,
    KeptStreams,
    RackExchange,
    RackPace,
    RackStreams,
)
from surgeon.training.run import (
    Trained,
    TrainedModel,
    TrainingTask,
    finish_run,
    lock_run,
    open_run,
    train,
)
from surgeon.training.settings import Distillation, TrainSettings
from surgeon.training.texts import TrainingText, TrainTexts, model_inputs
from surgeon.training.token_store import ROWS_AT_ONCE
from surgeon.words import plural

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


@dataclass(frozen=True)
class RackOptions:
    """Options of training by racks: cuts by depth, and the processes of each.

    Attributes:
        ranges: of the program's layers, such as "0:4" and "4:8".
        coda: layers of a rack's coda; every rack but the last predicts with one of its own.
        processes: train all racks at once, a process each; else one after the other, to the same result.
        average: codas are averaged "never", every so many steps, or "always" (after each).
        ahead: micro-batches that a rack may be ahead of the next one.
        replicas: processes that share each rack's batches, with the result of one process, up to rounding. Each sends
            its windows' streams to the replica of its number in the next rack.
        link: emulated between all racks, on one machine.
        pace: of each rack, to make some slower; empty for none.
        away: seconds that racks wait for each other to begin; None for ten minutes.
        threads: of each process; None for the cores shared out.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")  # annotations are for where it is read from a file

    ranges: Annotated[list[str], Strict(), Field(min_length=2)]
    coda: Annotated[int, Strict(), Field(ge=0)] = 1
    processes: Annotated[bool, Strict()] = False
    average: Annotated[int, Strict()] | str = NEVER
    ahead: Annotated[int, Strict(), Field(ge=1)] = 4
    replicas: Annotated[int, Strict(), Field(ge=1)] = 1
    link: Link | None = None
    pace: tuple[RackPace, ...] = ()
    away: float | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.ranges, str):
            raise ValueError(f'the ranges of racks are several, as ["0:4", "4:8"], not {self.ranges!r}')
        parse_averaging(self.average)
        if self.replicas < 1:
            raise ValueError(
                f"a rack is at least 1 process, not {self.replicas}; give 1 replica or more"
            )
        if self.ahead < 1:
            raise ValueError(
                f"a rack must be allowed to be at least 1 micro-batch ahead of the next, not {self.ahead}"
            )

    def cut(self, program: Program) -> Racks:
        """Cut a program into racks, in the numbers of the unedited model's layers.

        Raises:
            ValueError: if it cannot be cut like this, or these options do not go together.
        """
        racks = Racks.parse(self.ranges, program, self.coda)
        if self.replicas > 1 and not self.processes:
            raise ValueError(
                "replicas are processes that share a rack; add processes: true, or leave them out"
            )
        if parse_averaging(self.average) is not None and not self.processes:
            raise ValueError(
                "average needs all racks at the same time; add processes: true, or leave it out"
            )
        return racks


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

    def open(self, **options: Any) -> dict[str, Any]:
        """Begin or resume the run; returns the identity of each rack's, with those of these options.

        Raises:
            ValueError, OSError: as `open_run`.
        """
        distillation = self.settings.distillation
        distilled = {} if distillation is None else {"distillation": asdict(distillation)}
        cut = {"racks": self.racks.texts, "coda": self.racks.depth, "coda_seed": self.seed}
        identity = {**self.identity} | cut | distilled | options
        settings = replace(self.settings, distillation=None).to_json()
        texts = {"data": self.texts.training.digest, "held_out": self.texts.held_out.digest}
        open_run(self.folder, identity | {"settings": settings} | texts)
        return identity


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
    options: RackOptions
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


def start_file(run: Path, index: int, of: str = "rack") -> Path:
    """A rack as it begins, or its part of the original, the "teacher"."""
    return run / START / f"{of}-{index}.safetensors"


def write_texts(run: Path, texts: TrainTexts) -> None:
    """Write both texts as tokens, whole or not at all."""
    training = texts.training
    held_out = texts.held_out
    rows = training.rows
    with (
        whole_file(run / TRAINING_TEXT_FILE) as beside,
        ArrowWriter(path=str(beside), features=rows.features) as writer,
    ):
        for table in rows.with_format("arrow").iter(ROWS_AT_ONCE):
            writer.write_table(table)
        writer.finalize()
    said = {
        "training": {"source": training.source, "digest": training.digest, "parts": training.parts},
        "held_out": {"source": held_out.source, "digest": held_out.digest},
    }
    tensors = {"ids": held_out.ids, "answers": held_out.answers}
    with whole_file(run / TEXTS_FILE) as beside:
        there = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
        save_file(there, beside, metadata={name: json.dumps(one) for name, one in said.items()})


def read_texts(run: Path) -> TrainTexts:
    """Read both texts."""
    tensors = load_file(run / TEXTS_FILE)
    with safe_open(run / TEXTS_FILE, framework="pt") as file:
        said = {name: json.loads(one) for name, one in file.metadata().items()}
    said["training"]["parts"] = tuple(map(tuple, said["training"]["parts"]))
    rows = datasets.Dataset.from_file(str(run / TRAINING_TEXT_FILE))
    held_out = Windows(tensors["ids"], **said["held_out"], answers=tensors.get("answers"))
    return TrainTexts(TrainingText(rows, **said["training"]), held_out)


def is_done(run: Path, index: int) -> bool:
    """Tell whether a rack is done."""
    done = (rack_folder(run, index) / RESULT_FILE).is_file()
    path = rack_folder(run, index) / RACK_FILE
    if done and not path.is_file():
        raise FileNotFoundError(f"{path} is gone; put it back, or remove {run} to begin the run again")
    return done


def teacher_of(original: PreTrainedModel, racks: Racks, index: int) -> RackModel:
    """Cut a rack's layers out of the original: from where its stream comes in to where it is handed on.

    Args:
        original: unedited; it is left as it is.
        racks: of the program of a model that was edited from it.
    """
    dense = require_unedited_teacher(original)
    layers = len(dense) // family_of(original.config).steps_per_layer
    places = counterparts(racks.program, layers)
    ends = [places[end] for end in racks.ends]
    cut = Racks.parse([f"{start}:{end}" for start, end in zip([0, *ends], ends, strict=False)], dense, 0)
    found = rack_of(original, cut, index)
    found.model.eval().requires_grad_(False)
    return found


def distilled_rack_loss(
    rack: RackModel, teacher: RackModel, distillation: Distillation, streams: RackStreams
) -> LossParts:
    """Make the loss of a rack that is distilled.

    Its parts, each a mean over the predicted tokens: `hidden`, the relative error of its streams; of the last rack
    `logits`, its prediction's divergence from the original's, and `text`; of others `text` is their coda's.

    Args:
        teacher: the rack's part of the original (`teacher_of`).
        streams: its own and, behind them, the original's: (windows, tokens, 2 x hidden).
    """
    own = distillation if rack.is_last else replace(distillation, logits=0.0, text=1.0)
    nodes = rack.racks.ranges[rack.index].nodes
    first_layer = teacher.racks.ranges[teacher.index].layers.start
    layers = teacher.racks.ranges[-1].layers.stop
    places = {
        node - nodes.start: layer - first_layer
        for node, layer in counterparts(rack.racks.program, layers).items()
        if nodes.start < node <= nodes.stop
    }
    rack.layers.apart = not rack.is_last

    def loss(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        keys = streams.keys(inputs["place"])
        stream = streams.take(*keys)
        incoming = [None, None] if stream is None else stream.chunk(2, dim=-1)
        with feed_stream(teacher.model, incoming[1]) as stretch:
            taught = ask_teacher(teacher.model, model_inputs(inputs), places, own)
            original = stretch.outgoing
        with feed_stream(model, incoming[0]) as stretch:
            length = len(rack.layers.program)
            parts = distilled_loss(own, model, inputs, [*places], length, lambda _: taught)
            assert stretch.outgoing is not None
            assert original is not None
            streams.give(torch.cat([stretch.outgoing, original.to(stretch.outgoing)], dim=-1), *keys)
        return parts

    return loss


def rack_loss(streams: RackStreams, model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Compute the loss of a rack's coda, the mean per predicted token.

    The stream of a micro-batch is handed on before its gradient is computed, so that the rack behind need not wait.
    """
    keys = streams.keys(inputs["place"])
    with feed_stream(model, streams.take(*keys)) as layers:
        loss = text_loss(model, inputs)
        assert layers.outgoing is not None
        streams.give(layers.outgoing, *keys)
    return {"loss": loss}


def stream_bytes(rack: RackModel, texts: TrainTexts, settings: TrainSettings) -> int:
    """Bytes of a window's stream, at most; the original's lies behind it where racks are distilled."""
    tokens = max(texts.training.window, texts.held_out.ids.shape[1])
    streams = 1 if settings.distillation is None else 2
    return streams * tokens * int(rack.model.config.hidden_size) * rack.model.dtype.itemsize


def rack_task(
    rack: RackModel,
    held_out: HeldOutQuality,
    settings: TrainSettings,
    source: RackExchange | KeptStreams | None,
    sink: RackExchange | KeptStreams | None,
    teacher: RackModel | None,
) -> TrainingTask:
    """Make the task that `train` trains a rack by; it is measured by its coda's prediction on held-out text.

    Args:
        held_out: the text, and the original where divergence from it is wanted.
        source: not asked by the first rack.
        sink: not given anything by the last one.
        teacher: its part of the original (`teacher_of`), where it is distilled.
    """
    streams = RackStreams(settings.batch, source if rack.index else None, None if rack.is_last else sink)
    measured: dict[int, Quality] = {}  # by step, since other racks make a step's streams once

    def measure(model: nn.Module, step: int) -> Quality:
        whole = logits_of(model)
        windows = iter(range(len(held_out.ids)))

        def logits(ids: Tensor) -> Tensor:
            key = ItemKey(step, ItemKind.HELD_OUT, next(windows))
            with feed_stream(model, streams.take(key)) as layers:
                found = whole(ids)
                assert layers.outgoing is not None
                streams.give(layers.outgoing, key)
            return found

        if step not in measured:
            measured[step] = held_out.quality(model, logits)
        return measured[step]

    task = TrainingTask(measure, partial(rack_loss, streams), original=held_out.original)
    if teacher is None or settings.distillation is None:
        return task
    loss = distilled_rack_loss(rack, teacher, settings.distillation, streams)
    return replace(task, towards=loss, uses_all=True)


def train_rack(
    rack: RackModel,
    task: TrainingTask,
    texts: TrainTexts,
    settings: TrainSettings,
    run: Path,
    identity: Mapping[str, Any],
    device: str,
) -> None:
    """Train a rack, or resume it, and write its result; one that has a result is done.

    Args:
        run: of all racks.
        identity: of all racks, as JSON values.
    """
    folder = rack_folder(run, rack.index)
    own = {**identity, "task": "rack", "rack": rack.index}
    plain = replace(settings, distillation=None)  # what a rack learns from the original is its task's
    found = train(rack.model, texts, plain, folder, identity=own, device=device, task=task)
    if found is not None:  # this is the first of the rack's processes
        rack.model = found.model.cpu()
        save_rack(rack, folder / RACK_FILE)
        write_json(folder / RESULT_FILE, found.to_json())


def gather(asked: RacksToTrain) -> TrainedModel:
    """Collect the racks of a run that is done."""
    racks = asked.racks
    run = asked.folder
    for index in range(len(racks)):
        if not is_done(run, index):
            path = rack_folder(run, index) / RESULT_FILE
            raise FileNotFoundError(
                f"{path} is gone; put it back, or remove {run} to begin the run again"
            )
    folders = [rack_folder(run, index) for index in range(len(racks))]
    found = [open_rack(each / RACK_FILE) for each in folders]
    results = tuple(Trained.from_json(read_json(each / RESULT_FILE)) for each in folders)
    seconds = sum(result.seconds for result in results)
    whole = replace(results[-1], seconds=seconds, model=assemble(asked.whole, racks, found))
    cut = f"rack by rack (layers {', '.join(racks.texts)}) with codas of {plural(racks.depth, 'layer')}"
    codas = tuple(rack.coda() for rack in found[:-1])
    return TrainedModel(whole, run, f"{asked.settings.method}, {cut}", racks, codas, results)


def train_in_turn(asked: RacksToTrain) -> TrainedModel:
    """Train the racks of a model one after the other; a run that was killed resumes.

    Raises:
        ValueError: as `train`; or if there are several processes.
        OSError: if the folder cannot be written, or the disk is too full.
    """
    if PartialState(cpu=asked.device == "cpu").num_processes > 1:
        raise ValueError(
            "racks are trained by one process here; leave accelerate launch or torchrun out"
        )
    if asked.settings.arguments.get("fsdp"):
        raise ValueError(
            "fsdp shares a rack's parameters out among its processes, and racks in turn have one; ask for processes, "
            "and 2 replicas or more of each"
        )

    @cache
    def held_out() -> HeldOutQuality:
        return HeldOutQuality(texts.held_out, None if asked.original is None else asked.original())

    run = asked.folder
    texts = asked.texts
    settings = asked.settings
    with lock_run(run, asked.device):
        identity = asked.open()
        for index in range(len(asked.racks)):
            folder = rack_folder(run, index)
            before = rack_folder(run, index - 1) / STREAMS
            if not is_done(run, index):
                rack = rack_of(asked.whole, asked.racks, index, asked.seed)
                teacher = None
                if settings.distillation is not None:
                    assert asked.original is not None
                    teacher = teacher_of(asked.original(), asked.racks, index)
                source = KeptStreams(before) if index else None
                sink = None
                if not rack.is_last:
                    sink = KeptStreams(folder / STREAMS)
                    steps = settings.steps_on(len(texts.training))
                    measured = (2 + steps // settings.evaluate_every) * len(texts.held_out.ids)
                    windows = steps * settings.batch + measured
                    sink.require_room(windows * stream_bytes(rack, texts, settings))
                task = rack_task(rack, held_out(), settings, source, sink, teacher)
                train_rack(rack, task, texts, settings, run, identity, asked.device)
            finish_run(folder, {})
            if index > 0:  # what was kept for this rack is of no more use
                shutil.rmtree(before, ignore_errors=True)
        return gather(asked)


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
