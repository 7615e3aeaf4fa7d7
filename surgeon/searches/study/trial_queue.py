"""Trials that wait in a storage, and workers that take them: each is run by one, and none is lost with its worker."""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import optuna
import psutil
from optuna.distributions import BaseDistribution, IntDistribution
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState, create_trial

from surgeon.errors import is_full_disk
from surgeon.searches.study.storage import PatientCalls, Say, StudyStorage

SAME_START = 2.0  # seconds that two readings of a process' start may be apart
KEY, WORKER, BEAT = "key", "worker", "beat"  # attributes of trials
PRESENT = "present "  # begins the names of the study's own attributes that say which workers there are
ROUNDS_PRESENT = 2  # that a worker counts as there after it was last heard of
FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)
LIVE = (TrialState.WAITING, TrialState.RUNNING, *FINISHED)


@dataclass(frozen=True)
class Holder:
    """A process.

    Attributes:
        machine: its name.
        world: what its number means something in: one run of the machine's kernel, and one container on it.
        started: seconds since 1970; another process may get the same number later.
    """

    machine: str
    world: str
    pid: int
    started: float

    def __str__(self) -> str:
        return f"process {self.pid} on {self.machine}"

    @property
    def is_seen(self) -> bool:
        """Whether it can be known from here if it has ended."""
        return self.world == _world()

    def is_gone(self) -> bool:
        """Whether it is known to have ended: of a process elsewhere that cannot be known from here."""
        if not self.is_seen:
            return False
        try:
            process = psutil.Process(self.pid)
            other = abs(process.create_time() - self.started) > SAME_START
            return other or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True
        except psutil.AccessDenied:
            return False


def this_process() -> Holder:
    """The process that asks."""
    return Holder(platform.node(), _world(), os.getpid(), psutil.Process().create_time())


@cache
def _world() -> str:
    if sys.platform == "linux":
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    return f"{platform.node()} {psutil.boot_time():.0f}"


