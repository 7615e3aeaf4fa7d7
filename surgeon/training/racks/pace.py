"""Racks that are slower than they need be, to see what the others do: for measurements."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd import Variable

from surgeon.training.racks.rack_log import RackLog
from surgeon.training.trainer import LossParts


@dataclass(frozen=True)
class RackPace:
    """How slow a rack is made.

    Attributes:
        factor: what the time of a micro-batch's forward and backward pass is multiplied with, by sleeping after it.
        least: seconds that they take at least.
    """

    factor: float = 1.0
    least: float = 0.0

    def __post_init__(self) -> None:
        if self.factor < 1 or self.least < 0:
            raise ValueError(
                f"a rack is made slower by a factor of at least 1 and takes at least 0 seconds, not {self.factor:g} "
                f"and {self.least:g}"
            )


class PacedLoss:
    """A `LossParts` of which each micro-batch, with its backward pass, takes as long as a pace says.

    What a rack waits for others is not counted.
    """

    def __init__(self, inner: LossParts, pace: RackPace, log: RackLog) -> None:
        self.inner = inner
        self.pace = pace
        self.log = log

    def loss(self, model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """As `LossParts` has it."""
        begun = self._busy()

        def rest() -> None:
            took = self._busy() - begun
            time.sleep(max(0.0, self.pace.factor * took - took, self.pace.least - took))

        parts = self.inner.loss(model, inputs)
        engine: Any = Variable._execution_engine
        parts["loss"].register_hook(lambda _: engine.queue_callback(rest))  # when the backward pass is through
        return parts

    def _busy(self) -> float:
        return time.monotonic() - self.log.waited
