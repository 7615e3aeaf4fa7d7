"""A rack under `train()`: where its streams come from and go to, its loss, and what it is judged by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from surgeon.quality.summary import Quality
from surgeon.quality.text import logits_of
from surgeon.training.distill.distiller import Distillation
from surgeon.training.head_loss import text_loss
from surgeon.training.held_out import HeldOutQuality, Measure
from surgeon.training.racks.distilled import DistilledRackLoss
from surgeon.training.racks.model import RackModel
from surgeon.training.racks.streams import RackStreams
from surgeon.training.racks.stretch import fed
from surgeon.training.run import TrainingTask


class RackLoss:
    """The loss of a rack: that of its coda's prediction, the mean per token; a `LossParts`.

    The stream of a micro-batch is handed on before its gradient is computed, so that the rack behind need not wait.
    """

    def __init__(self, streams: RackStreams) -> None:
        self.streams = streams

    def loss(self, model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """As `LossParts` has it."""
        with fed(model, self.streams.take(inputs["place"])) as layers:
            loss = text_loss(model, inputs)
            assert layers.outgoing is not None
            self.streams.give(inputs["place"], layers.outgoing)
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
        return TrainingTask(measure, RackLoss(streams))
    return TrainingTask(measure, DistilledRackLoss(rack, teacher, distillation, streams), uses_all=True)