class TrialQueue:
    """The trials of one study, each known by its key.

    Of several trials with one key the first that is alive counts: waiting, running or finished. Trials that have failed
    stay so, hence the one that a worker takes is still the first when it is finished, and no key is finished twice.

    Args:
        say: gets a line about what the user should know.
    """

    def __init__(self, storage: StudyStorage, study: optuna.Study, say: Say) -> None:
        self.storage, self.study, self.say = storage, study, say
        self.ask = PatientCalls(storage, say)
        self.me = this_process()
        self.own: dict[int, FrozenTrial] = {}  # by number: what this worker has taken and not yet told
        self.study_id = self.ask(lambda: storage.backend.get_study_id_from_name(study.study_name))
        self._watched: dict[int, tuple[Any, float]] = {}

    def read(self) -> dict[str, FrozenTrial]:
        """The trial that counts, by key. Others that wait with the same key are failed."""
        live: dict[str, FrozenTrial] = {}
        for trial in self.ask(lambda: self.study.get_trials(deepcopy=False, states=LIVE)):
            first = live.setdefault(trial.user_attrs[KEY], trial)
            if first is not trial and trial.state == TrialState.WAITING:
                self._fail(trial)
        return live

    def put(self, key: str, attributes: Mapping[str, Any], parameters: Mapping[str, int], highest: int = 1) -> None:
        """Let a trial wait.

        Args:
            parameters: what Optuna's tools show as such, from 0 to the highest.
        """
        kinds: dict[str, BaseDistribution] = {name: IntDistribution(0, highest) for name in parameters}
        waiting = create_trial(
            state=TrialState.WAITING,
            params=dict(parameters),
            distributions=kinds,
            user_attrs={KEY: key, **attributes},
        )
        self.ask(lambda: self.study.add_trial(waiting))

    def take(self, trials: Iterable[FrozenTrial], most: int) -> list[FrozenTrial]:
        """Become the worker of at most so many of these, if others are not quicker."""
        taken: list[FrozenTrial] = []
        for trial in trials:
            if len(taken) == most:
                break
            if trial.state == TrialState.WAITING and self._set_state(trial, TrialState.RUNNING):
                self.own[trial.number] = trial
                self._set_attribute(trial, WORKER, asdict(self.me))
                taken.append(trial)
        return taken

    def tell(
        self,
        trial: FrozenTrial,
        state: TrialState,
        values: Sequence[float] | None,
        attributes: Mapping[str, Any],
        running: Mapping[int, float],
    ) -> None:
        """Put a result into the storage; one whose trial was taken to be lost meanwhile counts if no other has come.

        Args:
            state: one of `FINISHED`.
            running: intermediate values by step.
        """
        backend, identifier = self.storage.backend, trial._trial_id  # what a storage's functions know it by
        try:
            for name, value in attributes.items():
                self._set_attribute(trial, name, value)
            for step, value in running.items():
                self.ask(partial(backend.set_trial_intermediate_value, identifier, step, value))
            self._set_state(trial, state, values)
        except UpdateFinishedTrialError:
            if self.ask(lambda: backend.get_trial(identifier)).state == TrialState.FAIL:
                self._tell_late(trial, state, values, attributes, running)
            # Else the storage had taken it in before the connection to it broke.
        self.own.pop(trial.number, None)

    def bury(self) -> bool:
        """Fail trials whose worker is dead, so that they can be put again; says whether there were any."""
        running = self.ask(lambda: self.study.get_trials(deepcopy=False, states=[TrialState.RUNNING]))
        found = False
        for trial in (trial for trial in running if trial.number not in self.own):
            values = trial.user_attrs.get(WORKER)  # none in the moment before its worker has said so
            worker = None if values is None else Holder(**values)
            if (worker is not None and worker.is_gone()) or self._is_silent(trial, worker):
                lost = "an unknown worker" if worker is None else str(worker)
                self.say(f"trial {trial.number} was lost with {lost}; it is tried again")
                self._fail(trial)
                found = True
        return found

    def crew(self, number: int) -> tuple[int, int]:
        """Say that this worker is there in a round of that number; returns its place among all, and how many there are.

        That is as far as is known: workers elsewhere that have ended count for a while.
        """
        own, backend = f"{PRESENT}{self.me.world} {self.me.pid}", self.storage.backend
        self.ask(lambda: backend.set_study_system_attr(self.study_id, own, [number, asdict(self.me)]))
        known = self.ask(lambda: backend.get_study_system_attrs(self.study_id))
        there = sorted(
            name
            for name, value in known.items()
            if name.startswith(PRESENT)
            and value[0] > number - ROUNDS_PRESENT
            and (name == own or not Holder(**value[1]).is_gone())
        )
        return there.index(own), len(there)

    @contextmanager
    def working(self) -> Iterator[None]:
        """While it lasts, trials of this worker show signs of life; what it has not told at its end is given back."""
        ended, backend = threading.Event(), self.storage.backend

        def beat() -> None:
            count = 0
            while not ended.wait(self.storage.pace.heartbeat):
                count += 1
                for trial in list(self.own.values()):
                    # One that was told just now, taken to be lost, or deleted: telling finds out.
                    self._try(partial(backend.set_trial_user_attr, trial._trial_id, BEAT, count))

        thread = threading.Thread(target=beat, daemon=True, name="heartbeat")
        thread.start()
        try:
            yield
        finally:
            ended.set()
            for trial in list(self.own.values()):  # if the storage is away, others notice after a while
                self._try(partial(backend.set_trial_state_values, trial._trial_id, TrialState.FAIL))
            self.own.clear()
            thread.join(timeout=self.storage.pace.heartbeat)

    def _try(self, say: Callable[[], object]) -> None:
        """Say something about a trial that need not be said, if the storage answers at once and the trial is open."""
        try:
            say()
        except (UpdateFinishedTrialError, KeyError):
            pass
        except Exception as error:
            if not (self.storage.is_away(error) or is_full_disk(error)):
                raise

    def _tell_late(self, trial: FrozenTrial, *result: Any) -> None:
        """Tell the result of a trial that was failed: of the one with its key that waits, or of a new one."""
        key = trial.user_attrs[KEY]
        if key not in self.read():
            attributes = {name: value for name, value in trial.user_attrs.items() if name not in (KEY, WORKER, BEAT)}
            self.put(key, attributes, trial.params, max([1, *trial.params.values()]))
        for again in self.take([self.read()[key]], most=1):  # nothing to take: another worker runs it, or has told it
            self.tell(again, *result)

    def _is_silent(self, trial: FrozenTrial, worker: Holder | None) -> bool:
        """Whether a trial whose process cannot be seen from here has shown no change for too long.

        That goes by this process' clock alone: those of two machines can be hours apart. (Optuna's own heartbeats go
        by the database's clock, but its journals have none, and they do not work with trials that are asked for.)
        """
        if worker is not None and worker.is_seen:
            return False
        signs, now = (trial.user_attrs.get(WORKER), trial.user_attrs.get(BEAT)), time.monotonic()
        seen, since = self._watched.get(trial.number, (None, now))
        if seen != signs or since < self.ask.steady_since:
            since = now
        self._watched[trial.number] = (signs, since)
        return now - since > self.storage.pace.grace

    def _fail(self, trial: FrozenTrial) -> None:
        with suppress(UpdateFinishedTrialError):  # another worker was quicker
            self._set_state(trial, TrialState.FAIL)

    def _set_state(self, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None = None) -> bool:
        backend = self.storage.backend
        try:
            return self.ask(lambda: backend.set_trial_state_values(trial._trial_id, state, values))
        except UpdateFinishedTrialError:
            if state != TrialState.RUNNING:
                raise
            return False  # another worker has run it already

    def _set_attribute(self, trial: FrozenTrial, name: str, value: Any) -> None:
        self.ask(partial(self.storage.backend.set_trial_user_attr, trial._trial_id, name, value))
