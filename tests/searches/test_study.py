"""Studies that workers share: killed or not, one worker finds the same; several lose nothing."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from surgeon.searches.search import make_sampler
from surgeon.searches.study import (
    WORKER,
    compute_once,
    list_trials,
    open_storage,
    open_study,
    run_trials,
)
from tests.searches.made_up_search import search

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


def work(address: str, folder: Path, seconds: float, together: Any, left: int) -> None:
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

    together.wait()
    run_trials(study, slowly, TRIALS, None, lambda _: None)


def ended(address: str, folder: Path, *lefts: int, seconds: float = 0.0) -> list[int | None]:
    """What workers end with that begin together."""
    context = multiprocessing.get_context("fork")  # which need not import all of it anew
    together = context.Barrier(len(lefts))
    workers = [
        context.Process(target=work, args=(address, folder, seconds, together, left)) for left in lefts
    ]
    for one in workers:
        one.start()
    for one in workers:
        one.join(120)
    return [one.exitcode for one in workers]


def rows(address: str, folder: Path) -> list[tuple[int, str, float]]:
    searching, study = opened(address, folder)
    return [
        (one.number, one.key, one.measured.divergence) for one in searching.finished_trials(study.trials)
    ]


def test_killed_and_begun_again_one_worker_ends_with_the_same_trials(
    address: str, tmp_path: Path
) -> None:
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
    assert ended(address, tmp_path, 2, 0, 0, seconds=0.1) == [-signal.SIGKILL, 0, 0]
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
    assert [one.number for one in searching.finished_trials(study.trials)] == [0, 1, 2, 3, 4]


def test_trials_that_a_notebook_asked_for_are_left_to_it(tmp_path: Path) -> None:
    searching, study = opened(f"journal:{tmp_path}/study.log", tmp_path)
    trial = study.ask(searching.question.mixture.categories)
    run_trials(study, searching.objective, 4, None, lambda _: None)
    assert len(list_trials(study)) == 4
    study.tell(trial, searching.objective(trial))
    assert all(WORKER not in one.user_attrs for one in study.trials[:1])


def test_other_settings_under_the_same_name_are_refused(address: str, tmp_path: Path) -> None:
    opened(address, tmp_path)
    with pytest.raises(ValueError, match="has another model .a, not b.; give the same settings"):
        opened(address, tmp_path, "b")


def test_what_all_need_is_computed_once(address: str, tmp_path: Path) -> None:
    _, study = opened(address, tmp_path)
    assert compute_once(study, "terms", lambda: {"a": 0}) == {"a": 0}
    _, again = opened(address, tmp_path)
    assert compute_once(again, "terms", lambda: {"a": 1}) == {"a": 0}


def test_no_more_are_begun_when_the_time_is_over_but_for_the_first(tmp_path: Path) -> None:
    searching, study = opened(f"journal:{tmp_path}/study.log", tmp_path)
    for _ in range(2):
        run_trials(study, searching.objective, 5, 0.0, lambda _: None)
        assert len(list_trials(study)) == 1
