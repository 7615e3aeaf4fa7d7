"""What a model is given to do where nobody says."""

from __future__ import annotations

from surgeon.cost.deployment import Workload


def test_texts_are_such_as_the_model_has_positions_for() -> None:
    assert Workload.within(131072) == Workload(1, 1024, 512)
    assert Workload.within(512, batch=3) == Workload(3, 256, 128)
    assert Workload.within(512, prompt=400, new=10) == Workload(1, 400, 10)
    assert Workload.within(4).length <= 4
