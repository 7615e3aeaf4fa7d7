"""A search as an Optuna study that many workers share.

It runs in rounds. What a round tries follows from what all earlier rounds have found, so it is the same on every
worker, and nobody has to lead: each worker works it out, puts what is missing into the storage, and takes what waits
there. A round ends when everything in it is finished, by whomever. Therefore one worker and four find the same, and a
worker that is killed at any point and started again goes on as if nothing had been.
"""

from __future__ import annotations

import json
import math
import random
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.trial import FrozenTrial, TrialState

from surgeon.results.edit import Edit
from surgeon.searches.study.storage import PatientCalls, Say, StudyStorage, say_aside
from surgeon.searches.study.trial_queue import FINISHED, TrialQueue
from surgeon.searches.trial import MeasuredProgram, Proposal, Trial

SETTINGS, METRICS = "settings", "objectives"  # attributes of the study
PROPOSAL, ROUND, PLACE, MEASURED, TASK, RESULT = "proposal", "round", "place", "measured", "task", "result"  # of trials
DIGITS = 9  # of what was measured: further ones may depend on what it was measured together with
MOST_PARAMETERS = 40  # of a trial
MOST_OF_A_LAYER = 9  # edits that can change it together
STEPS = 8  # running divergences that are kept of a trial that was stopped
SECONDS_BETWEEN_WORDS = 30.0
SECONDS_A_TURN = 1.0

Propose = Callable[[Sequence[Trial]], Sequence[Proposal]]
Measure = Callable[[Sequence[Proposal], Sequence[Trial]], Sequence[MeasuredProgram]]
Values = Callable[[Proposal, MeasuredProgram], Sequence[float]]


def divergence_alone(_: Proposal, measured: MeasuredProgram) -> Sequence[float]:
    """The one objective that a search has by default."""
    return (measured.divergence,)


