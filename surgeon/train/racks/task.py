"""A rack under `train()`: where its streams come from and go to, its loss, and what it is judged by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from surgeon.checkpoint.stretch import fed
from surgeon.quality.text import TextQuality
from surgeon.train.held_out import HeldOutQuality, Measure, logits_by
from surgeon.train.racks.model import RackModel
from surgeon.train.racks.partition import Racks
from surgeon.train.run import TrainingTask
from surgeon.train.settings import TrainSettings


class StreamSource(Protocol):
    """Where a rack's streams come from: what the rack before handed on."""

    def take(self, places: range) -> Tensor:
        """The streams of a micro-batch, (windows, tokens, hidden).

        Args:
            places: in the run's order of windows; step s has those from s * batch on. A rack that comes back from its
                checkpoint asks again for those behind it; one that was short of memory asks for fewer at a time.
        """

    def take_held_out(self, step: int, window: int) -> Tensor:
        """The stream of a window of the held-out text, (1, tokens, hidden), after so many steps of the rack before."""


class StreamSink(Protocol):
    """Where they go: to the rack behind."""

    def give(self, places: range, stream: Tensor) -> None:
        """Hand on the streams of a micro-batch, (windows, tokens, hidden); they may have been handed on before."""

    def give_held_out(self, step: int, window: int, stream: Tensor) -> None:
        """Hand on the stream of a window of the held-out text, (1, tokens, hidden), after so many steps."""


class RackLoss:
    """The loss of a rack: that of its coda's prediction; a `LossParts`.

    The stream of a micro-batch is handed on before its gradient is computed, so that the rack behind need not wait.
    """

    def __init__(self, rack: RackModel, source: StreamSource | None, sink: StreamSink | None) -> None:
        self.rack, self.source, self.sink = rack, source, sink

    def loss(self, model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """As `LossParts` has it."""
        places = _stretch(inputs["place"])
        stream = None if self.source is None else self.source.take(places)
        handed_on, loss = self.rack.loss(model, inputs["input_ids"], stream)
        if self.sink is not None:
            self.sink.give(places, handed_on)
        return {"loss": loss}


def _stretch(places: Tensor) -> range:
    first, count = int(places[0]), len(places)
    assert places.tolist() == list(range(first, first + count))
    return range(first, first + count)


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
        whole, windows = logits_by(model), iter(range(len(self.held_out.ids)))

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
    rack: RackModel, held_out: HeldOutQuality, source: StreamSource | None, sink: StreamSink | None
) -> TrainingTask:
    """What `train` trains a rack by.

    Args:
        source: None for the first rack.
        sink: None for the last one.
    """
    assert (source is None) == rack.is_first
    measure: Measure = RackHeldOut(rack, held_out, source, sink)
    return TrainingTask(measure, RackLoss(rack, source, sink))


def check_settings(settings: TrainSettings) -> None:
    """Refuse settings that racks cannot be trained with.

    Raises:
        ValueError: naming the one, and what to do.
    """
    if settings.scope == "edited":
        raise ValueError("racks train their codas, too, which no edit has touched; use --train all, or norms")
    if settings.distillation is not None:
        raise ValueError("racks learn from the text alone; leave --distill out")
    if settings.lora is not None:
        raise ValueError("racks are trained without adapters; leave --lora out")
    if settings.patience is not None:
        raise ValueError("racks are trained side by side, and none of them ends before the others; drop --patience")


def identity_of(racks: Racks, index: int, seed: int | None) -> dict[str, Any]:
    """What a rack's run follows from beside the whole model, as JSON values."""
    return {"task": "rack", "racks": racks.texts, "coda": racks.depth, "coda_seed": seed, "rack": index}
