"""A rack under `train()`: where its streams come from and go to, its loss, and what it is judged by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgeon.models.families import family_of
from surgeon.quality.summary import Quality
from surgeon.quality.text import logits_of
from surgeon.training.distill.distiller import (
    Distillation,
    ask_teacher,
    counterparts,
    parts_of_loss,
    require_unedited_teacher,
    watched_streams,
)
from surgeon.training.head_loss import loss_at_head, next_tokens, text_loss
from surgeon.training.held_out import HeldOutQuality, Measure
from surgeon.training.racks.build import rack_of
from surgeon.training.racks.model import RackModel, fed
from surgeon.training.racks.partition import Racks
from surgeon.training.racks.streams import RackStreams
from surgeon.training.run import TrainingTask
from surgeon.training.texts import model_inputs


def teacher_of(original: PreTrainedModel, racks: Racks, index: int) -> RackModel:
    """The original's layers that a rack stands for: from where its stream comes in to where it is handed on.

    Args:
        original: unedited; it is left as it is.
        racks: of the program of a model that was edited from it.

    Raises:
        ValueError: if it runs an edited program, or is another model than the program is of.
    """
    dense = require_unedited_teacher(original)
    layers = len(dense) // family_of(original.config).steps_per_layer
    places = counterparts(racks.program, layers)
    ends = [places[end] for end in racks.ends]
    cut = Racks.parse([f"{start}:{end}" for start, end in zip([0, *ends], ends, strict=False)], dense, 0)
    found = rack_of(original, cut, index)
    found.model.eval().requires_grad_(False)
    return found


class DistilledRackLoss:
    """The loss of a rack that is distilled; a `LossParts`.

    Its parts, each a mean over the predicted tokens: `hidden`, the relative error of its streams; of the last rack
    `logits`, its prediction's divergence from the original's, and `text`; of others `text` is their coda's.

    Args:
        teacher: the rack's part of the original (`teacher_of`).
        streams: its own and, behind them, the original's: (windows, tokens, 2 x hidden).
    """

    def __init__(self, rack: RackModel, teacher: RackModel, distillation: Distillation, streams: RackStreams) -> None:
        self.rack = rack
        self.teacher = teacher
        self.streams = streams
        self.own = distillation if rack.is_last else replace(distillation, logits=0.0, text=1.0)
        nodes = rack.racks.ranges[rack.index].nodes
        first_layer = teacher.racks.ranges[teacher.index].layers.start
        layers = teacher.racks.ranges[-1].layers.stop
        self.counterparts = {
            node - nodes.start: layer - first_layer
            for node, layer in counterparts(rack.racks.program, layers).items()
            if nodes.start < node <= nodes.stop
        }
        rack.layers.apart = not rack.is_last

    def __call__(self, model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        windows = model_inputs(inputs)
        stream = self.streams.take(inputs["place"])
        incoming = [None, None] if stream is None else stream.chunk(2, dim=-1)
        teacher: Any = self.teacher.model
        with fed(teacher, incoming[1]) as stretch:
            taught = ask_teacher(teacher, windows, self.counterparts, self.own)
            original = stretch.outgoing
        labels = next_tokens(inputs["labels"])
        length = len(self.rack.layers.program)
        with fed(model, incoming[0]) as layers, watched_streams(model, [*self.counterparts], length) as streams:
            at_head = loss_at_head(model, windows, lambda: self.own.task(taught, labels))
            assert layers.outgoing is not None
            assert original is not None
            self.streams.give(inputs["place"], torch.cat([layers.outgoing, original.to(layers.outgoing)], dim=-1))
        return parts_of_loss(self.own, at_head, labels, streams, taught)


def rack_loss(streams: RackStreams, model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Compute the loss of a rack's coda, the mean per predicted token.

    The stream of a micro-batch is handed on before its gradient is computed, so that the rack behind need not wait.
    """
    with fed(model, streams.take(inputs["place"])) as layers:
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
        """The original's own quality; None without one."""
        return self.held_out.original

    def measure(self, model: nn.Module, step: int) -> Quality:
        """The quality of the coda's prediction after so many steps; what is known already is not measured again."""
        if self._latest is None or self._latest[0] != step:
            self._latest = step, self._measured(model, step)
        return self._latest[1]

    def _measured(self, model: nn.Module, step: int) -> Quality:
        whole = logits_of(model)
        windows = iter(range(len(self.held_out.ids)))

        def logits(ids: Tensor) -> Tensor:
            window = next(windows)
            with fed(model, self.streams.take_held_out(step, window)) as layers:
                found = whole(ids)
                assert layers.outgoing is not None
                self.streams.give_held_out(step, window, layers.outgoing)
            return found

        return self.held_out.quality(model, logits)


def rack_task(
    rack: RackModel,
    held_out: HeldOutQuality,
    streams: RackStreams,
    teacher: RackModel | None = None,
    distillation: Distillation | None = None,
) -> TrainingTask:
    """What `train` trains a rack by.

    Args:
        teacher: its part of the original (`teacher_of`), where it is distilled.
        distillation: what is learned from that.
    """
    assert (streams.source is None) == rack.is_first
    measure: Measure = RackHeldOut(held_out, streams)
    if teacher is None or distillation is None:
        return TrainingTask(measure, partial(rack_loss, streams))
    return TrainingTask(measure, DistilledRackLoss(rack, teacher, distillation, streams), uses_all=True)
