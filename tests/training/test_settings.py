"""What settings say, and refuse."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from surgeon.training.settings import PRESETS, Distillation, TrainSettings, preset
from surgeon.training.token_store import ALL_TOKENS


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scope": "edit"}, "did you mean 'edited'"),
        ({"router": "frosen"}, "there is no router 'frosen'; did you mean 'frozen'"),
        ({"router": "frozen", "scope": "routers"}, "the scope routers trains nothing else"),
        ({"scope": "norms", "lora": 4}, "adapters .lora. are for matrices"),
        ({"lora": 0}, "lora must be at least 1, not 0"),
        ({"steps": "7"}, "steps must be a whole number, not '7'"),
        ({"batch": None}, "batch must be a whole number, not None"),
        ({"evaluate_every": 2.5}, "evaluate_every must be a whole number, not 2.5"),
        ({"learning_rate": "0.1"}, "learning_rate must be a number, not '0.1'"),
        ({"schedule": 3}, "schedule must be a text, not 3"),
        ({"arguments": "bf16"}, "arguments must be a mapping, not 'bf16'"),
        ({"distillation": "logits"}, "distillation must be a Distillation, not 'logits'"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"evaluate_every": 0}, "evaluate every must be"),
        (
            {"steps": 7, "epochs": 3.0},
            r"steps \(7\) and epochs \(3\) both say how long; leave one of them out",
        ),
        ({"epochs": 0.0}, "epochs must be above 0"),
        ({"epochs": float("nan")}, "epochs must be above 0"),
        ({"warmup": -1}, "warmup must be at least 0"),
        ({"learning_rate": 0.0}, "learning rate must be above 0"),
        ({"batch": 8, "micro_batch": 3}, "no multiple of a micro-batch of 3"),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainSettings(**given)
    with pytest.raises(ValueError, match="temperature must be a number, not '1'"):
        Distillation(temperature="1")  # type: ignore[arg-type]


def test_numbers_of_numpy_are_kept_as_a_record_can_hold_them() -> None:
    settings = TrainSettings(steps=np.int64(2), learning_rate=np.float32(0.5))  # type: ignore[arg-type]
    assert json.loads(json.dumps([settings.steps, settings.learning_rate])) == [2, 0.5]


def test_steps() -> None:
    assert TrainSettings(epochs=2.0, batch=8).steps_on(100) == 25
    assert TrainSettings().steps_on(8) == 1000
    assert TrainSettings(steps=7, batch=2).tokens_on(16) == 7 * 2 * 16
    assert TrainSettings(epochs=2.0).tokens_on(16) == ALL_TOKENS
    with pytest.raises(ValueError, match="7 windows, fewer than one batch of 8"):
        TrainSettings().steps_on(7)


def test_what_is_said_before_a_run() -> None:
    assert TrainSettings(steps=10, warmup=9, batch=2).notes_on(20) == []
    (late,) = TrainSettings(steps=10, warmup=10, batch=2, learning_rate=1e-3).notes_on(20)
    assert late == (
        "the learning rate rises over 10 steps, and the run has 10: it never comes to 0.001; use a warmup below 10, or "
        "more steps"
    )
    (late,) = TrainSettings(epochs=2.0, warmup=30, batch=2).notes_on(20)
    assert "rises over 30 steps, and the run has 20" in late
    (again,) = TrainSettings(steps=10, batch=8).notes_on(32)
    assert (
        again
        == "the steps go through 80 windows, and the training text has 32: each is trained on 2.5 times"
    )


def test_adapters_learn_faster() -> None:
    assert TrainSettings().rate < TrainSettings(lora=4).rate
    assert TrainSettings(lora=4, learning_rate=3e-4).rate == 3e-4
    assert TrainSettings(lora=4).method == "adapters of rank 4 on edited sublayers"


def test_presets_are_the_papers() -> None:
    lp, ladder = (TrainSettings(**preset(name).values) for name in PRESETS)
    assert "BAAI/Infinity-Instruct:7M:train" in preset("ladder").data
    assert (lp.scope, lp.batch, lp.rate, lp.schedule, lp.steps) == ("edited", 32, 1e-4, "linear", 4096)
    assert (ladder.batch, ladder.rate, ladder.warmup, ladder.schedule, ladder.epochs) == (
        32,
        5e-6,
        200,
        "cosine",
        2,
    )
    with pytest.raises(ValueError, match="did you mean 'ladder'"):
        preset("lader")
