"""Training of a rack: its streams, loss and measure; of all racks in turn; and the result of all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
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
from surgeon.exports.in_memory import export, export_with_codas
from surgeon.exports.prove import Proof
from surgeon.models.families import family_of
from surgeon.processes.files import write_json
from surgeon.quality.head import HeldOutQuality, logits_of
from surgeon.quality.summary import Quality
from surgeon.training.distiller import (
    Distillation,
    ask_teacher,
    counterparts,
    distilled_loss,
    require_unedited_teacher,
)
from surgeon.training.head_loss import LossParts, text_loss
from surgeon.training.racks.build import assemble, rack_of
from surgeon.training.racks.exchange import KeptStreams, RackStreams
from surgeon.training.racks.model import RackModel, feed_stream, open_rack, save_rack
from surgeon.training.racks.partition import Racks
from surgeon.training.racks.rack_log import ItemKey, ItemKind
from surgeon.training.racks.run_files import (
    RACK_FILE,
    RESULT_FILE,
    STREAMS,
    RacksToTrain,
    finish_racks,
    is_done,
    rack_folder,
)
from surgeon.training.run import Trained, TrainingTask, finish_run, lock_run, open_run, train
from surgeon.training.settings import TrainSettings
from surgeon.training.texts import TrainTexts, model_inputs
from surgeon.words import plural


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


def rack_task(
    rack: RackModel,
    held_out: HeldOutQuality,
    streams: RackStreams,
    teacher: RackModel | None,
    distillation: Distillation | None,
) -> TrainingTask:
    """Make the task that `train` trains a rack by; it is measured by its coda's prediction on held-out text.

    Args:
        held_out: the text, and the original where divergence from it is wanted.
        teacher: its part of the original (`teacher_of`), where it is distilled.
        distillation: what is learned from that.
    """
    assert (streams.source is None) == rack.is_first
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
    if teacher is None or distillation is None:
        return task
    loss = distilled_rack_loss(rack, teacher, distillation, streams)
    return replace(task, towards=loss, uses_all=True)


@dataclass(frozen=True)
class TrainedModel:
    """A model that was trained as one, or rack by rack.

    Attributes:
        whole: the result as if it had been trained as one, with the model in memory.
        folder: of the run.
        method: for people.
        racks: None where it was trained as one.
        codas: of every rack but the last.
        results: of every rack, by its coda's prediction; the last one's are the whole model's.
    """

    whole: Trained
    folder: Path
    method: str
    racks: Racks | None = None
    codas: tuple[Coda, ...] = ()
    results: tuple[Trained, ...] = ()

    def lines(self) -> Iterator[str]:
        if self.racks is None:
            return
        for rack, one in zip(self.racks.texts[:-1], self.results, strict=False):
            before = one.before.perplexity
            after = one.after.perplexity
            yield f"rack {rack}: perplexity by its coda {before:.4g} before, {after:.4g} after"

    def record(self, texts: TrainTexts, settings: TrainSettings) -> dict[str, Any]:
        entries = {
            "method": self.method,
            **texts.record(),
            "window": texts.training.window,
            "settings": settings.to_json(),
            "steps": self.whole.steps,
            "tokens": self.whole.tokens,
            "seconds": self.whole.seconds,
        }
        if self.racks is not None:
            each = zip(self.racks.texts, self.results, strict=True)
            entries["racks"] = {
                "coda": self.racks.depth,
                "each": [{"layers": text} | one.to_json() for text, one in each],
            }
        return entries

    def write(self, output: Path, **options: Any) -> Proof:
        """Write a checkpoint, with adapters merged and codas beside it.

        Args:
            options: as `surgeon.export` takes them.

        Raises:
            NotProven: if what was written is not the model, or its program not the one that was trained.
            OSError, ValueError: as `surgeon.export`.
        """
        model = self.whole.merged()
        racks = self.racks
        if racks is None:
            return export(model, output, **options)
        return export_with_codas(
            model, output, racks.texts, racks.ends, racks.depth, self.codas, **options
        )

    def finish(self, record: dict[str, Any]) -> None:
        """Complete the run's record and remove what only the run needed, once the checkpoint is written."""
        if self.racks is None:
            finish_run(self.folder, record)
        else:
            finish_racks(self.folder, self.racks, record)


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
        return HeldOutQuality(asked.texts.held_out, None if asked.original is None else asked.original())

    with lock_run(asked.folder, asked.device):
        open_run(asked.folder, asked.identity_of_racks() | asked.settings_and_text())
        for index in range(len(asked.racks)):
            folder = rack_folder(asked.folder, index)
            before = rack_folder(asked.folder, index - 1) / STREAMS
            if not is_done(asked.folder, index):
                rack = rack_of(asked.whole, asked.racks, index, asked.seed)
                settings = asked.settings
                source = None if rack.is_first else KeptStreams(before)
                sink = None if rack.is_last else KeptStreams(folder / STREAMS)
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
                    window = text.window * int(rack.model.config.hidden_size) * rack.model.dtype.itemsize
                    sink.require_room((training + measured) * window)
                streams = RackStreams(settings.batch, source, sink)
                task = rack_task(rack, held_out(), streams, teacher, settings.distillation)
                identity = asked.identity_of_racks()
                train_rack(rack, task, asked.texts, settings, asked.folder, identity, asked.device)
            finish_run(folder, {})
            if index > 0:  # what was kept for this rack is of no more use
                shutil.rmtree(before, ignore_errors=True)
        return gather(asked)
