"""A rack under `train()`: where its streams come from and go to, its loss, and what it is judged by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from surgeon.quality.text import TextQuality, logits_of
from surgeon.training.distill.distiller import Distillation
from surgeon.training.held_out import HeldOutQuality, Measure
from surgeon.training.racks.distilled import DistilledRackLoss
from surgeon.training.racks.model import RackModel
from surgeon.training.racks.streams import StreamSink, StreamSource, stretch_of
from surgeon.training.racks.stretch import fed
from surgeon.training.run import TrainingTask
from surgeon.training.settings import TrainSettings


class RackLoss:
    """The loss of a rack: that of its coda's prediction; a `LossParts`.

    The stream of a micro-batch is handed on before its gradient is computed, so that the rack behind need not wait.
    """

    def __init__(self, rack: RackModel, source: StreamSource | None, sink: StreamSink | None) -> None:
        self.rack, self.source, self.sink = rack, source, sink

    def loss(self, model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """As `LossParts` has it."""
        places = stretch_of(inputs["place"])
        stream = None if self.source is None else self.source.take(places)
        handed_on, loss = self.rack.loss(model, inputs["input_ids"], stream)
        if self.sink is not None:
            self.sink.give(places, handed_on)
        return {"loss": loss}


class RackHeldOut:
    """Measures a rack by its coda's prediction on held-out text; a `Measure`.

    Args:
        held_out: the text, and the original where divergence from it is wanted.
    """

    def __init__(
        self, rack: RackModel, held_out: HeldOutQuality, source: StreamSource | None, sink: StreamSink | None
    ) -> None:
        self.rack, self.held_out, self.source, self.sink = rack, held_out, source, sink
        self._latest: tuple[int, TextQuality] | None = None

    @property
    def original(self) -> TextQuality | None:
        """The original's own quality; None without one."""
        return self.held_out.original

    def measure(self, model: nn.Module, step: int) -> TextQuality:
        """The quality of the coda's prediction after so many steps; what is known already is not measured again."""
        if self._latest is None or self._latest[0] != step:
            self._latest = step, self._measured(model, step)
        return self._latest[1]

    def _measured(self, model: nn.Module, step: int) -> TextQuality:
        whole, windows = logits_of(model), iter(range(len(self.held_out.ids)))

        def logits(ids: Tensor) -> Tensor:
            window = next(windows)
            stream = None if self.source is None else self.source.take_held_out(step, window)
            with fed(model, stream) as layers:
                found = whole(ids)
                if self.sink is not None:
                    assert layers.outgoing is not None
                    self.sink.give_held_out(step, window, layers.outgoing)
            return found

        return self.held_out.quality(model, logits)


def rack_task(
    rack: RackModel,
    held_out: HeldOutQuality,
    source: StreamSource | None,
    sink: StreamSink | None,
    teacher: RackModel | None = None,
    distillation: Distillation | None = None,
) -> TrainingTask:
    """What `train` trains a rack by.

    Args:
        source: None for the first rack.
        sink: None for the last one.
        teacher: its part of the original (`teacher_of`), where it is distilled.
        distillation: what is learned from that.
    """
    assert (source is None) == rack.is_first
    measure: Measure = RackHeldOut(rack, held_out, source, sink)
    if teacher is None or distillation is None:
        return TrainingTask(measure, RackLoss(rack, source, sink))
    return TrainingTask(measure, DistilledRackLoss(rack, teacher, distillation, source, sink), uses_all=True)


def own_settings(settings: TrainSettings) -> TrainSettings:
    """What `train` gets: what a rack learns from the original is its task's."""
    return replace(settings, distillation=None)


def check_settings(settings: TrainSettings) -> None:
    """Refuse settings that racks cannot be trained with.

    Raises:
        ValueError: naming the one, and what to do.
    """
    if settings.scope == "edited":
        raise ValueError("racks train their codas, too, which no edit has touched; use --train all, or norms")
    if settings.distillation is not None and not settings.distillation.hidden:
        raise ValueError(
            "racks learn the original's streams, each those of its own stretch, and only the last one its predictions; "
            "use --distill both, or hidden"
        )
    if settings.lora is not None:
        raise ValueError("racks are trained without adapters; leave --lora out")
    if settings.patience is not None:
        raise ValueError("racks are trained side by side, and none of them ends before the others; drop --patience")
