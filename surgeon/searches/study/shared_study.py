"""A search as an Optuna study that any number of workers share.

Each worker asks for a batch of trials, by all that is finished and with what is running taken as tried, measures it,
and tells. Nobody leads and nobody waits for others, but at the end. A trial lies in the storage from the moment it is
asked for, with the process that holds it; when that is gone the trial waits again, and whoever looks next takes it.
A batch is asked of the trials before its first one, and raced against those, so that one worker which is killed at any
point and started again ends with the same trials as one that never was.
"""

from __future__ import annotations

import json
import math
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning, UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState, create_trial

from surgeon.errors import is_full_disk
from surgeon.searches.study.holder import Holder, this_process
from surgeon.searches.study.storage import PatientCalls, Say, StudyStorage, say_aside

SETTINGS, METRICS = "settings", "objectives"  # attributes of the study
BATCH, WORKER, BEAT, PROGRAM = "batch", "worker", "beat", "program"  # attributes of trials
FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)
LIVE = (TrialState.WAITING, TrialState.RUNNING, *FINISHED)
SECONDS_BETWEEN_WORDS = 30.0


@dataclass(frozen=True)
class Told:
    """What became of a trial.

    Attributes:
        values: by the study's objectives.
        running: intermediate values by step; a trial that has some was stopped before its end.
    """

    values: Sequence[float]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    constraints: Mapping[str, float] = field(default_factory=dict)
    running: Mapping[int, float] = field(default_factory=dict)


Ask = Callable[[Sequence[FrozenTrial], int], Sequence[FrozenTrial]]
Measure = Callable[[Sequence[FrozenTrial], Sequence[FrozenTrial]], Sequence[Told]]


