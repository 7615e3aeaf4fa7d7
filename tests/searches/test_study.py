"""Studies that workers share: killed or not, one worker finds the same; several lose nothing."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import optuna
import psutil
import pytest
import torch
from optuna.trial import TrialState

from surgeon.searches.search import make_sampler
from surgeon.searches.storage import open_storage
from surgeon.searches.study import WORKER, WorkerProcesses, counted, interruptible, kept, open_study, run_trials
from tests.searches.made_up_search import search
from tests.waiting import PATIENCE, wait_until

TRIALS = 14
ADDRESSES = {"sqlite": "sqlite:///{}/study.db", "journal": "journal:{}/study.log"}


@pytest.fixture(params=["sqlite", "journal"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return ADDRESSES[request.param].format(tmp_path)


def opened(address: str, folder: Path, settings: str = "a"):  # type: ignore[no-untyped-def]
    searching, _ = search("pair", "depth=7")
    study = open_study(open_storage(address, folder), "search", {"model": settings}, ["divergence"])
    study.sampler = make_sampler(searching, "surgeon")
    return searching, study


def work(address: str, folder: Path, seconds: float, left: int) -> None:
    """What a worker's process runs; it is killed as it begins its trial number `left`, from 1 on."""
    searching, study = opened(address, folder)
    begun = 0

    def slowly(trial: optuna.Trial) -> object:
        nonlocal begun
        begun += 1
        if begun == left:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(seconds)
        return searching.objective(trial)

    run_trials(study, slowly, TRIALS, None, lambda _: None)


def ended(address: str, folder: Path, *lefts: int, seconds: float = 0.0) -> list[int | None]:
    """What workers end with that begin together."""
    context = multiprocessing.get_context("fork")  # which need not import all of it anew
    workers = [context.Process(target=work, args=(address, folder, seconds, left)) for left in lefts]
    for one in workers:
        one.start()
    for one in workers:
        one.join(120)
    return [one.exitcode for one in workers]


def rows(address: str, folder: Path) -> list[tuple[int, str, float]]:
    searching, study = opened(address, folder)
    return [(one.number, one.proposal.key, one.measured.divergence) for one in searching.finished(study.trials)]