@dataclass
class RoundStudy:
    """A study in a storage, made or gone on with.

    Attributes:
        name: of the study; a storage can have many.
        settings: what the study is about, as JSON values; a study of this name with others is refused.
        edits: that trials can have. Optuna's tools show each as a parameter, 0 or 1; where there are too many for that,
            as a database takes milliseconds for each, every layer, with how many edits of a trial change it.
        objectives: names of what is to be small.
        workers: how many there are at least.
        say: gets a line about what the user should know: waiting, workers that are lost, a database that is away.

    Raises:
        ValueError: if the storage has a study of this name with other settings; or, in any method, if it was deleted.
    """

    storage: StudyStorage
    name: str
    settings: Mapping[str, Any]
    edits: Sequence[Edit] = ()
    objectives: Sequence[str] = ("divergence",)
    workers: int = 1
    say: Say = say_aside

    def __post_init__(self) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        ask = PatientCalls(self.storage, self.say)
        self.study = ask(
            lambda: optuna.create_study(
                storage=self.storage.backend,
                study_name=self.name,
                directions=["minimize"] * len(self.objectives),
                sampler=optuna.samplers.RandomSampler(seed=0),  # never asked: proposals are ours
                load_if_exists=True,
            )
        )
        self.queue = TrialQueue(self.storage, self.study, self.say)
        self._require_same_settings()

    def finished(self) -> list[Trial]:
        """The finished trials in the order in which they were asked for, whoever ran them, and whenever."""
        return _trials(self.queue.read().values())

    def run(
        self, propose: Propose, measure: Measure, together: int = 1, values: Values = divergence_alone
    ) -> Iterator[Trial]:
        """Run until there is nothing left to propose, with all other workers that do.

        Yields each trial that is finished from now on, by this worker or others, when this one learns of it.

        Args:
            propose: from the finished trials of all earlier rounds, what to try in the next one; a function of nothing
                else, as every worker asks it, and those that go on ask it again. What was tried already is left out;
                the search is over when nothing remains.
            measure: measures programs, given the finished trials of all earlier rounds.
            together: how many it is given at most; fewer where that leaves other workers without any.
            values: of what was measured, in the order of the study's objectives.
        """
        known = {trial.proposal.key for trial in self.finished()}
        with self.queue.working():
            for number in count(self._last_round()):
                self._require_same_settings()
                live = self.queue.read()
                earlier = _trials(trial for trial in live.values() if trial.user_attrs.get(ROUND, number) < number)
                fresh = _fresh(propose(earlier), earlier)
                if not fresh:
                    return
                for trial in self._run_round(number, fresh, earlier, measure, together, values):
                    if trial.proposal.key not in known:
                        known.add(trial.proposal.key)
                        yield trial

    def shared(self, name: str, compute: Callable[[], Any]) -> Any:
        """A JSON value that all workers need and one of them computes, while the others wait; kept in the study."""
        key, pause = f"{TASK} {name}", _Pause(self.storage, self.say)
        turn = _Turn(self.queue.crew(self._last_round())[0])
        with self.queue.working():
            while True:
                trial = self.queue.read().get(key)
                if trial is not None and trial.state in FINISHED:
                    return json.loads(trial.user_attrs[RESULT])
                if trial is None and turn(1):
                    self.queue.put(key, {TASK: name}, {})
                elif taken := self.queue.take([trial] if trial else [], most=1):
                    result = {RESULT: json.dumps(_rounded(compute()))}
                    self.queue.tell(taken[0], TrialState.PRUNED, None, result, {})
                elif not self.queue.bury():
                    pause(f"another worker finds out {name}")

    def _run_round(
        self,
        number: int,
        fresh: Sequence[Proposal],
        earlier: Sequence[Trial],
        measure: Measure,
        together: int,
        values: Values,
    ) -> Iterator[Trial]:
        """Work on one round until it is finished, yielding its trials as they are."""
        first, pause = len(earlier), _Pause(self.storage, self.say)
        place, crew = self.queue.crew(number)
        turn, crew = _Turn(place), max(self.workers, crew)
        left = {proposal.key: place for place, proposal in enumerate(fresh, start=first)}
        while True:
            live = self.queue.read()
            for key in [key for key in left if key in live and live[key].state in FINISHED]:
                del left[key]
                yield _as_trial(live[key])
            if not left:
                return
            missing = [key for key in left if key not in live]
            if missing and turn(len(missing)):
                for key in missing:
                    self._put(fresh[left[key] - first], number, left[key])
                continue
            waiting = [live[key] for key in left if key in live and live[key].state == TrialState.WAITING]
            # Ever smaller shares: the last ones to be taken then end at about the same time.
            taken = self.queue.take(waiting, most=min(together, math.ceil(len(waiting) / crew)))
            if taken:
                self._measure(taken, earlier, measure, values)
                pause = _Pause(self.storage, self.say)
            elif not self.queue.bury():
                pause(f"other workers run {len(left)} trials of round {number + 1}")

    def _put(self, proposal: Proposal, number: int, place: int) -> None:
        attributes = {PROPOSAL: proposal.to_json(), "source": proposal.source, ROUND: number, PLACE: place}
        choice = proposal.choice
        if len(self.edits) <= MOST_PARAMETERS:
            parameters, highest = {str(edit): int(edit in choice) for edit in self.edits}, 1
        else:
            layers, highest = range(max(edit.stop for edit in self.edits)), MOST_OF_A_LAYER
            digits = len(str(layers.stop))
            parameters = {f"layer {one:0{digits}}": sum(one in edit.layers for edit in choice) for one in layers}
        self.queue.put(proposal.key, attributes, parameters, highest)

    def _measure(
        self,
        taken: Sequence[FrozenTrial],
        earlier: Sequence[Trial],
        measure: Measure,
        values: Values,
    ) -> None:
        """Measure trials that this worker has taken, and tell."""
        proposals = [Proposal.from_json(trial.user_attrs[PROPOSAL]) for trial in taken]
        for trial, proposal, measured in zip(taken, proposals, measure(proposals, earlier), strict=True):
            costs = [_tellable(value) for value in values(proposal, measured)]
            state = TrialState.COMPLETE if measured.whole else TrialState.PRUNED
            # As text, because infinities and NaN are nothing that JSON's readers agree on.
            found = {MEASURED: json.dumps(measured.to_json())}
            self.queue.tell(trial, state, costs, found, {} if measured.whole else _running(measured))

    def _last_round(self) -> int:
        """The round that was begun last: all before it are finished."""
        return max((trial.user_attrs.get(ROUND, 0) for trial in self.queue.read().values()), default=0)

    def _require_same_settings(self) -> None:
        wanted = json.loads(json.dumps({**self.settings, METRICS: dict.fromkeys(self.objectives, "minimize")}))
        stored = self.queue.ask(lambda: self.study.user_attrs).get(SETTINGS)
        if stored is None:
            self.queue.ask(lambda: self.study.set_user_attr(SETTINGS, wanted))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ExperimentalWarning)
                self.queue.ask(lambda: self.study.set_metric_names([*self.objectives]))
            stored = self.queue.ask(lambda: self.study.user_attrs)[SETTINGS]  # another worker may have been quicker
        for name in [*wanted, *(name for name in stored if name not in wanted)]:
            if stored.get(name) != wanted.get(name):
                raise ValueError(
                    f"the study {self.name!r} in {self.storage.place} has another {name} "
                    f"({stored.get(name)}, not {wanted.get(name)}); give the same settings to go on with it, or "
                    "another name of the study or output folder to begin one"
                )


