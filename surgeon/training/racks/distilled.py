"""A rack that learns from the same stretch of the original: to have its streams, and at the end its predictions.

What a rack's coda could teach its layers is to predict at once, which is not what the layers behind were trained to
read; a model that is healed by that gets worse. The original's stream is what they were trained to read. So each rack
is trained towards that, wherever its program has a counterpart of it (`distill/counterparts.py`), from the stream that
the rack before has made: it mends what that one left, too. The last rack's prediction is the model's own, and is held
against the original's. A private coda goes on learning the text, and keeps its gradient to itself.

All of it is local: a rack has the original's layers of its own stretch only, whose stream comes in and goes out beside
its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgeon.models.families import family_of
from surgeon.training.distill.counterparts import Counterpart, counterparts
from surgeon.training.distill.distiller import (
    Distillation,
    ask_teacher,
    parts_of_loss,
    require_unedited_teacher,
    watched_streams,
)
from surgeon.training.head_loss import loss_at_head, next_tokens
from surgeon.training.racks.build import rack_of
from surgeon.training.racks.model import RackModel
from surgeon.training.racks.partition import Racks
from surgeon.training.racks.streams import RackStreams
from surgeon.training.racks.stretch import fed
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
    places = {one.node: one.layer for one in counterparts(racks.program, layers)}
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
        self.counterparts = [
            Counterpart(one.node - nodes.start, one.layer - first_layer)
            for one in counterparts(rack.racks.program, layers)
            if nodes.start < one.node <= nodes.stop
        ]
        rack.layers.apart = not rack.is_last

    def loss(self, model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """As `LossParts` has it."""
        windows = model_inputs(inputs)
        stream = self.streams.take(inputs["place"])
        incoming = [None, None] if stream is None else stream.chunk(2, dim=-1)
        teacher: Any = self.teacher.model
        with fed(teacher, incoming[1]) as stretch:
            taught = ask_teacher(teacher, windows, self.counterparts, self.own)
            original = stretch.outgoing
        nodes = [one.node for one in self.counterparts]
        labels = next_tokens(inputs["labels"])
        length = len(self.rack.layers.program)
        with fed(model, incoming[0]) as layers, watched_streams(model, nodes, length) as streams:
            at_head = loss_at_head(model, windows, lambda: self.own.task(taught, labels))
            assert layers.outgoing is not None
            assert original is not None
            self.streams.give(inputs["place"], torch.cat([layers.outgoing, original.to(layers.outgoing)], dim=-1))
        return parts_of_loss(self.own, at_head, labels, streams, taught)