def test_killed_and_begun_again_one_worker_ends_with_the_same_trials(address: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    whole = f"journal:{other}/study.log"
    searching, study = opened(whole, other)
    run_trials(study, searching.objective, TRIALS, None, lambda _: None)
    for left in (2, 4):
        assert ended(address, tmp_path, left) == [-signal.SIGKILL]
    assert ended(address, tmp_path, 0) == [0]
    assert rows(address, tmp_path) == rows(whole, other)


def test_several_workers_of_which_one_is_killed_lose_nothing(address: str, tmp_path: Path) -> None:
    assert ended(address, tmp_path, 3, 0, 0, seconds=0.05) == [-signal.SIGKILL, 0, 0]
    found = rows(address, tmp_path)
    assert len(found) == TRIALS == len({key for _, key, _ in found})
    _, study = opened(address, tmp_path)
    assert TrialState.RUNNING not in {one.state for one in study.trials}


def test_an_error_gives_its_trial_up(tmp_path: Path) -> None:
    searching, study = opened(f"journal:{tmp_path}/study.log", tmp_path)

    def failing(trial: optuna.Trial) -> object:
        if trial.number == 2:
            raise OSError("no more room")
        return searching.objective(trial)

    with pytest.raises(OSError, match="no more room"):
        run_trials(study, failing, 5, None, lambda _: None)
    run_trials(study, failing, 5, None, lambda _: None)
    assert [one.number for one in searching.finished(study.trials)] == [0, 1, 2, 3, 4]


def test_trials_that_a_notebook_asked_for_are_left_to_it(tmp_path: Path) -> None:
    searching, study = opened(f"journal:{tmp_path}/study.log", tmp_path)
    trial = study.ask(searching.question.mixture.categories)
    run_trials(study, searching.objective, 4, None, lambda _: None)
    assert len(counted(study)) == 4
    study.tell(trial, searching.objective(trial))
    assert all(WORKER not in one.user_attrs for one in study.trials[:1])


def test_other_settings_under_the_same_name_are_refused(address: str, tmp_path: Path) -> None:
    opened(address, tmp_path)
    with pytest.raises(ValueError, match="has another model .a, not b.; give the same settings"):
        opened(address, tmp_path, "b")


def test_what_all_need_is_computed_once(address: str, tmp_path: Path) -> None:
    _, study = opened(address, tmp_path)
    assert kept(study, "terms", lambda: {"a": 0}) == {"a": 0}
    _, again = opened(address, tmp_path)
    assert kept(again, "terms", lambda: {"a": 1}) == {"a": 0}


def test_no_more_are_begun_when_the_time_is_over_but_for_the_first(tmp_path: Path) -> None:
    searching, study = opened(f"journal:{tmp_path}/study.log", tmp_path)
    for _ in range(2):
        run_trials(study, searching.objective, 5, 0.0, lambda _: None)
        assert len(counted(study)) == 1


# What a worker runs in these tests: it writes down what it was given, and that it was interrupted.
CODE = """
import os, sys, time
from pathlib import Path
from surgeon.searches.study import given_to_worker
index, given = given_to_worker()
folder, what = Path(given["folder"]), given["what"]
(folder / str(index)).write_text(" ".join([os.environ["OMP_NUM_THREADS"], what, *sys.argv[1:]]))
try:
    if what == "sleep": time.sleep(60)
    if what == "fail" and index == 2: sys.exit("error: no such model")
except KeyboardInterrupt:
    (folder / f"{index}.interrupted").touch()
"""
COMMAND = ["-c", CODE, "a"]
ORPHAN = """
import sys, time
from pathlib import Path
from surgeon.searches import workers
with workers.WorkerProcesses(2, ["-c", Path(sys.argv[2]).read_text(), sys.argv[1]], {}, Path(sys.argv[1])):
    time.sleep(60)
"""
CHILD = """
import sys, time
from pathlib import Path
from surgeon.searches.study import interruptible
try:
    with interruptible(1):
        Path(sys.argv[1], "started").touch()
        time.sleep(60)
except KeyboardInterrupt:
    Path(sys.argv[1], "interrupted").touch()
"""


@pytest.fixture(autouse=True)
def program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surgeon.threads.usable_cores", lambda: 7)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)


def workers(count: int, folder: Path, what: str, say: Callable[[str], None]) -> WorkerProcesses:
    return WorkerProcesses(count, COMMAND, {"folder": str(folder), "what": what}, folder, say)


def test_they_run_what_they_are_given_with_a_share_of_the_cores(tmp_path: Path) -> None:
    said: list[str] = []
    with workers(3, tmp_path, "end", said.append) as others:
        pass
    assert [process.returncode for process in others.processes] == [0, 0]
    for index in (1, 2):
        assert (tmp_path / f"{index}").read_text() == "2 end a"
    assert said == []


def test_one_that_fails_is_told_of(tmp_path: Path) -> None:
    said: list[str] = []
    with workers(4, tmp_path, "fail", said.append) as others:
        wait_until(lambda: bool(said))
    number = others.processes[1].pid
    assert said == [f"worker 2 (process {number}) ended with exit code 1: error: no such model; the others go on"]


def test_one_that_is_killed_is_told_of(tmp_path: Path) -> None:
    said: list[str] = []
    others = workers(3, tmp_path, "sleep", said.append)
    others.__enter__()
    wait_until(lambda: (tmp_path / "1").exists() and (tmp_path / "2").exists())
    others.processes[0].kill()
    wait_until(lambda: bool(said))
    others.__exit__(KeyboardInterrupt, None, None)
    assert "worker 1 (process" in said[0]
    assert said[0].endswith("was ended by SIGKILL; the others go on")
    assert len(said) == 1
    assert (tmp_path / "2.interrupted").exists()


def test_one_alone_starts_nothing(tmp_path: Path) -> None:
    with workers(1, tmp_path, "end", print) as others:
        assert others.processes == []
    assert list(tmp_path.iterdir()) == []


def test_they_are_interrupted_when_the_first_is_killed(tmp_path: Path) -> None:
    (tmp_path / "child").write_text(CHILD)
    first = subprocess.Popen([sys.executable, "-c", ORPHAN, str(tmp_path), str(tmp_path / "child")])
    wait_until((tmp_path / "started").exists)
    children = psutil.Process(first.pid).children()
    first.kill()
    first.wait()
    wait_until((tmp_path / "interrupted").exists)
    assert psutil.wait_procs(children, timeout=PATIENCE)[1] == []


def test_the_end_of_a_job_is_an_interruption() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def be_ended() -> None:
        with interruptible(0):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)

    with pytest.raises(KeyboardInterrupt):
        be_ended()
    assert signal.getsignal(signal.SIGTERM) == before
