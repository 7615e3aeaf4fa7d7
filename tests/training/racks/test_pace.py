"""Racks made slower."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surgeon.training.racks.items import ItemKey, ItemKind
from surgeon.training.racks.pace import PacedLoss, RackPace
from surgeon.training.racks.traffic import Timeline


class Slow:
    """A loss that waits for input, then computes."""

    def __init__(self, timeline: Timeline, waits: float, computes: float) -> None:
        self.timeline, self.waits, self.computes = timeline, waits, computes

    def loss(self, model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        with self.timeline.waiting("wait_input", ItemKey(1, ItemKind.TRAINING)):
            time.sleep(self.waits)
        time.sleep(self.computes)
        return {"loss": model(inputs["x"]).sum()}


@pytest.mark.alone
@pytest.mark.parametrize(
    ("pace", "waits", "computes", "takes"),
    [
        (RackPace(factor=3.0), 0.0, 0.03, 0.09),
        (RackPace(factor=9.0), 0.2, 0.01, 0.29),  # waiting is not made longer
        (RackPace(least=0.08), 0.0, 0.01, 0.08),
        (RackPace(), 0.0, 0.01, 0.01),
    ],
)
def test_a_micro_batch_takes_as_long_as_asked(pace: RackPace, waits: float, computes: float, takes: float) -> None:
    timeline, model = Timeline(), nn.Linear(2, 1)
    paced = PacedLoss(Slow(timeline, waits, computes), pace, timeline)
    begun = time.monotonic()
    paced.loss(model, {"x": torch.ones(2)})["loss"].backward()
    assert takes <= time.monotonic() - begun < takes + 1.0
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, torch.ones(1, 2))


def test_a_rack_is_never_made_faster() -> None:
    with pytest.raises(ValueError, match=r"a factor of at least 1 and takes at least 0 seconds, not 0\.5 and 0"):
        RackPace(factor=0.5)
