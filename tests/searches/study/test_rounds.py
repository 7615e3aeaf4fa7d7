"""The engine on a made-up measure: one worker or several, killed or not, find the same, and none runs twice."""

from __future__ import annotations

import errno
import json
import math
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import psutil
import pytest
from optuna.trial import TrialState

from surgeon.results.edit import Edit, as_choice
from surgeon.searches.study.rounds import RoundStudy, divergence_alone
from surgeon.searches.study.storage import open_storage
from surgeon.searches.study.trial_queue import BEAT, this_process
from surgeon.searches.trial import MeasuredProgram, Proposal, Trial
from tests import warm
from tests.searches.made_up import EDITS, LAYERS, QUICK, SIZES, damage, measure, measured, propose, rows, study
from tests.selection import case
from tests.waiting import PATIENCE, wait_until

ADDRESSES = {"sqlite": "sqlite:///{}/study.db", "journal": "journal:{}/study.log"}
WORKER = "import sys; from tests.searches.made_up import work; work(*sys.argv[1:3], float(sys.argv[3]), sys.argv[4])"


@pytest.fixture(params=[case("sqlite", default=False), "journal"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return ADDRESSES[request.param].format(tmp_path)


on_both = pytest.mark.parametrize("address", ADDRESSES, indirect=True)


@pytest.fixture
def expected() -> list[tuple[int, str, float]]:
    """What the rounds come to, computed without a study."""
    found: list[Trial] = []
    while proposals := propose(found):
        found += [Trial(len(found) + k, p, measured(float(f"{damage(p):.9g}"))) for k, p in enumerate(proposals)]
    return [(trial.number, trial.proposal.key, trial.measured.divergence) for trial in found]


@pytest.mark.parametrize("together", [1, 3, 100])
def test_one_worker(address: str, together: int, tmp_path: Path, expected: list[tuple[int, str, float]]) -> None:
    batches: list[int] = []

    def counted(proposals: Sequence[Proposal], earlier: Sequence[Trial]) -> list[MeasuredProgram]:
        batches.append(len(proposals))
        assert len(earlier) in (0, 7, 13)
        return measure(proposals, earlier)

    made = study(address, tmp_path)
    assert [trial.proposal.key for trial in made.run(propose, counted, together)] == [key for _, key, _ in expected]
    assert rows(made) == expected
    assert sum(batches) == sum(SIZES)
    assert max(batches) == min(together, 7)
    assert list(study(address, tmp_path).run(propose, counted, together)) == []


def test_several_workers_find_what_one_does(  # in both storages those do of which some are killed
    address: str, tmp_path: Path, expected: list[tuple[int, str, float]]
) -> None:
    log = tmp_path / "log"
    workers = [start(address, tmp_path, 0.01, log) for _ in range(3)]
    assert [worker.wait(PATIENCE) for worker in workers] == [0, 0, 0]
    assert rows(study(address, tmp_path)) == expected
    assert Counter(log.read_text().splitlines()) == Counter(key for _, key, _ in expected)


@on_both
def test_workers_are_killed_and_others_go_on(
    address: str, tmp_path: Path, expected: list[tuple[int, str, float]]
) -> None:
    log = tmp_path / "log"
    workers = [start(address, tmp_path, 0.3, log) for _ in range(3)]
    for wanted, worker in zip((2, 9), workers, strict=False):
        wait_for_lines(log, wanted)
        worker.send_signal(signal.SIGKILL)
        assert worker.wait(PATIENCE) == -signal.SIGKILL
    again = start(address, tmp_path, 0.01, log)  # one comes back
    assert (workers[2].wait(PATIENCE), again.wait(PATIENCE)) == (0, 0)
    made = study(address, tmp_path)
    assert rows(made) == expected
    live = Counter(t.user_attrs["key"] for t in made.study.get_trials() if t.state != TrialState.FAIL)
    assert live == Counter(key for _, key, _ in expected)  # none twice, none left over


def test_stopped_anywhere_it_goes_on_to_the_same_result(tmp_path: Path, expected: list[tuple[int, str, float]]) -> None:
    for stop in (0, 1, 8, 12):
        running = study("", tmp_path).run(propose, measure, together=2)
        for _ in range(stop - len(study("", tmp_path).finished())):
            next(running)
        running.close()
    made = study("", tmp_path)
    assert not made.study.get_trials(states=[TrialState.RUNNING])
    list(made.run(propose, measure, together=4))
    assert rows(made) == expected


def test_trials_that_are_stopped_early_are_pruned(tmp_path: Path) -> None:
    def halves(proposals: Sequence[Proposal], _: Sequence[Trial]) -> list[MeasuredProgram]:
        values = [damage(proposal) for proposal in proposals]
        return [replace(measured(v, whole=v < 0.005), divergences=(v, 3 * v)) for v in values]

    made = study("", tmp_path)
    list(made.run(propose, halves, together=3))
    whole = {trial.proposal.key: trial.measured.whole for trial in made.finished()}
    assert set(whole.values()) == {True, False}
    for stored in made.study.get_trials():
        value = stored.value
        assert value == pytest.approx(damage(Proposal.from_json(stored.user_attrs["proposal"])))
        assert (stored.state == TrialState.COMPLETE) == whole[stored.user_attrs["key"]]
        means = {} if whole[stored.user_attrs["key"]] else {1: pytest.approx(value), 2: pytest.approx(2 * value)}
        assert stored.intermediate_values == means


def test_parameters_say_which_edits_a_trial_has(tmp_path: Path) -> None:
    made = study("", tmp_path)
    list(made.run(propose, measure, together=3))
    for stored, trial in zip(made.study.get_trials(), made.finished(), strict=True):
        assert {name for name, chosen in stored.params.items() if chosen} == {*map(str, trial.proposal.choice)}
        assert set(stored.params) == {*map(str, EDITS)}
    importance = optuna.importance.get_param_importances(
        made.study, evaluator=optuna.importance.PedAnovaImportanceEvaluator()
    )
    assert set(importance) == {*map(str, EDITS)}


def test_of_many_edits_the_layers_are_parameters(tmp_path: Path) -> None:
    many = [*EDITS, *(Edit(layer, layer + 1, "rank", f"{keep}") for layer in range(LAYERS) for keep in range(6))]
    made = replace(study("", tmp_path), edits=many)
    list(made.run(propose, measure, together=3))
    for stored, trial in zip(made.study.get_trials(), made.finished(), strict=True):
        counts = Counter(layer for edit in trial.proposal.choice for layer in edit.layers)
        assert stored.params == {f"layer {layer}": counts[layer] for layer in range(LAYERS)}


def test_several_objectives_and_what_is_not_finite(address: str, tmp_path: Path) -> None:
    made = RoundStudy(
        open_storage(address or None, tmp_path, QUICK),
        "front",
        {},
        objectives=("divergence", "time"),
    )

    def values(proposal: Proposal, found: MeasuredProgram) -> tuple[float, float]:
        return found.divergence, math.nan if proposal.level == 1 else -(proposal.level or 0)

    def broken(proposals: Sequence[Proposal], _: Sequence[Trial]) -> list[MeasuredProgram]:
        infinite = replace(measured(math.inf), divergence_low=math.nan, divergence_high=math.nan)
        return [infinite if p.choice[0].first == 3 else measured(damage(p)) for p in proposals]

    list(made.run(propose, broken, together=2, values=values))
    stored = {trial.user_attrs["key"]: trial for trial in made.study.get_trials()}
    assert stored["pair 3:5 lp"].values == [1e30, 1e30]
    found = {trial.proposal.key: trial.measured for trial in made.finished()}
    assert found["pair 3:5 lp"].divergence == math.inf
    assert math.isnan(found["pair 3:5 lp"].divergence_low)
    assert all(trial.values[0] < 1 for key, trial in stored.items() if "3:5" not in key)
    assert {trial.user_attrs["proposal"]["level"] for trial in made.study.best_trials} <= {2.0, 3.0}


def test_other_settings_under_the_same_name_are_refused(address: str, tmp_path: Path) -> None:
    storage = open_storage(address or None, tmp_path, QUICK)
    RoundStudy(storage, "search", {"model": "a", "seeds": (1, 2)})
    RoundStudy(storage, "search", {"model": "a", "seeds": [1, 2]})
    RoundStudy(storage, "other", {"model": "b"})
    with pytest.raises(ValueError, match="'search' in .* has another model \\(a, not b\\)"):
        RoundStudy(storage, "search", {"model": "b", "seeds": [1, 2]})
    with pytest.raises(ValueError, match="another seeds \\(\\[1, 2\\], not None\\)"):
        RoundStudy(storage, "search", {"model": "a"})
    with pytest.raises(ValueError, match="another objectives"):
        RoundStudy(storage, "search", {"model": "a", "seeds": [1, 2]}, objectives=("accuracy",))


@on_both
def test_a_trial_that_two_put_at_once_is_run_once(address: str, tmp_path: Path) -> None:
    made = study(address, tmp_path)
    proposal = propose([])[2]
    for _ in range(3):
        made._put(proposal, 0, 2)
    list(made.run(propose, measure, together=3))
    same = [trial for trial in made.study.get_trials() if trial.user_attrs["key"] == proposal.key]
    assert [trial.state for trial in same] == [TrialState.COMPLETE, TrialState.FAIL, TrialState.FAIL]


@on_both
def test_an_error_gives_the_trials_back(address: str, tmp_path: Path, expected: list[tuple[int, str, float]]) -> None:
    def failing(proposals: Sequence[Proposal], earlier: Sequence[Trial]) -> list[MeasuredProgram]:
        if len(earlier) == 7:
            raise MemoryError("too large")
        return measure(proposals, earlier)

    made = study(address, tmp_path)
    with pytest.raises(MemoryError):
        list(made.run(propose, failing, together=3))
    states = Counter(trial.state for trial in made.study.get_trials())
    assert states == {TrialState.COMPLETE: 7, TrialState.FAIL: 3, TrialState.WAITING: 3}
    list(study(address, tmp_path).run(propose, measure, together=3))
    assert rows(made) == expected


@pytest.mark.parametrize("died", ["silent", "before it said who it is"])
def test_trials_of_workers_elsewhere_are_taken_over_after_a_while(
    address: str, died: str, tmp_path: Path, expected: list[tuple[int, str, float]]
) -> None:
    said: list[str] = []
    made = study(address, tmp_path, say=said.append)
    made._put(propose([])[0], 0, 0)
    elsewhere = study(address, tmp_path).queue
    elsewhere.me = replace(this_process(), world="another kernel", machine="far-away")
    if died == "silent":
        assert len(elsewhere.take(elsewhere.read().values(), most=1)) == 1
    else:
        assert made.storage.backend.set_trial_state_values(made.study.get_trials()[0]._trial_id, TrialState.RUNNING)
    begun = time.monotonic()
    list(made.run(propose, measure, together=3))
    assert time.monotonic() - begun >= QUICK.grace
    assert rows(made) == expected
    assert any(("far-away" if died == "silent" else "unknown worker") in line for line in said)


def test_trials_of_a_worker_that_shows_signs_of_life_are_left_to_it(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that goes on by a tenth of the grace with each of them: half as long again as it lasts."""
    slow, made = study(address, tmp_path), study(address, tmp_path)
    slow.queue.me = replace(this_process(), world="another kernel")
    began, say, signs = threading.Event(), slow.storage.backend.set_trial_user_attr, list[int]()

    def noted(identifier: int, name: str, value: Any) -> None:
        say(identifier, name, value)
        if name == BEAT:
            signs.append(value)

    monkeypatch.setattr(slow.storage.backend, "set_trial_user_attr", noted)
    clock = SimpleNamespace(monotonic=lambda: QUICK.grace * len(signs) / 10)
    monkeypatch.setattr("surgeon.searches.study.trial_queue.time", clock)

    def hold(proposals: Sequence[Proposal], earlier: Sequence[Trial]) -> list[MeasuredProgram]:
        began.set()
        wait_until(lambda: len(signs) >= 15)
        return measure(proposals, earlier)

    thread = threading.Thread(target=lambda: list(slow.run(propose, hold, together=2)))
    thread.start()
    assert began.wait(PATIENCE)
    list(made.run(propose, measure, together=3))
    thread.join(PATIENCE)
    assert not [t for t in made.study.get_trials(states=[TrialState.FAIL]) if t.datetime_start]  # none was taken away
    assert len(made.finished()) == sum(SIZES)


@pytest.mark.parametrize("meanwhile", ["nobody", "put", "taken", "told"])
def test_a_result_that_comes_after_its_trial_was_given_up_counts_once(
    address: str, meanwhile: str, tmp_path: Path, expected: list[tuple[int, str, float]]
) -> None:
    def given_up(proposals: Sequence[Proposal], earlier: Sequence[Trial]) -> list[MeasuredProgram]:
        if not earlier and proposals[0].key == expected[0][1]:
            first = other.queue.read()[proposals[0].key]
            other.queue._fail(first)
            if meanwhile != "nobody":
                other._put(proposals[0], 0, 0)
            if meanwhile in ("taken", "told"):
                taken = other.queue.take([other.queue.read()[proposals[0].key]], most=1)
                assert taken
            if meanwhile == "told":
                other._measure(taken, earlier, measure, divergence_alone)
            if meanwhile == "taken":
                threading.Timer(0.5, lambda: other._measure(taken, earlier, measure, divergence_alone)).start()
        return measure(proposals, earlier)

    made, other = study(address, tmp_path), study(address, tmp_path)
    list(made.run(propose, given_up, together=3))
    assert rows(made) == expected
    live = Counter(t.user_attrs["key"] for t in made.study.get_trials() if t.state != TrialState.FAIL)
    assert set(live.values()) == {1}


@on_both
def test_what_all_need_is_computed_once(address: str, tmp_path: Path) -> None:
    calls: list[int] = []

    def compute() -> object:
        calls.append(1)
        time.sleep(0.2)
        return {"terms": [1 / 3, math.inf], "of": (1, "a" * 100_000)}

    found: list[object] = []
    studies = [study(address, tmp_path) for _ in range(3)]
    threads = [threading.Thread(target=lambda s=s: found.append(s.shared("terms", compute))) for s in studies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    value = {"terms": [0.333333333, math.inf], "of": [1, "a" * 100_000]}
    assert found == [value] * 3
    assert study(address, tmp_path).shared("terms", compute) == value
    assert len(calls) == 1
    assert studies[0].finished() == []
    assert len(list(studies[0].run(propose, measure))) == sum(SIZES)


def test_what_all_need_is_taken_over_from_the_dead(address: str, tmp_path: Path) -> None:
    made = study(address, tmp_path)
    with pytest.raises(MemoryError):
        made.shared("terms", failing_compute)
    made.queue.put("task terms", {"task": "terms"}, {})
    dead = study(address, tmp_path).queue
    ended = subprocess.Popen([sys.executable, "-c", ""])
    started = psutil.Process(ended.pid).create_time()
    ended.wait()
    dead.me = replace(this_process(), pid=ended.pid, started=started)
    assert dead.take([dead.read()["task terms"]], most=1)
    assert made.shared("terms", lambda: 7) == 7


def failing_compute() -> object:
    raise MemoryError


def test_shares_become_smaller_so_that_others_have_some(tmp_path: Path) -> None:
    batches: list[int] = []

    def counted(proposals: Sequence[Proposal], earlier: Sequence[Trial]) -> list[MeasuredProgram]:
        batches.append(len(proposals))
        return measure(proposals, earlier)

    made = replace(study("", tmp_path), workers=3)
    list(made.run(propose, counted, together=100))
    assert batches[:5] == [3, 2, 1, 1, 2]  # of 7, 4, 2 and 1; then of 6


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
    assert made.finished() == []
    assert time.monotonic() - begun > 0.9
    assert "does not answer (database is locked); waiting" in said[0]
    assert " s; going on" in said[1]
    optuna.delete_study(study_name="search", storage=made.storage.backend)
    with pytest.raises(ValueError, match="no longer in sqlite:///.*study.db: somebody deleted it"):
        list(made.run(propose, measure))


def test_values_lie_in_the_storage_to_their_last_digit(tmp_path: Path) -> None:
    made = study("", tmp_path)
    list(made.run(propose, lambda proposals, _: [measured(1 / 3) for _ in proposals], together=3))
    assert {trial.measured.divergence for trial in made.finished()} == {0.333333333}
    assert {json.loads(t.user_attrs["measured"])["divergence"] for t in made.study.get_trials()} == {1 / 3}


def test_proposals_that_were_tried_end_the_search(tmp_path: Path) -> None:
    def same(_: Sequence[Trial]) -> list[Proposal]:
        choice = as_choice(EDITS[:1])
        return [Proposal("x", "made up", choice), Proposal("x", "again", choice)]

    found = list(study("", tmp_path).run(same, measure, together=3))
    assert [(trial.number, trial.proposal.source) for trial in found] == [(0, "made up")]


def start(address: str, folder: Path, seconds: float, log: Path) -> warm.Popen:
    return warm.Popen([*warm.CODE, WORKER, address, str(folder), str(seconds), str(log)])


def wait_for_lines(path: Path, wanted: int) -> None:
    wait_until(lambda: path.exists() and len(path.read_text().splitlines()) >= wanted)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_signs_of_life_go_on_when_a_full_disk_has_space_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = study("", tmp_path).queue
    queue.put("a", {}, {})
    queue.take([queue.read()["a"]], most=1)
    signs = []

    def full(*_: object) -> None:
        signs.append(1)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(queue.storage.backend, "set_trial_user_attr", full)
    with queue.working():
        wait_until(lambda: len(signs) > 1)
