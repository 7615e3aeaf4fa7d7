"""Time on this machine: real ranks, in turns, and what is said where a limit is missed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from surgeon.checkpoint.config import open_stored
from surgeon.cost.calibrate import calibrate
from surgeon.cost.deployment import Deployment, Workload
from surgeon.cost.hardware import parse_hardware
from surgeon.cost.predict import predict
from surgeon.language.program import Program
from surgeon.models.shapes import ModelShapes
from surgeon.quality.summary import Quality
from surgeon.runtime.comm.collectives import Link
from surgeon.runtime.worker.rank import RankOptions
from surgeon.searches import winners as here
from surgeon.searches.mixture import Trial
from surgeon.searches.quantities import HERE, parse_limits
from surgeon.searches.question import Question
from surgeon.searches.winners import TimeHere, fast_enough_here, measured_here, missed_here
from tests.tiny_models import tiny_model

ONE_LAYER = Program.parse("A0 F0")


@pytest.mark.alone
def test_less_takes_less_time(tmp_path: Path) -> None:
    """One layer of many: they differ far more than a machine's noise makes them."""
    layers = 24
    tiny_model("llama", layers, hidden_size=128, intermediate_size=512).save_pretrained(tmp_path)
    dense = Program.dense(layers)
    found = measured_here(tmp_path, dense, [ONE_LAYER, dense], RankOptions(1, "cpu"), Workload(1, 8, 16))
    assert list(found) == [dense, ONE_LAYER]
    assert found[dense].speedup == 1
    for one in found.values():
        assert 0 < one.low <= one.seconds <= one.high
    assert found[ONE_LAYER].low < found[dense].low
    assert found[ONE_LAYER].seconds < found[dense].seconds
    assert found[ONE_LAYER].speedup > 1


def test_a_time_is_the_median_of_rounds_and_speedup_that_of_each_round() -> None:
    summary = TimeHere.of([0.5, 2.0, 1.0], [1.0, 3.0, 4.0])
    assert summary == TimeHere(seconds=1.0, low=0.5, high=2.0, speedup=2.0)


@pytest.mark.alone
def test_the_calibrated_machine_prices_programs(tiny_checkpoint: Path) -> None:
    config = open_stored(tiny_checkpoint).config
    hardware = parse_hardware(calibrate(HERE, tiny_checkpoint, [1], rounds=1, device="cpu"))
    assert hardware.name == "here"
    shapes = ModelShapes.of("tiny", config)
    dense, half = (
        predict(shapes, program, hardware, Workload(1, 8, 6), Deployment(1, "float32")).per_token
        for program in (Program.dense(config.num_hidden_layers), ONE_LAYER)
    )
    assert 0 < half < dense


def test_what_is_missed_is_said() -> None:
    dense = Program.dense(2)
    times = {dense: TimeHere(0.010, 0.009, 0.012, 1.0), ONE_LAYER: TimeHere(0.006, 0.005, 0.007, 1.6)}
    limits = parse_limits("latency<=5ms@here,speedup>=1.5@here,latency<=1ms@h100-sxm,depth=1")
    said = missed_here(limits, ONE_LAYER, dense, times)
    assert (
        said
        == "latency<=5ms@here is missed: measured 6 ms per token (5 ms to 7 ms over the rounds), speedup 1.6x"
    )
    assert missed_here(parse_limits("latency<=0.6x@here"), ONE_LAYER, dense, times) == ""
    assert "speedup>=1.7@here is missed" in missed_here(
        parse_limits("speedup>=1.7@here"), ONE_LAYER, dense, times
    )


def test_a_time_per_token_needs_tokens() -> None:
    with pytest.raises(ValueError, match="ask for 2 or more, not 1"):
        measured_here("demo", ONE_LAYER, [], RankOptions(1, "cpu"), Workload(1, 8, 1))


FOUR = Program.dense(4)
TEXTS = ["[A0 A1] [F0 F1] A2 F2 A3 F3", "A0 F0 [A1 A2] [F1 F2] A3 F3", "A0 F0 A1 F1 [A2 A3] [F2 F3]"]


def trial(number: int) -> Trial:
    measured = Quality(9, divergence=0.1 * number)
    return Trial(TEXTS[number], "window", (), number=number, measured=measured)


def test_every_candidate_keeps_its_limits_of_time_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    speedups = dict(zip(map(Program.parse, TEXTS), (1.1, 1.4, 1.2), strict=True)) | {FOUR: 1.0}
    times = {program: TimeHere(0.01 / speed, 0.01, 0.02, speed) for program, speed in speedups.items()}
    links: list[Any] = []
    monkeypatch.setattr(here, "measured_here", lambda *given: links.append(given[3].link) or times)
    mixture = SimpleNamespace(model=SimpleNamespace(program=FOUR, positions=64))

    def fast_enough(budget: str) -> list[int]:
        asked = {"settings": Question("pair", budget, link_delay="2ms" if "speedup" in budget else None)}
        question: Any = SimpleNamespace(mixture=mixture, budget=budget, **asked)
        trials = [trial(number) for number in range(3)]
        return [one.number for one in fast_enough_here(question, trials, "model")]

    assert fast_enough("speedup>=1.15@here") == [1, 2]
    assert links == [Link(2e-3)], "as they were predicted"
    assert "trial 0: speedup>=1.15@here is missed" in capsys.readouterr().err
    assert fast_enough("speedup>=1.3@here") == [1], (
        "a runner-up that is too slow would win on held-out text"
    )
    assert fast_enough("depth=3") == [0, 1, 2]
    with pytest.raises(ValueError, match="none of the best 3 programs keeps"):
        fast_enough("speedup>=2@here")
