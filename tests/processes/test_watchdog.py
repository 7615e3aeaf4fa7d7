"""When ranks are given up and when not, and who is said to be at fault."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from surgeon.language.execute import Partial, Pending
from surgeon.processes.children import PULSES, Pulse, Watchdog
from surgeon.runtime.comm.collectives import Alone
from surgeon.runtime.model.engine import RankEngine
from surgeon.runtime.model.program import RankMachine
from surgeon.runtime.plan.checks import make_plan
from tests.runtime.on_ranks import greedy
from tests.tiny_models import tiny_model

SECOND = 60 / PULSES / 5  # there are five to a pulse


@pytest.fixture
def watchdog() -> Watchdog:
    return Watchdog(["rank 0", "rank 1", "rank 2"])


def watch(
    watchdog: Watchdog, seconds: int, passes: dict[int, list[float]], busy: bool = True
) -> tuple[int, str] | None:
    """Let time pass while ranks send pulses; when the watchdog gives up, and why.

    Args:
        passes: of each rank that lives, how far it is by the second; its last number stays.
    """
    for second in range(seconds):
        for rank, found in passes.items():
            if second % 5 == rank:
                watchdog.hear(Pulse(rank, found[min(second, len(found) - 1)]))
        if reason := watchdog.check(SECOND, busy):
            return second, reason
    return None


def test_a_rank_that_does_not_answer(watchdog: Watchdog) -> None:
    going = [0.125 * second for second in range(30)]
    found = watch(watchdog, 200, {0: going, 2: going})
    assert found is not None
    assert 85 < found[0] < 95  # a minute after the last step
    assert found[1] == "rank 1 has not answered for 60 seconds: stopped, or cut off"


def test_several_that_do_not(watchdog: Watchdog) -> None:
    found = watch(watchdog, 200, {1: [0.5]})
    assert found is not None
    assert found[1] == "rank 0 and rank 2 have not answered for 60 seconds: stopped, or cut off"


def test_a_rank_that_is_stuck_while_others_wait_for_it(watchdog: Watchdog) -> None:
    found = watch(watchdog, 200, {0: [3.5], 1: [3.5], 2: [3.25]})
    assert found is not None
    assert found[1] == "rank 2 has been at the same step for 60 seconds, and the others wait for it"


def test_ranks_that_wait_for_each_other(watchdog: Watchdog) -> None:
    found = watch(watchdog, 200, {rank: [7.0] for rank in range(3)})
    assert found is not None
    assert found[1] == "no rank has come any further for 60 seconds"


def test_a_pass_that_takes_minutes_is_progress(watchdog: Watchdog) -> None:
    steps = [second // 40 / 64 for second in range(1000)]  # a step takes 40 seconds
    assert watch(watchdog, 1000, dict.fromkeys(range(3), steps)) is None


def test_nothing_to_do_takes_as_long_as_it_likes(watchdog: Watchdog) -> None:
    assert watch(watchdog, 1000, {0: [4.0], 1: [4.0], 2: [4.0]}, busy=False) is None
    assert watch(watchdog, 1000, {0: [4.0]}, busy=False) is None
    # The time that counts begins with the next request.
    assert watch(watchdog, 50, {0: [4.0]}) is None
    found = watch(watchdog, 50, {0: [4.0]})
    assert found is not None
    assert found[1].startswith("rank 1 and rank 2 have not answered")


def test_time_that_nobody_watched_does_not_count(watchdog: Watchdog) -> None:
    """This process was stopped for an hour, or the machine asleep."""
    assert watch(watchdog, 10, {0: [1.0], 1: [1.0], 2: [1.0]}) is None
    assert watchdog.check(3600, busy=True) is None
    assert watch(watchdog, 10, {0: [2.0], 1: [2.0], 2: [2.0]}) is None


def test_an_engine_gets_on_within_a_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step by step, whatever they are, and from pass to pass; branches of a fork are steps, too."""
    tiny_model("llama").save_pretrained(tmp_path / "tiny")
    engine = RankEngine(
        make_plan(tmp_path / "tiny", 1, 64, "A0 F0 {A1 F1 | A2} [A3 F3]"), Alone(), torch.device("cpu")
    )
    found = []
    reduce = RankMachine.reduce

    def noting(machine: RankMachine, partial: Partial) -> Pending:
        found.append(engine.model.program.passes)
        return reduce(machine, partial)

    monkeypatch.setattr(RankMachine, "reduce", noting)
    greedy(engine, [5, 6, 7], 2)
    assert found == sorted(found)
    steps = [share / 6 for share in range(1, 7)]
    assert sorted(set(found)) == pytest.approx([*steps, *(1 + step for step in steps)])
    assert engine.model.program.passes == 2
