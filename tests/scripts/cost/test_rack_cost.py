"""Racks on paper against turns counted one by one, and the article's own figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scripts.cost.rack_cost import BACKWARD, RackTraining, local, pipelined
from scripts.cost.racks import averaging_bytes, bubble, window_tokens
from tests.cost.examples import hardware, shapes

# A head of one row costs next to nothing, so that racks are alike.
EVEN = RackTraining(
    layers=8, layer_parameters=10**6, hidden=1, vocabulary=1, racks=4, microbatches=8, tokens=10, flops=1e9, link=1e12
)
WIDE = replace(EVEN, hidden=512, vocabulary=8000, link=1e8, latency=0.01, coda=1)


def simulated(training: RackTraining) -> float:
    """A pipeline in which all forward passes come before the backward ones (GPipe), event by event.

    Its turns are as many as 1F1B's; it differs in what it holds in memory.
    """
    racks, count = training.racks, training.microbatches
    layers = training.layers // racks
    forward = [training.forward(layers, rack == racks - 1) for rack in range(racks)]
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
def test_a_pipeline_takes_what_its_turns_take(training: RackTraining, racks: int, microbatches: int) -> None:
    training = replace(training, racks=racks, microbatches=microbatches)
    assert pipelined(training).seconds == pytest.approx(simulated(training), rel=1e-9)


def test_local_racks_never_wait_for_each_other() -> None:
    step = local(EVEN)
    assert step.idle == pytest.approx(0, abs=1e-6)
    assert (step.backward_bytes, step.in_flight) == (0, 1)
    assert step.forward_bytes == pipelined(EVEN).backward_bytes == 8 * 10 * 1 * 2
    assert pipelined(EVEN).in_flight == 4


def test_the_articles_gain_is_the_bubble_of_eight_microbatches() -> None:
    assert pipelined(EVEN).idle == pytest.approx(bubble(4, 8), rel=1e-4)
    assert pipelined(EVEN).seconds / local(EVEN).seconds == pytest.approx(1.375, rel=1e-3)
    assert bubble(32, 8) > 0.75


def test_codas_and_heads_cost_local_training_computation() -> None:
    plain, both = local(EVEN), local(replace(EVEN, coda=2))
    assert both.seconds == pytest.approx(2 * plain.seconds, rel=1e-5)  # two layers a rack, and two more


def test_a_slow_link_sets_the_pace_of_both() -> None:
    slow = replace(EVEN, link=10.0)  # two seconds a message, far more than is computed
    assert local(slow).seconds == pytest.approx(8 * 2.0)
    assert pipelined(slow).seconds == pytest.approx(8 * 2.0 + 3 * 4.0, rel=0.1)
    assert local(slow).idle > 0.9


def test_traffic_is_counted_both_ways() -> None:
    assert window_tokens(6e9, replace(EVEN, hidden=1000)) == 10**6
    assert window_tokens(6e9, replace(EVEN, hidden=1000), boundaries=1) == 3 * 10**6
    assert averaging_bytes(replace(EVEN, coda=2)) == 2 * 3 * 2 * 10**6 * 2 // 4


def test_a_models_training_is_made_of_its_shapes_and_the_hardware() -> None:
    model = shapes(num_hidden_layers=4)
    made = RackTraining.of(model, hardware(), racks=2, microbatches=3, tokens=80, coda=1)
    assert made.layer_parameters == 64 * (64 + 32 + 32 + 64 + 3 * 96)
    assert (made.layers, made.hidden, made.vocabulary, made.coda) == (4, 64, 100, 1)
    assert made.flops == 8 * 2e12
    assert (made.link, made.latency) == (8 * 1e5, 1e-2)


@pytest.mark.parametrize(
    ("change", "said"),
    [({"racks": 3}, "8 layers do not divide into 3 racks"), ({"tokens": 0}, "tokens must be"), ({"link": 0.0}, "link")],
)
def test_impossible_trainings_are_refused(change: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(EVEN, **change)  # type: ignore[arg-type]
