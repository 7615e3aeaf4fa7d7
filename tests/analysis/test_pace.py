"""How long measuring takes: what is made of a few times."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from surgeon.analysis import pace
from surgeon.analysis.engine.sharing import SharedPlan, share
from surgeon.analysis.pace import RunPace, measure_pace
from surgeon.language.program import Program
from surgeon.quality.data import Windows
from tests.analysis.subjects import subject_of
from tests.tiny_models import VOCABULARY, tiny_model

LAYERS, WINDOWS, TOKENS = 4, 8, 16
SUBLAYER, PROGRAM = 3e-3, 5e-3


class Stopwatch:
    """Says how long a plan takes in place of measuring it: so much for each sublayer, program and token."""

    def __init__(self) -> None:
        self.windows: list[int] = []

    def __call__(self, _subject: Any, _model: Any, plan: SharedPlan, ids: Any) -> float:
        self.windows.append(len(ids))
        return ids.numel() * (SUBLAYER * plan.total_sublayers + PROGRAM * len(plan.programs))


@pytest.fixture
def stopwatch(monkeypatch: pytest.MonkeyPatch) -> Stopwatch:
    made = Stopwatch()
    monkeypatch.setattr(pace, "_seconds", made)
    return made


def subject() -> Any:
    ids = torch.randint(VOCABULARY, (WINDOWS, TOKENS), generator=torch.Generator().manual_seed(0))
    return subject_of(tiny_model("llama", num_layers=LAYERS), Windows(ids, "text", "digest"))


def test_what_a_sublayer_and_a_program_take_is_told_apart(stopwatch: Stopwatch) -> None:
    found = measure_pace(subject(), enough=1.0, most=1e9)
    assert found.sublayer == pytest.approx(SUBLAYER)
    assert found.program == pytest.approx(PROGRAM)
    assert found.own == pytest.approx(2 * LAYERS * SUBLAYER + PROGRAM)
    dense = Program.dense(LAYERS)
    plan = share([dense, Program(dense.nodes[:-2]), Program(dense.nodes[2:])])
    assert found.seconds(plan, 100) == pytest.approx(100 * ((8 + 0 + 6) * SUBLAYER + 3 * PROGRAM))
    # Whole and with all prefixes, until both take a second together: 16 tokens take 1.1 s.
    assert stopwatch.windows == [1, 1, 1, 1]
    measure_pace(subject(), enough=4.0, most=1e9)
    assert stopwatch.windows[4:] == [1, 1, 1, 1, 2, 2, 4, 4]


def test_what_would_take_too_long_is_not_run(stopwatch: Stopwatch) -> None:
    layer = TOKENS * (2 * SUBLAYER + PROGRAM)
    found = measure_pace(subject(), enough=1.0, most=LAYERS * layer * 0.99)
    assert stopwatch.windows == [1, 1]
    assert found.own == pytest.approx(LAYERS * layer / TOKENS)
    assert found.own >= 2 * LAYERS * SUBLAYER + PROGRAM


def test_a_model_is_measured() -> None:
    found = measure_pace(subject(), enough=0.0, most=1e9)
    assert isinstance(found, RunPace)
    assert 0 < found.sublayer < found.own
