"""Time on this machine: real ranks, in turns, and what is said where a limit is missed."""

from __future__ import annotations

from pathlib import Path

import pytest

from surgeon.checkpoint.load import read_config
from surgeon.checkpoint.read import Checkpoint
from surgeon.cost.hardware_file import parse_hardware
from surgeon.cost.predict import Deployment, Workload, predict
from surgeon.cost.shapes import ModelShapes
from surgeon.program import Program
from surgeon.search.here import TimeHere, calibrate_here, measured_here, missed_here
from surgeon.search.limits import parse_limits

HALF = Program.parse("A0 F0")


@pytest.mark.alone
def test_less_takes_less_time(tiny_checkpoint: Path) -> None:
    config = read_config(Checkpoint(tiny_checkpoint))
    dense = Program.dense(config.num_hidden_layers)
    found = measured_here(tiny_checkpoint, dense, [HALF, dense], 1, Workload(1, 8, 6), rounds=3, device="cpu")
    assert list(found) == [dense, HALF]
    assert found[dense].speedup == 1
    assert found[HALF].low <= found[HALF].seconds <= found[HALF].high < found[dense].seconds
    assert found[HALF].speedup > 1


@pytest.mark.alone
def test_the_calibrated_machine_prices_programs(tiny_checkpoint: Path) -> None:
    config = read_config(Checkpoint(tiny_checkpoint))
    hardware = parse_hardware(calibrate_here(tiny_checkpoint, 1, rounds=1, device="cpu"))
    assert hardware.name == "here"
    shapes = ModelShapes.of("tiny", config)
    dense, half = (
        predict(shapes, program, hardware, Workload(1, 8, 6), Deployment(1, "float32")).per_token
        for program in (Program.dense(config.num_hidden_layers), HALF)
    )
    assert 0 < half < dense


def test_what_is_missed_is_said() -> None:
    dense = Program.dense(2)
    times = {dense: TimeHere(0.010, 0.009, 0.012, 1.0), HALF: TimeHere(0.006, 0.005, 0.007, 1.6)}
    limits = parse_limits("latency<=5ms@here,speedup>=1.5@here,latency<=1ms@h100-sxm,depth=1")
    said = missed_here(limits, HALF, dense, times)
    assert said == "latency<=5ms@here is missed: measured 6 ms per token (5 ms to 7 ms over the rounds), speedup 1.6x"
    assert missed_here(parse_limits("latency<=0.6x@here"), HALF, dense, times) == ""
    assert "speedup>=1.7@here is missed" in missed_here(parse_limits("speedup>=1.7@here"), HALF, dense, times)


def test_a_time_per_token_needs_tokens() -> None:
    with pytest.raises(ValueError, match="ask for 2 or more, not 1"):
        measured_here("demo", HALF, [], 1, Workload(1, 8, 1))
