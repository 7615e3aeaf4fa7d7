"""Training of a rack: its streams, loss and measure; of all racks in turn; and the result of all."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgeon.checkpoint.codas import Coda
from surgeon.checkpoint.stored import read_json
from surgeon.models.families import family_of
from surgeon.processes.files import write_json
from surgeon.quality.summary import Quality
from surgeon.quality.text import HeldOutQuality, logits_of
from surgeon.training.distiller import (
    Distillation,
    ask_teacher,
    counterparts,
    parts_of_loss,
    require_unedited_teacher,
    watched_streams,
)
from surgeon.training.head_loss import LossParts, loss_at_head, next_tokens, text_loss
from surgeon.training.racks.build import assemble, rack_of
from surgeon.training.racks.exchange import KeptStreams, RackStreams
from surgeon.training.racks.model import RackModel, feed_stream, open_rack, save_rack
from surgeon.training.racks.partition import Racks
from surgeon.training.racks.run_files import (
    RACK_FILE,
    RESULT_FILE,
    STREAMS,
    RacksToTrain,
    is_done,
    rack_folder,
)
from surgeon.training.run import Trained, TrainingTask, finish_run, lock_run, open_run, train
from surgeon.training.settings import TrainSettings
from surgeon.training.texts import TrainTexts, model_inputs
from surgeon.training.trainer import Measure


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
        windows = model_inputs(inputs)
        stream = streams.take(inputs["place"])
        incoming = [None, None] if stream is None else stream.chunk(2, dim=-1)
        with feed_stream(teacher.model, incoming[1]) as stretch:
            taught = ask_teacher(teacher.model, windows, places, own)
            original = stretch.outgoing
        labels = next_tokens(inputs["labels"])
        length = len(rack.layers.program)
        with (
            feed_stream(model, incoming[0]) as stretch,
            watched_streams(model, [*places], length) as watched,
        ):
            at_head = loss_at_head(model, windows, lambda: own.task(taught, labels))
            assert stretch.outgoing is not None
            assert original is not None
            streams.give(
                inputs["place"], torch.cat([stretch.outgoing, original.to(stretch.outgoing)], dim=-1)
            )
        return parts_of_loss(own, at_head, labels, watched, taught)

    return loss


def rack_loss(streams: RackStreams, model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Compute the loss of a rack's coda, the mean per predicted token.

    The stream of a micro-batch is handed on before its gradient is computed, so that the rack behind need not wait.
    """
    with feed_stream(model, streams.take(inputs["place"])) as layers:
        loss = text_loss(model, inputs)
        assert layers.outgoing is not None
        streams.give(inputs["place"], layers.outgoing)
    return {"loss": loss}


class RackHeldOut:
    """Measures a rack by its coda's prediction on held-out text; a `Measure`.

    Args:
        held_out: the text, and the original where divergence from it is wanted.
    """

    def __init__(self, held_out: HeldOutQuality, streams: RackStreams) -> None:
        self.held_out = held_out
        self.streams = streams
        self._latest: tuple[int, Quality] | None = None

    @property
    def original(self) -> Quality | None:
        return self.held_out.original

    def measure(self, model: nn.Module, step: int) -> Quality:
        """Measure the coda's prediction after so many steps, once for each."""
        if self._latest is not None and self._latest[0] == step:
            return self._latest[1]
        whole = logits_of(model)
        windows = iter(range(len(self.held_out.ids)))

        def logits(ids: Tensor) -> Tensor:
            window = next(windows)
            with feed_stream(model, self.streams.take_held_out(step, window)) as layers:
                found = whole(ids)
                assert layers.outgoing is not None
                self.streams.give_held_out(step, window, layers.outgoing)
            return found

        quality = self.held_out.quality(model, logits)
        self._latest = step, quality
        return quality


def rack_task(
    rack: RackModel,
    held_out: HeldOutQuality,
    streams: RackStreams,
    teacher: RackModel | None = None,
    distillation: Distillation | None = None,
) -> TrainingTask:
    """Make the task that `train` trains a rack by.

    Args:
        teacher: its part of the original (`teacher_of`), where it is distilled.
        distillation: what is learned from that.
    """
    assert (streams.source is None) == rack.is_first
    measure: Measure = RackHeldOut(held_out, streams)
    if teacher is None or distillation is None:
        return TrainingTask(measure, partial(rack_loss, streams))
    return TrainingTask(
        measure, distilled_rack_loss(rack, teacher, distillation, streams), uses_all=True
    )


@dataclass(frozen=True)
class RacksTrained:
    """The result of training racks.

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


def gather(whole: PreTrainedModel, racks: Racks, run: Path) -> RacksTrained:
    """Collect the racks of a run that is done."""
    for index in range(len(racks)):
        if not is_done(run, index):
            path = rack_folder(run, index) / RESULT_FILE
            raise FileNotFoundError(
                f"{path} is gone; put it back, or remove {run} to begin the run again"
            )
    folders = [rack_folder(run, index) for index in range(len(racks))]
    found = [open_rack(each / RACK_FILE) for each in folders]
    results = tuple(Trained.from_json(read_json(each / RESULT_FILE)) for each in folders)
    return RacksTrained(
        assemble(whole, racks, found), tuple(rack.coda() for rack in found[:-1]), results
    )


def train_in_turn(asked: RacksToTrain) -> RacksTrained:
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
        return HeldOutQuality(asked.texts.held_out, None if asked.original is None else asked.original())

    with lock_run(asked.folder, asked.device):
        open_run(asked.folder, asked.identity_of_racks() | asked.settings_and_text())
        for index in range(len(asked.racks)):
            folder = rack_folder(asked.folder, index)
            if not is_done(asked.folder, index):
                rack = rack_of(asked.whole, asked.racks, index, asked.seed)
                settings = asked.settings
                source = (
                    None
                    if rack.is_first
                    else KeptStreams(rack_folder(asked.folder, index - 1) / STREAMS)
                )
                sink = None if rack.is_last else KeptStreams(rack_folder(asked.folder, index) / STREAMS)
                teacher = None
                if settings.distillation is not None:
                    assert asked.original is not None
                    teacher = teacher_of(asked.original(), asked.racks, index)
                if sink is not None:
                    text = asked.texts.training
                    steps = settings.steps_on(len(text))
                    # Beside it the original's.
                    training = steps * settings.batch * (1 if teacher is None else 2)
                    measured = (2 + steps // settings.evaluate_every) * len(asked.texts.held_out.ids)
                    window = math.prod(
                        (text.window, int(rack.model.config.hidden_size), rack.model.dtype.itemsize)
                    )
                    sink.require_room((training + measured) * window)
                streams = RackStreams(settings.batch, source, sink)
                task = rack_task(rack, held_out(), streams, teacher, settings.distillation)
                train_rack(
                    rack,
                    task,
                    asked.texts,
                    settings,
                    asked.folder,
                    asked.identity_of_racks(),
                    asked.device,
                )
            finish_run(folder, {})
            if index > 0:  # what was kept for this rack is of no more use
                shutil.rmtree(rack_folder(asked.folder, index - 1) / STREAMS, ignore_errors=True)
        return gather(asked.whole, asked.racks, asked.folder)