class _Turn:
    """Whose it is to put what a round is still missing: each worker leaves it for a while to those before it.

    If all did so at once nothing would go wrong, but most of what they put would be there already.
    """

    def __init__(self, place: int) -> None:
        self.seconds = place * SECONDS_A_TURN
        self.missing, self.since = -1, time.monotonic()

    def __call__(self, missing: int) -> bool:
        """Whether it is this worker's, as so many are missing."""
        if missing != self.missing:
            self.missing, self.since = missing, time.monotonic()
        return time.monotonic() - self.since >= self.seconds


class _Pause:
    """Waits for other workers, ever longer, and says so now and then."""

    def __init__(self, storage: StudyStorage, say: Say) -> None:
        self.pace, self.say = storage.pace, say
        self.next = storage.pace.poll
        self.said = time.monotonic()

    def __call__(self, why: str) -> None:
        if time.monotonic() - self.said > SECONDS_BETWEEN_WORDS:
            self.said = time.monotonic()
            self.say(f"waiting: {why}")
        time.sleep(self.next * random.uniform(0.7, 1.3))  # workers that ask all at once would stand in a queue
        self.next = min(2 * self.next, self.pace.longest_poll)


def _trials(stored: Iterable[FrozenTrial]) -> list[Trial]:
    """Those that are finished, in the order in which they were asked for."""
    found = [trial for trial in stored if trial.state in FINISHED and PROPOSAL in trial.user_attrs]
    return [_as_trial(trial) for trial in sorted(found, key=lambda trial: (trial.user_attrs[PLACE], trial.number))]


def _fresh(proposals: Sequence[Proposal], earlier: Sequence[Trial]) -> list[Proposal]:
    """Those that were not tried, each once."""
    tried = {trial.proposal.key for trial in earlier}
    by_key = {proposal.key: proposal for proposal in reversed(proposals) if proposal.key not in tried}
    return [proposal for proposal in proposals if by_key.get(proposal.key) is proposal]


def _as_trial(stored: FrozenTrial) -> Trial:
    attributes = stored.user_attrs
    measured = MeasuredProgram.from_json(_rounded(json.loads(attributes[MEASURED])))
    return Trial(attributes[PLACE], Proposal.from_json(attributes[PROPOSAL]), measured)


def _rounded(value: Any) -> Any:
    """A JSON value with the digits of its numbers that mean something."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {name: _rounded(inner) for name, inner in value.items()}
    return [_rounded(inner) for inner in value] if isinstance(value, list | tuple) else value


def _tellable(value: float) -> float:
    """A cost as Optuna's tools can show it: one that is not finite is as bad as can be said."""
    return value if math.isfinite(value) else 1e30


def _running(measured: MeasuredProgram) -> dict[int, float]:
    """The mean divergence of the windows so far, by their number, for some of the windows."""
    seen = len(measured.divergences)
    steps = {max(1, round(seen * part / STEPS)) for part in range(1, STEPS + 1)} if seen else set()
    means = {step: math.fsum(measured.divergences[:step]) / step for step in sorted(steps)}
    return {step: _tellable(mean) for step, mean in means.items()}
