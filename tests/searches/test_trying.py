"""A search's trials, within some time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from optuna.storages import InMemoryStorage

from surgeon.language.program import Program
from surgeon.searches import trying
from surgeon.searches.study.shared_study import SharedStudy
from surgeon.searches.study.storage import StudyStorage
from surgeon.searches.trial import MeasuredProgram
from surgeon.searches.trying import try_programs
from tests.clock import HandClock
from tests.searches.made_up_search import MadeUpEvaluator, search

SECONDS = 2.0  # of a trial


class SlowEvaluator(MadeUpEvaluator):
    """Takes as long for every program, by a clock of its own."""

    def __init__(self, clock: HandClock) -> None:
        super().__init__()
        self.clock = clock

    def measure(
        self, programs: Sequence[Program], best: MeasuredProgram | None = None
    ) -> Mapping[Program, MeasuredProgram]:
        self.clock.sleep(SECONDS * len(programs))
        return super().measure(programs, best)


def test_trials_begin_as_long_as_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = HandClock()
    monkeypatch.setattr(trying, "time", clock)
    study = SharedStudy(StudyStorage(InMemoryStorage(), "memory"), "search", {})

    def tried(seconds: float) -> int:
        made, began = search("pair,drop:layers", "depth=7")[0], clock.now()
        made.evaluator = SlowEvaluator(clock)  # type: ignore[assignment]
        found = [*try_programs(made, 30, study=study, until=began + seconds)]
        assert clock.now() == began + SECONDS * len(found)
        return len(found)

    assert tried(0.5) == 8  # the first ones in any case
    assert tried(0.0) == 0
    assert tried(21.0) == 11  # eight, the two that there is time for then, and one in the last second
    assert tried(100.0) == 11  # what is left of thirty
