"""The engine on a made-up measure: killed or not, one worker finds the same; several lose nothing."""

from __future__ import annotations

import errno
import json
import signal
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState

from surgeon.searches.study.holder import this_process
from surgeon.searches.study.shared_study import BEAT, FINISHED, SharedStudy, Told
from surgeon.searches.study.storage import open_storage
from tests import warm
from tests.searches.made_up import QUICK, TOGETHER, TRIALS, ask, key, measure, rows, study, value
from tests.selection import case
from tests.waiting import PATIENCE, wait_until

ADDRESSES = {"sqlite": "sqlite:///{}/study.db", "journal": "journal:{}/study.log"}
WORKER = "import sys; from tests.searches.made_up import work; work(*sys.argv[1:3], float(sys.argv[3]), sys.argv[4])"
Rows = list[tuple[int, str, float, float]]


@pytest.fixture(params=[case("sqlite", default=False), "journal"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return ADDRESSES[request.param].format(tmp_path)


on_both = pytest.mark.parametrize("address", ADDRESSES, indirect=True)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """What one worker comes to that is never disturbed."""
    made = study("", tmp_path_factory.mktemp("undisturbed"))
    list(made.run(ask, measure, TRIALS, TOGETHER))
    return rows(made)


def test_one_worker(address: str, tmp_path: Path, expected: Rows) -> None:
    """Each batch is asked of what is finished, and raced against it; more trials go on from there."""
    batches: list[int] = []

    def counted(taken: Sequence[FrozenTrial], earlier: Sequence[FrozenTrial]) -> list[Told]:
        batches.append(len(taken))
        assert [trial.number for trial in earlier] == list(range(taken[0].number))
        return measure(taken, earlier)

    made = study(address, tmp_path)
    assert [trial.number for trial in made.run(ask, counted, TRIALS, TOGETHER)] == list(range(TRIALS))
    assert rows(made) == expected
    assert batches == [4, 4, 4, 4, 2]
    assert [*study(address, tmp_path).run(ask, counted, TRIALS, TOGETHER)] == []
    assert [trial.number for trial in study(address, tmp_path).run(ask, counted, TRIALS + 3, TOGETHER)] == [18, 19, 20]


def test_what_is_told(tmp_path: Path) -> None:
    """Stopped ones are pruned, with what they came to on the way; limits are constraints."""
    made = study("", tmp_path)
    list(made.run(ask, measure, TRIALS, TOGETHER))
    states = set()
    for trial in made.study.get_trials():
        own = value(trial.params)
        states.add(trial.state)
        assert trial.value == own
        assert trial.state == (TrialState.PRUNED if own > 30 else TrialState.COMPLETE)
        assert trial.intermediate_values == ({1: own / 2, 2: own} if own > 30 else {})
        assert trial.constraints == {"limit": own - 9}
    assert states == {*FINISHED}


def test_several_workers_lose_nothing_and_run_nothing_twice(address: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    workers = [start(address, tmp_path, 0.01, log) for _ in range(3)]
    assert [worker.wait(PATIENCE) for worker in workers] == [0, 0, 0]
    made = study(address, tmp_path)
    assert len(rows(made)) == TRIALS == len(made.trials())
    assert Counter(log.read_text().splitlines()) == Counter(program for _, program, _, _ in rows(made))


@on_both
def test_workers_are_killed_and_others_go_on(address: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    workers = [start(address, tmp_path, 0.3, log) for _ in range(3)]
    for wanted, worker in zip((2, 9), workers, strict=False):
        wait_for_lines(log, wanted)
        worker.send_signal(signal.SIGKILL)
        assert worker.wait(PATIENCE) == -signal.SIGKILL
    again = start(address, tmp_path, 0.01, log)  # one comes back
    assert (workers[2].wait(PATIENCE), again.wait(PATIENCE)) == (0, 0)
    made = study(address, tmp_path)
    assert len({program for _, program, _, _ in rows(made)}) == TRIALS == len(rows(made)) == len(made.trials())


@pytest.mark.parametrize(
    ("address", "moment"),
    [
        case(kind, moment, default=kind == "journal" or moment == "told")
        for kind in ADDRESSES
        for moment in ("asked", "taken", "told")
    ],
    indirect=["address"],
)
def test_killed_anywhere_one_worker_ends_with_the_same_result(
    address: str, moment: str, tmp_path: Path, expected: Rows
) -> None:
    """Killed as it puts what it asked for, before it measures, or as it tells: what was begun is gone on with."""
    log = tmp_path / "log"
    command = [*warm.CODE, KILLED, address, str(tmp_path), moment]
    for _ in range(3):
        assert warm.Popen(command).wait(PATIENCE) == -signal.SIGKILL
    left = study(address, tmp_path)
    assert 0 < len(left.trials()) < TRIALS
    assert start(address, tmp_path, 0.0, log).wait(PATIENCE) == 0
    assert rows(left) == expected


KILLED = """
import os, signal, sys
from pathlib import Path
from surgeon.searches.study.shared_study import SharedStudy
from tests.searches.made_up import TOGETHER, TRIALS, ask, measure, study

address, folder, moment = sys.argv[1:]
name = {"asked": "_hold", "taken": "_measure", "told": "_tell"}[moment]
whole, left = getattr(SharedStudy, name), [{"asked": 6, "taken": 2, "told": 6}[moment]]

def killed(*given):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(*given)

setattr(SharedStudy, name, killed)
list(study(address, Path(folder)).run(ask, measure, TRIALS, TOGETHER))
"""


def test_stopped_anywhere_it_goes_on_to_the_same_result(tmp_path: Path, expected: Rows) -> None:
    for stop in (0, 1, 8, 12):
        running = study("", tmp_path).run(ask, measure, TRIALS, TOGETHER)
        for _ in range(stop - len(rows(study("", tmp_path)))):
            next(running)
        running.close()
    made = study("", tmp_path)
    assert not made.study.get_trials(states=[TrialState.RUNNING])
    list(made.run(ask, measure, TRIALS, TOGETHER))
    assert rows(made) == expected


def test_an_error_gives_the_trials_back(address: str, tmp_path: Path, expected: Rows) -> None:
    def failing(taken: Sequence[FrozenTrial], earlier: Sequence[FrozenTrial]) -> list[Told]:
        if len(earlier) == 8:
            raise MemoryError("too large")
        return measure(taken, earlier)

    made = study(address, tmp_path)
    with pytest.raises(MemoryError):
        list(made.run(ask, failing, TRIALS, TOGETHER))
    states = Counter(trial.state for trial in made.study.get_trials())
    assert states[TrialState.WAITING] == 4
    assert states[TrialState.COMPLETE] + states[TrialState.PRUNED] == 8
    list(study(address, tmp_path).run(ask, measure, TRIALS, TOGETHER))
    assert rows(made) == expected


def test_what_others_asked_for_at_the_same_moment_is_left_to_them(tmp_path: Path) -> None:
    made, other = study("", tmp_path), study("", tmp_path)
    meanwhile: list[list[FrozenTrial]] = []

    def slowly(stored: Sequence[FrozenTrial], count: int) -> list[FrozenTrial]:
        if not meanwhile:
            meanwhile.append(other._ask(ask, stored, TRIALS, 2))
        return ask(stored, count)

    for _ in made.run(slowly, measure, TRIALS - 2, TOGETHER):
        if len(rows(made)) == TRIALS - 4:
            other._measure(meanwhile[0], measure)
    assert len(made.trials()) == TRIALS - 2
    failed = made.study.get_trials(states=[TrialState.FAIL])
    assert [key(trial.params) for trial in failed] == [key(trial.params) for trial in meanwhile[0]]
    assert len({program for _, program, _, _ in rows(made)}) == TRIALS - 2


def test_trials_that_a_notebook_asked_for_are_left_to_it(tmp_path: Path) -> None:
    made = study("", tmp_path)
    kinds = ask([], 1)[0].distributions
    asked = made.study.ask(kinds)
    made.study.tell(made.study.ask(kinds), 0.5)
    assert len([*made.run(lambda stored, count: ask(stored[1:], count), measure, TRIALS, TOGETHER)]) == TRIALS - 2
    made.study.tell(asked, 0.7)
    assert [trial.values[0] for trial in made.trials()[:2]] == [0.7, 0.5]


@pytest.mark.parametrize("share", [1, 3])
def test_workers_that_are_known_of_get_smaller_shares(share: int, tmp_path: Path) -> None:
    batches: list[int] = []

    def counted(taken: Sequence[FrozenTrial], earlier: Sequence[FrozenTrial]) -> list[Told]:
        batches.append(len(taken))
        return measure(taken, earlier)

    made = replace(study("", tmp_path), workers=share)
    list(made.run(ask, counted, TRIALS, 6))
    assert set(batches) == {6 // share}


def test_other_settings_under_the_same_name_are_refused(address: str, tmp_path: Path) -> None:
    storage = open_storage(address or None, tmp_path, QUICK)
    SharedStudy(storage, "search", {"model": "a", "seeds": (1, 2)})
    SharedStudy(storage, "search", {"model": "a", "seeds": [1, 2]})
    SharedStudy(storage, "other", {"model": "b"})
    with pytest.raises(ValueError, match="'search' in .* has another model \\(a, not b\\)"):
        SharedStudy(storage, "search", {"model": "b", "seeds": [1, 2]})
    with pytest.raises(ValueError, match="another seeds \\(\\[1, 2\\], not None\\)"):
        SharedStudy(storage, "search", {"model": "a"})
    with pytest.raises(ValueError, match="another objectives"):
        SharedStudy(storage, "search", {"model": "a", "seeds": [1, 2]}, objectives=("accuracy",))


def test_trials_of_workers_elsewhere_are_taken_over_after_a_while(address: str, tmp_path: Path) -> None:
    said: list[str] = []
    made = study(address, tmp_path, say=said.append)
    elsewhere = study(address, tmp_path)
    elsewhere.me = replace(this_process(), world="another kernel", machine="far-away")
    assert len(elsewhere._ask(ask, [], TRIALS, TOGETHER)) == TOGETHER
    begun = time.monotonic()
    list(made.run(ask, measure, TRIALS, TOGETHER))
    assert time.monotonic() - begun >= QUICK.grace
    assert len(rows(made)) == TRIALS
    assert any("far-away" in line for line in said)


def test_trials_of_a_worker_that_shows_signs_of_life_are_left_to_it(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that goes on by a tenth of the grace with each of them: half as long again as it lasts."""
    slow, made = study(address, tmp_path), study(address, tmp_path)
    slow.me = replace(this_process(), world="another kernel")
    began, say, signs = threading.Event(), slow.storage.backend.set_trial_user_attr, list[int]()

    def noted(identifier: int, name: str, value: Any) -> None:
        say(identifier, name, value)
        if name == BEAT:
            signs.append(value)

    monkeypatch.setattr(slow.storage.backend, "set_trial_user_attr", noted)
    clock = SimpleNamespace(monotonic=lambda: QUICK.grace * len(signs) / 10, sleep=time.sleep)
    monkeypatch.setattr("surgeon.searches.study.shared_study.time", clock)

    def hold(taken: Sequence[FrozenTrial], earlier: Sequence[FrozenTrial]) -> list[Told]:
        began.set()
        wait_until(lambda: len(signs) >= 15)
        return measure(taken, earlier)

    thread = threading.Thread(target=lambda: list(slow.run(ask, hold, TRIALS, 2)))
    thread.start()
    assert began.wait(PATIENCE)
    list(made.run(ask, measure, TRIALS, 3))
    thread.join(PATIENCE)
    assert not [trial for trial in made.trials() if trial.state not in FINISHED]
    assert len(rows(made)) == TRIALS


def test_a_result_that_comes_after_its_trial_was_given_up_counts_once(address: str, tmp_path: Path) -> None:
    slow, other = study(address, tmp_path), study(address, tmp_path)
    (taken,) = slow._ask(ask, [], TRIALS, 1)
    other._set_state(taken, TrialState.WAITING)
    (again,) = other._take(other.trials(), 1)
    slow._tell(taken, Told([1.0]))
    other._tell(again, Told([2.0]))
    assert [trial.values for trial in slow.trials()] == [[1.0]]


def test_what_all_need_is_kept(address: str, tmp_path: Path) -> None:
    """One finds out and the others of its machine wait; of two that find out at once the first one's counts."""
    found: list[object] = []
    studies = [study(address, tmp_path) for _ in range(3)]
    value = {"terms": [1 / 3, float("inf")], "of": [1, "a" * 100_000]}

    def compute() -> object:
        time.sleep(0.2)
        return value

    threads = [
        threading.Thread(target=lambda s=one, n=number: found.append(s.kept("terms", compute, others=bool(n))))
        for number, one in enumerate(studies)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert found == [value] * 3
    assert study(address, tmp_path).kept("terms", lambda: 7) == value
    quicker, slower = studies[:2]
    assert slower.kept("here", lambda: (quicker.kept("here", lambda: 1), 2)) == 1
    assert studies[0].trials() == []


def test_a_locked_file_is_waited_for_and_a_deleted_study_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surgeon.searches.study.storage.SECONDS_LOCKED", 0.05)
    said: list[str] = []
    made = study(f"sqlite:///{tmp_path}/study.db", tmp_path, say=said.append)
    other = sqlite3.connect(tmp_path / "study.db", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    threading.Timer(1.0, lambda: other.execute("ROLLBACK")).start()
    begun = time.monotonic()
    assert made.trials() == []
    assert time.monotonic() - begun > 0.9
    assert "does not answer (database is locked); waiting" in said[0]
    assert " s; going on" in said[1]
    optuna.delete_study(study_name="search", storage=made.storage.backend)
    with pytest.raises(ValueError, match="no longer in sqlite:///.*study.db: somebody deleted it"):
        list(made.run(ask, measure, TRIALS))


def test_where_no_more_can_be_asked_for_the_search_ends(tmp_path: Path) -> None:
    made = study("", tmp_path)
    assert len([*made.run(lambda stored, count: ask(stored, min(count, 5 - len(stored))), measure, TRIALS, 3)]) == 5
    assert json.loads(json.dumps([trial.number for trial in made.trials()])) == list(range(5))


def start(address: str, folder: Path, seconds: float, log: Path) -> warm.Popen:
    return warm.Popen([*warm.CODE, WORKER, address, str(folder), str(seconds), str(log)])


def wait_for_lines(path: Path, wanted: int) -> None:
    wait_until(lambda: path.exists() and len(path.read_text().splitlines()) >= wanted)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_signs_of_life_go_on_when_a_full_disk_has_space_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = study("", tmp_path)
    made._ask(ask, [], TRIALS, 1)
    signs = []

    def full(*_: object) -> None:
        signs.append(1)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(made.storage.backend, "set_trial_user_attr", full)
    with made._showing_life():
        wait_until(lambda: len(signs) > 1)
