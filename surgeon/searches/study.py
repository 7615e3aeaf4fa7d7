"""A search as an Optuna study that any number of workers share.

Every worker runs Optuna's own loop over the same storage: it asks by all that is finished, takes what is running as
tried, measures and tells. Nobody leads and nobody waits for others, but at the end. Trials of processes that are gone
are failed, which counts for nothing, so that they are asked for again: in a database Optuna's heartbeats say so, and
of processes of this machine the machine.
"""

from __future__ import annotations

import json
import os
import platform
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import optuna
import psutil
from optuna.exceptions import ExperimentalWarning, UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from surgeon.searches.search import PROGRAM
from surgeon.searches.storage import StudyStorage, say_aside

# Attributes of the study.
SETTINGS = "settings"
METRICS = "objectives"
WORKER = "worker"  # attribute of trials
FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)
COUNTED = (TrialState.WAITING, TrialState.RUNNING, *FINISHED)
SECONDS_BETWEEN_ASKS = 0.01
LONGEST_ASK = 2.0  # seconds
SECONDS_BETWEEN_LOOKS = 0.3  # of a worker that waits for others
SAME_START = 2.0  # seconds that two readings of a process' start may be apart


class NotTried(Exception):
    """Ends a trial that is one too many, or of which nothing is left to try; it is failed, and counts for nothing."""


def open_study(storage: StudyStorage, name: str, settings: Mapping[str, Any], metrics: Sequence[str]) -> optuna.Study:
    """Open a study in a storage, made or gone on with.

    Args:
        name: of the study; a storage can have many.
        settings: what the study is about, as JSON values.
        metrics: names of what is to be small.

    Raises:
        ValueError: if the storage has a study of this name with other settings.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    directions = [optuna.study.StudyDirection.MINIMIZE] * len(metrics)
    study = optuna.create_study(storage=storage.backend, study_name=name, directions=directions, load_if_exists=True)
    wanted = json.loads(json.dumps({**settings, METRICS: dict.fromkeys(metrics, "minimize")}))
    if SETTINGS not in study.user_attrs:
        study.set_user_attr(SETTINGS, wanted)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            study.set_metric_names([*metrics])
    stored = study.user_attrs[SETTINGS]  # another worker may have been quicker
    for key in [*wanted, *(key for key in stored if key not in wanted)]:
        if stored.get(key) != wanted.get(key):
            raise ValueError(
                f"the study {name!r} in {storage.place} has another {key} ({stored.get(key)}, not {wanted.get(key)}); "
                "give the same settings to go on with it, or another name of the study or output folder to begin one"
            )
    return study


def kept(study: optuna.Study, name: str, compute: Callable[[], Any]) -> Any:
    """A JSON value that all workers need, kept in the study by the first who has computed it."""
    identifier = study._study_id
    backend = study._storage
    if name not in backend.get_study_system_attrs(identifier):
        value = json.dumps(compute())
        if name not in backend.get_study_system_attrs(identifier):
            backend.set_study_system_attr(identifier, name, value)
    return json.loads(backend.get_study_system_attrs(identifier)[name])


def counted(study: optuna.Study) -> list[FrozenTrial]:
    """All trials that were not given up, by their numbers."""
    return study.get_trials(deepcopy=False, states=COUNTED)


def run_trials(
    study: optuna.Study,
    objective: Callable[[optuna.Trial], Any],
    trials: int,
    until: float | None,
    tell: Callable[[FrozenTrial], object],
) -> None:
    """Work until the study has so many trials, or no more can be asked for, with all other workers that do.

    Args:
        until: when no more are begun, by `time.monotonic`, once there are some.
        tell: gets each trial that is finished from now on, by this worker or others.
    """
    session = _Session(study, trials, until, tell)
    # Numbers of processes are given again.
    me = [platform.node(), os.getpid(), psutil.Process().create_time()]

    def measure(trial: optuna.Trial) -> Any:
        trial.set_user_attr(WORKER, me)
        if sum(one.number < trial.number for one in counted(study)) >= trials:
            raise NotTried
        if _is_twin(study, trial):
            raise NotTried
        found = objective(trial)
        if getattr(study.sampler, "is_exhausted", False):  # it has said the best trial once more
            raise NotTried
        return found

    states_then: list[TrialState] | None = None
    while True:
        _fail_lost(study, me)
        if session.is_open() and states_then != _states(study):  # else nothing was left to ask for, and nothing is new
            study.optimize(measure, callbacks=[session], catch=(NotTried,))
            states_then = _states(study)
        session.look()
        if not _running(study):
            return
        time.sleep(SECONDS_BETWEEN_LOOKS)


class _Session:
    """What a worker has been told of so far, and whether more trials are begun; stops Optuna's loop when none are."""

    def __init__(
        self, study: optuna.Study, trials: int, until: float | None, tell: Callable[[FrozenTrial], object]
    ) -> None:
        self.study = study
        self.trials = trials
        self.until = until
        self.tell = tell
        self.known = {one.number for one in counted(study) if one.state in FINISHED}

    def __call__(self, study: optuna.Study, trial: FrozenTrial) -> None:  # noqa: ARG002 - as Optuna calls it
        self.look()
        if not self.is_open():
            study.stop()

    def look(self) -> None:
        for one in counted(self.study):
            if one.state in FINISHED and one.number not in self.known:
                self.known.add(one.number)
                self.tell(one)

    def is_open(self) -> bool:
        is_over = self.until is not None and time.monotonic() >= self.until and bool(self.known)
        return not is_over and len(counted(self.study)) < self.trials


def _states(study: optuna.Study) -> list[TrialState]:
    return [one.state for one in counted(study)]


def _running(study: optuna.Study) -> list[FrozenTrial]:
    """Trials that workers run; those that a notebook asked for are left to it."""
    return [one for one in counted(study) if one.state == TrialState.RUNNING and WORKER in one.user_attrs]


def _is_twin(study: optuna.Study, trial: optuna.Trial) -> bool:
    """Whether another trial has the same program, and was there first: two workers have asked at the same moment."""
    _ = trial.relative_params  # asks the sampler, which Optuna else does when the first parameter is wanted
    program = study._storage.get_trial(trial._trial_id).user_attrs.get(PROGRAM)
    if program is None:  # samplers of Optuna name none; what they say twice is not measured again
        return False
    until = time.monotonic() + LONGEST_ASK
    while True:
        others = [one for one in counted(study) if one.number != trial.number]
        earlier = [one for one in others if one.number < trial.number and one.state == TrialState.RUNNING]
        # Who asked before may not have been answered yet; a worker that was killed as it asked never will be.
        if all(PROGRAM in one.user_attrs for one in earlier) or time.monotonic() >= until:
            break
        time.sleep(SECONDS_BETWEEN_ASKS)
    finished = [one for one in others if one.state.is_finished()]
    return any(one.user_attrs.get(PROGRAM) == program for one in (*earlier, *finished))


def _has_ended(machine: str, number: int, began: float) -> bool:
    """Whether a process is known to have ended; of other machines' processes that cannot be known from here."""
    if machine != platform.node():
        return False
    try:
        process = psutil.Process(number)
        return abs(process.create_time() - began) > SAME_START or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _fail_lost(study: optuna.Study, me: list[Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        optuna.storages.fail_stale_trials(study)
    for trial in _running(study):
        worker = trial.user_attrs[WORKER]
        if worker == me or _has_ended(*worker):
            say_aside(f"trial {trial.number} was lost with process {worker[1]} on {worker[0]}; it is tried again")
            with suppress(UpdateFinishedTrialError):
                study._storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
