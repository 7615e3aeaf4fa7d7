"""Racks made slower."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surgeon.training.racks.streams import ItemKey, ItemKind, RackLog, RackPace, paced_loss
from tests.clock import HandClock


class Slow:
    """A loss that waits for input, then computes."""

    def __init__(self, log: RackLog, clock: HandClock, waits: float, computes: float) -> None:
        self.log, self.clock, self.waits, self.computes = log, clock, waits, computes

    def loss(self, model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        with self.log.time_wait("wait_input", ItemKey(1, ItemKind.TRAINING)):
            self.clock.sleep(self.waits)
        self.clock.sleep(self.computes)
        return {"loss": model(inputs["x"]).sum()}


@pytest.mark.parametrize(
    ("pace", "waits", "computes", "takes"),
    [
        (RackPace(factor=3.0), 0.0, 3.0, 9.0),
        (RackPace(factor=9.0), 20.0, 1.0, 29.0),  # waiting is not made longer
        (RackPace(least=8.0), 0.0, 1.0, 8.0),
        (RackPace(factor=3.0, least=8.0), 0.0, 3.0, 9.0),
        (RackPace(), 0.0, 1.0, 1.0),
    ],
)
def test_a_micro_batch_takes_as_long_as_asked(
    pace: RackPace, waits: float, computes: float, takes: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = HandClock()
    monkeypatch.setattr("surgeon.training.racks.streams.time", clock)
    log, model = RackLog(), nn.Linear(2, 1)
    paced = paced_loss(Slow(log, clock, waits, computes).loss, pace, log)
    begun = clock.now()
    paced(model, {"x": torch.ones(2)})["loss"].backward()
    assert clock.now() - begun == pytest.approx(takes)
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, torch.ones(1, 2))


def test_a_rack_is_never_made_faster() -> None:
    with pytest.raises(
        ValueError, match=r"a factor of at least 1 and takes at least 0 seconds, not 0\.5 and 0"
    ):
        RackPace(factor=0.5)
