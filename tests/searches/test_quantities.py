"""Objectives as users name them, and what they are of trials."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from surgeon.cost.deployment import Deployment, Workload
from surgeon.language.program import Program
from surgeon.quality.summary import Quality
from surgeon.searches.mixture import Trial
from surgeon.searches.pricing import Pricing
from surgeon.searches.quantities import Aspect, parse_objectives
from tests.cost.examples import hardware, model

PROGRAM = Program.parse("[A0 A1] [F0 F1] A2 F2 A3 F3")
MEASURED = Quality(7.5, divergence=0.03, more={"accuracy:piqa": 0.7})


def pricing(text: str) -> Pricing:
    aspects = tuple(one for one in parse_objectives(text) if one.is_priced)
    return Pricing(model(), aspects, Deployment(2), Workload(1, 5, 4), {"l4": hardware()})


def test_several_objectives() -> None:
    found = parse_objectives("divergence, depth,latency@l4,accuracy:piqa")
    assert found == (
        Aspect("divergence"),
        Aspect("depth"),
        Aspect("latency", "l4"),
        Aspect("accuracy", "piqa"),
    )
    assert [str(one) for one in found] == ["divergence", "depth", "latency@l4", "accuracy:piqa"]
    assert [one.is_priced for one in found] == [False, True, True, False]


def test_less_is_better_of_all() -> None:
    text = "divergence,perplexity,depth,speedup@l4,accuracy:piqa,accuracy:arc"
    prices = pricing(text)
    costs = [
        *prices.costs(
            parse_objectives(text), Trial(str(PROGRAM), "window", (), number=0, measured=MEASURED)
        )
    ]
    ratio = prices.price(Aspect("speedup", "l4"), PROGRAM)
    assert costs == [0.03, 7.5, 3, ratio, pytest.approx(0.3), math.inf]
    assert ratio < 1
    naturally = [one.natural(cost) for one, cost in zip(parse_objectives(text)[:5], costs, strict=False)]
    assert naturally == [0.03, 7.5, 3, 1 / ratio, pytest.approx(0.7)]


def test_what_is_not_known_is_never_best() -> None:
    objectives = parse_objectives("divergence,depth")
    assert objectives[0].read_cost(replace(MEASURED, divergence=math.nan)) == math.inf
    trial = Trial(str(PROGRAM), "window", (), number=3, measured=MEASURED)
    assert pricing("depth").costs(objectives, trial) == (0.03, 3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("divergance", "unknown objective 'divergance'; did you mean 'divergence'?"),
        ("acuracy:piqa", "did you mean 'accuracy:TASK'?"),
        ("accuracy", "say on which, as in accuracy:piqa"),
        ("latency", "say on which, as in latency@h100-sxm"),
        ("depth@l4", "leave @l4 out"),
        ("depth:piqa", "only accuracy is of a task"),
        ("depth,divergence,depth", "names depth twice; keep one"),
    ],
)
def test_what_is_no_objective(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=".") as caught:
        parse_objectives(text)
    assert said in str(caught.value)
