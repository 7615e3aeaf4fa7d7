"""The end of a search: which trials go into its last choice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from surgeon.cli.search_question import PredictedUse
from surgeon.cli.search_results import _fast_enough_here
from surgeon.language.program import Program
from surgeon.searches import here
from surgeon.searches.here import TimeHere
from surgeon.searches.limits import parse_limits
from surgeon.searches.trial import MeasuredProgram, Proposal, Trial

DENSE = Program.dense(4)
TEXTS = ["[A0 A1] [F0 F1] A2 F2 A3 F3", "A0 F0 [A1 A2] [F1 F2] A3 F3", "A0 F0 A1 F1 [A2 A3] [F2 F3]"]


def trial(number: int) -> Trial:
    measured = MeasuredProgram(9, 0.1 * number, 0.0, 1.0, 50)
    return Trial(number, Proposal(TEXTS[number], "window", ()), measured)


def test_every_candidate_keeps_its_limits_of_time_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    speedups = dict(zip(map(Program.parse, TEXTS), (1.1, 1.4, 1.2), strict=True)) | {DENSE: 1.0}
    times = {program: TimeHere(0.01 / speed, 0.01, 0.02, speed) for program, speed in speedups.items()}
    monkeypatch.setattr(here, "measured_here", lambda *_: times)
    shapes = SimpleNamespace(positions=64)
    mixture = SimpleNamespace(model=SimpleNamespace(dense=DENSE, shapes=shapes))
    subject: Any = SimpleNamespace(folder="model")

    def fast_enough(budget: str) -> list[int]:
        question: Any = SimpleNamespace(mixture=mixture, budget=SimpleNamespace(limits=parse_limits(budget)))
        found = _fast_enough_here(question, [trial(number) for number in range(3)], subject, PredictedUse())
        return [one.number for one in found]

    assert fast_enough("speedup>=1.15@here") == [1, 2]
    assert "trial 0: speedup>=1.15@here is missed" in capsys.readouterr().err
    assert fast_enough("speedup>=1.3@here") == [1], "a runner-up that is too slow would win on held-out text"
    assert fast_enough("depth=3") == [0, 1, 2]
    with pytest.raises(ValueError, match="none of the best 3 programs keeps"):
        fast_enough("speedup>=2@here")
