"""scripts/cost/racks.py: racks on paper against turns counted one by one, the article's own figures, the tables."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.cost import racks
from scripts.cost.racks import (
    BACKWARD,
    RackTraining,
    averaging_bytes,
    bubble,
    local,
    pipelined,
    window_tokens,
)

# A head of one row costs next to nothing, so that racks are alike.
EVEN = RackTraining(
    layers=8,
    layer_parameters=10**6,
    hidden=1,
    vocabulary=1,
    racks=4,
    microbatches=8,
    tokens=10,
    flops=1e9,
    link=1e12,
)
WIDE = replace(EVEN, hidden=512, vocabulary=8000, link=1e8, latency=0.01, coda=1)


def simulated(training: RackTraining) -> float:
    """A pipeline in which all forward passes come before the backward ones (GPipe), event by event.

    Its turns are as many as 1F1B's; it differs in what it holds in memory.
    """
    racks, count = training.racks, training.microbatches
    layers = training.layers // racks
    forward = [training.computation(layers, rack == racks - 1) / (1 + BACKWARD) for rack in range(racks)]
    free = [0.0] * racks
    arrived = [0.0] * count
    for rack in range(racks):
        for batch in range(count):
            free[rack] = max(free[rack], arrived[batch]) + forward[rack]
            arrived[batch] = free[rack] + (training.send if rack < racks - 1 else 0)
    for rack in reversed(range(racks)):
        for batch in range(count):
            free[rack] = max(free[rack], arrived[batch]) + BACKWARD * forward[rack]
            arrived[batch] = free[rack] + (training.send if rack else 0)
    return free[0]


@pytest.mark.parametrize("racks", [1, 2, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 5, 32])
@pytest.mark.parametrize("training", [EVEN, WIDE])
def test_a_pipeline_takes_what_its_turns_take(
    training: RackTraining, racks: int, microbatches: int
) -> None:
    training = replace(training, racks=racks, microbatches=microbatches)
    assert pipelined(training) == pytest.approx(simulated(training), rel=1e-9)


def test_the_articles_gain_is_the_bubble_of_eight_microbatches() -> None:
    assert pipelined(EVEN) / local(EVEN) == pytest.approx(1.375, rel=1e-3)
    assert bubble(32, 8) > 0.75


def test_codas_and_heads_cost_local_training_computation() -> None:
    plain, both = local(EVEN), local(replace(EVEN, coda=2))
    assert both == pytest.approx(2 * plain, rel=1e-5)  # two layers a rack, and two more


def test_a_slow_link_sets_the_pace_of_both() -> None:
    slow = replace(EVEN, link=10.0)  # two seconds a message, far more than is computed
    assert local(slow) == pytest.approx(8 * 2.0)
    assert pipelined(slow) == pytest.approx(8 * 2.0 + 3 * 4.0, rel=0.1)


def test_traffic_is_counted_both_ways() -> None:
    assert window_tokens(6e9, replace(EVEN, hidden=1000)) == 10**6
    assert averaging_bytes(replace(EVEN, coda=2)) == 2 * 3 * 2 * 10**6 * 2 // 4


def test_the_articles_case_is_in_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "racks.md"
    monkeypatch.setattr(sys, "argv", ["racks.py", "-o", str(page)])
    racks.main()
    text = page.read_text()
    assert "| 4 | 27% | 1.38x |" in text
    assert "| 13B | 10.2 kB each way | 18 million | 20 |" in text
    assert page.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_codas_cost_what_the_bubble_gives() -> None:
    free, longer = (racks.speed_table(8, coda)[3].split(" | ")[3] for coda in (0, 4))
    assert float(free.rstrip("x")) > float(longer.rstrip("x"))