@dataclass
class SharedStudy:
    """A study in a storage, made or gone on with.

    Attributes:
        name: of the study; a storage can have many.
        settings: what the study is about, as JSON values; a study of this name with others is refused.
        objectives: names of what is to be small.
        workers: how many there are at least.
        say: gets a line about what the user should know: waiting, workers that are lost, a database that is away.

    Raises:
        ValueError: if the storage has a study of this name with other settings; or, in any method, if it was deleted.
    """

    storage: StudyStorage
    name: str
    settings: Mapping[str, Any]
    objectives: Sequence[str] = ("divergence",)
    workers: int = 1
    say: Say = say_aside

    def __post_init__(self) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.call = PatientCalls(self.storage, self.say)
        self.me = this_process()
        self.study = self.call(
            lambda: optuna.create_study(
                storage=self.storage.backend,
                study_name=self.name,
                directions=["minimize"] * len(self.objectives),
                load_if_exists=True,
            )
        )
        self._held: set[int] = set()  # identifiers of what this worker has taken and not yet told
        self._signs: dict[int, tuple[Any, float]] = {}  # of life, by trial, and since when there were no others
        self._require_same_settings()

    def trials(self) -> list[FrozenTrial]:
        """All that were not given up, by their numbers."""
        return self.call(lambda: self.study.get_trials(deepcopy=False, states=LIVE))

    def run(self, ask: Ask, measure: Measure, trials: int, together: int = 1) -> Iterator[FrozenTrial]:
        """Work until the study has so many trials, or no more can be asked for, with all other workers that do.

        Yields each trial that is finished from now on, by this worker or others, when this one learns of it.

        Args:
            ask: for at most so many trials, given the study's; fewer where there are no more. A function of its
                arguments alone.
            measure: measures trials, given those before the first of their batch.
            together: how many it is given at most; fewer where that leaves other workers without any.
        """
        known = {trial.number for trial in self.trials() if trial.state in FINISHED}
        with self._showing_life():
            taken, pause = self._left_of_the_last_batch(ask), self._pause()
            while True:
                if taken:
                    self._measure(taken, measure)
                    pause = self._pause()
                every = self.trials()
                for trial in every:
                    if trial.state in FINISHED and trial.number not in known:
                        known.add(trial.number)
                        yield trial
                taken = self._take(every, together) or self._ask(ask, every, trials, together)
                open_ = [trial for trial in every if trial.state not in FINISHED and BATCH in trial.user_attrs]
                if not taken and not open_ and len(self.trials()) == len(every):
                    return
                if not taken and not self._give_back_of_the_dead(every):
                    pause(f"other workers run {len(open_)} trials")

    def kept(self, name: str, compute: Callable[[], Any], others: bool = False) -> Any:
        """A JSON value that all workers need, which is kept in the study.

        Args:
            others: whether another worker computes it, and this one waits.
        """
        identifier, backend, pause = self.study._study_id, self.storage.backend, self._pause()

        def read() -> Any:
            return self.call(lambda: backend.get_study_system_attrs(identifier)).get(name)

        while read() is None and others:
            pause(f"another worker finds out {name}")
        if read() is None:
            value = json.dumps(compute())
            if read() is None:  # else one elsewhere was quicker
                self.call(lambda: backend.set_study_system_attr(identifier, name, value))
        return json.loads(read())

    def _ask(self, ask: Ask, every: Sequence[FrozenTrial], trials: int, together: int) -> list[FrozenTrial]:
        """Ask for a new batch, and hold it; without what others asked for at the same moment."""
        size = min(math.ceil(together / self._crew(every)), trials - len(every))
        first = every[-1].number + 1 if every else 0
        batch = [self._hold(one, first, place, size) for place, one in enumerate(ask(every, size) if size > 0 else ())]
        if not batch or batch[-1].number == first + len(batch) - 1:
            return batch
        later = [trial for trial in self.trials() if trial.number >= first]
        earliest: dict[str, int] = {}
        for trial in later:
            earliest.setdefault(trial.user_attrs.get(PROGRAM, ""), trial.number)
        kept = {one.number for one in later[: trials - len(every)]} & set(earliest.values())
        for trial in batch:
            if trial.number not in kept:
                self._set_state(trial, TrialState.FAIL)
                self._held.discard(trial._trial_id)
        return [trial for trial in batch if trial.number in kept]

    def has_others(self, every: Sequence[FrozenTrial]) -> bool:
        """Whether other workers are there, as far as is known."""
        return self._crew(every) > 1

    def _crew(self, every: Sequence[FrozenTrial]) -> int:
        """How many workers there are, as far as is known."""
        running = [one.user_attrs.get(WORKER) for one in every if one.state == TrialState.RUNNING]
        return max(self.workers, len({json.dumps(holder) for holder in [*running, asdict(self.me)]}))

    def _left_of_the_last_batch(self, ask: Ask) -> list[FrozenTrial]:
        """What is missing of the batch that was begun last, where its worker was killed as it asked for it."""
        every = self.trials()
        self._give_back_of_the_dead(every)
        asked = [trial for trial in every if BATCH in trial.user_attrs]
        if not asked or any(trial.state == TrialState.RUNNING for trial in self.trials()):
            return []
        first, _, size = asked[-1].user_attrs[BATCH]
        there = {trial.user_attrs[BATCH][1] for trial in asked if trial.user_attrs[BATCH][0] == first}
        if len(there) == size:
            return []
        found = ask([trial for trial in every if trial.number < first], size)
        missing = [self._hold(one, first, place, size) for place, one in enumerate(found) if place not in there]
        return sorted([*self._take(self.trials(), size), *missing], key=lambda trial: trial.user_attrs[BATCH][1])

    def _hold(self, trial: FrozenTrial, first: int, place: int, size: int) -> FrozenTrial:
        """Put a trial into the storage, as one that this worker runs."""
        attributes = {**trial.user_attrs, BATCH: [first, place, size], WORKER: asdict(self.me)}
        running = create_trial(
            state=TrialState.RUNNING,
            params=trial.params,
            distributions=trial.distributions,
            user_attrs=attributes,
            system_attrs=trial.system_attrs,
        )
        backend = self.storage.backend
        identifier = self.call(lambda: backend.create_new_trial(self.study._study_id, running))
        self._held.add(identifier)
        return self.call(lambda: backend.get_trial(identifier))

    def _take(self, every: Sequence[FrozenTrial], most: int) -> list[FrozenTrial]:
        """Become the worker of trials of one batch that wait, if others are not quicker."""
        waiting = [one for one in every if one.state == TrialState.WAITING and BATCH in one.user_attrs]
        taken: list[FrozenTrial] = []
        for trial in (one for one in waiting if one.user_attrs[BATCH][0] == waiting[0].user_attrs[BATCH][0]):
            if len(taken) < most and self._set_state(trial, TrialState.RUNNING):
                self._held.add(trial._trial_id)
                self._set_attribute(trial, WORKER, asdict(self.me))
                taken.append(trial)
        return taken

    def _measure(self, taken: Sequence[FrozenTrial], measure: Measure) -> None:
        first = taken[0].user_attrs[BATCH][0]
        earlier = [trial for trial in self.trials() if trial.number < first]
        for trial, told in zip(taken, measure(taken, earlier), strict=True):
            self._tell(trial, told)

    def _tell(self, trial: FrozenTrial, told: Told) -> None:
        """Put a result into the storage; it counts unless another worker, to which the trial was given, was quicker."""
        backend, identifier = self.storage.backend, trial._trial_id  # what a storage's functions know it by
        with suppress(UpdateFinishedTrialError):
            for name, value in told.attributes.items():
                self._set_attribute(trial, name, value)
            for name, amount in told.constraints.items():
                self.call(partial(backend.set_trial_system_attr, identifier, f"constraints:{name}", amount))
            for step, value in told.running.items():
                self.call(partial(backend.set_trial_intermediate_value, identifier, step, value))
            self._set_state(trial, TrialState.PRUNED if told.running else TrialState.COMPLETE, told.values)
        self._held.discard(identifier)

    def _give_back_of_the_dead(self, every: Sequence[FrozenTrial]) -> bool:
        """Let trials whose worker is gone wait again; says whether there were any."""
        found = False
        for trial in every:
            if trial.state != TrialState.RUNNING or trial._trial_id in self._held or WORKER not in trial.user_attrs:
                continue
            worker = Holder(**trial.user_attrs[WORKER])
            if worker.is_gone() or self._is_silent(trial, worker):
                self.say(f"trial {trial.number} was lost with {worker}; it is tried again")
                self._set_state(trial, TrialState.WAITING)
                found = True
        return found

    def _is_silent(self, trial: FrozenTrial, worker: Holder) -> bool:
        """Whether a trial whose process cannot be seen from here has shown no change for too long.

        That goes by this process' clock alone: those of two machines can be hours apart. (Optuna's own heartbeats go
        by the database's clock, but its journals have none, and they do not work with trials that are asked for.)
        """
        if worker.is_seen:
            return False
        signs, now = (trial.user_attrs[WORKER], trial.user_attrs.get(BEAT)), time.monotonic()
        seen, since = self._signs.get(trial.number, (None, now))
        if seen != signs or since < self.call.steady_since:
            since = now
        self._signs[trial.number] = (signs, since)
        return now - since > self.storage.pace.grace

    @contextmanager
    def _showing_life(self) -> Iterator[None]:
        """While it lasts, trials of this worker show signs of life; what it has not told at its end waits again."""
        ended, backend = threading.Event(), self.storage.backend

        def beat() -> None:
            count = 0
            while not ended.wait(self.storage.pace.heartbeat):
                count += 1
                for identifier in [*self._held]:
                    # One that was told just now, taken to be lost, or deleted: telling finds out.
                    self._try(partial(backend.set_trial_user_attr, identifier, BEAT, count))

        thread = threading.Thread(target=beat, daemon=True, name="heartbeat")
        thread.start()
        try:
            yield
        finally:
            ended.set()
            for identifier in [*self._held]:  # if the storage is away, others notice after a while
                self._try(partial(backend.set_trial_state_values, identifier, TrialState.WAITING))
            self._held.clear()
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

    def _set_state(self, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None = None) -> bool:
        backend = self.storage.backend
        try:
            return self.call(lambda: backend.set_trial_state_values(trial._trial_id, state, values))
        except UpdateFinishedTrialError:  # another worker has told it
            return False

    def _set_attribute(self, trial: FrozenTrial, name: str, value: Any) -> None:
        self.call(partial(self.storage.backend.set_trial_user_attr, trial._trial_id, name, value))

    def _require_same_settings(self) -> None:
        wanted = json.loads(json.dumps({**self.settings, METRICS: dict.fromkeys(self.objectives, "minimize")}))
        stored = self.call(lambda: self.study.user_attrs).get(SETTINGS)
        if stored is None:
            self.call(lambda: self.study.set_user_attr(SETTINGS, wanted))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ExperimentalWarning)
                self.call(lambda: self.study.set_metric_names([*self.objectives]))
            stored = self.call(lambda: self.study.user_attrs)[SETTINGS]  # another worker may have been quicker
        for name in [*wanted, *(name for name in stored if name not in wanted)]:
            if stored.get(name) != wanted.get(name):
                raise ValueError(
                    f"the study {self.name!r} in {self.storage.place} has another {name} "
                    f"({stored.get(name)}, not {wanted.get(name)}); give the same settings to go on with it, or "
                    "another name of the study or output folder to begin one"
                )

    def _pause(self) -> Callable[[str], None]:
        """Waits for other workers, ever longer, and says so now and then."""
        pace, seconds, said = self.storage.pace, self.storage.pace.poll, time.monotonic()

        def pause(why: str) -> None:
            nonlocal seconds, said
            if time.monotonic() - said > SECONDS_BETWEEN_WORDS:
                said = time.monotonic()
                self.say(f"waiting: {why}")
            time.sleep(seconds * random.uniform(0.7, 1.3))  # workers that ask all at once would stand in a queue
            seconds = min(2 * seconds, pace.longest_poll)

        return pause
