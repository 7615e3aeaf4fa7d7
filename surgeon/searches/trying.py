"""Trials of a search: asked of a sampler, measured, told to a study that workers share."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import Any

import optuna
from optuna.samplers import BaseSampler, CmaEsSampler
from optuna.storages import InMemoryStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from surgeon.searches.samplers import OTHERS, SURGEON, SurgerySampler, distributions
from surgeon.searches.search import BATCH, EDITS, MEASURED, PROGRAM, SOURCE, SUBLAYERS, Search, tellable
from surgeon.searches.study.shared_study import FINISHED, SharedStudy, Told
from surgeon.searches.study.storage import StudyStorage
from surgeon.searches.trial import MeasuredProgram, Proposal, Trial

STEPS = 8  # running divergences that are kept of a trial that was stopped


def try_programs(
    search: Search,
    trials: int,
    sampler: str = SURGEON,
    seed: int = 0,
    study: SharedStudy | None = None,
    until: float | None = None,
) -> Iterator[Trial]:
    """Run a search until its study has so many trials, or nothing is left to try.

    Yields each trial that is finished from now on, by this worker or others.

    Args:
        sampler: one of `SAMPLERS`.
        seed: of samplers that are random. They are made anew for each batch, so that what they ask follows from the
            study's trials.
        study: by default one in memory.
        until: when no more are begun, by `time.monotonic`, once there are some; of the last ones before it as many
            together as are likely to be measured by then, and at least one.
    """
    ours = SurgerySampler(search) if sampler == SURGEON else None
    began, done = time.monotonic(), 0

    def in_time(count: int) -> int:
        """How many of so many trials are likely to be measured in time."""
        now = time.monotonic()
        if until is None or (now < until and not done):
            return count
        return min(count, max(1, int((until - now) * done / (now - began)))) if now < until else 0

    def ask(stored: Sequence[FrozenTrial], count: int) -> list[FrozenTrial]:
        if any(one.state in FINISHED for one in stored) and not (count := in_time(count)):
            return []
        if ours is not None:  # of those that ask at the same moment, most ask for other trials then
            ours.skipped = random.randrange(BATCH) if shared.has_others(stored) else 0
        return asked(search, ours or OTHERS[sampler](seed + len(stored)), stored, count)

    def measure(taken: Sequence[FrozenTrial], earlier: Sequence[FrozenTrial]) -> list[Told]:
        proposals = [search.proposal(one.params, one.user_attrs) for one in taken]
        before = search.evaluator.sublayers
        measured = search.measure(proposals, search.finished(earlier))
        nonlocal done
        done += len(taken)
        ran = (search.evaluator.sublayers - before) / len(taken)  # what they have in common ran once
        return [told(search, trial.params, found, ran) for trial, found in zip(taken, measured, strict=True)]

    objectives = tuple(map(str, search.question.settings.recorded))
    shared = study or SharedStudy(StudyStorage(InMemoryStorage(), "memory"), "search", {}, objectives)
    yield from map(search.trial, shared.run(ask, measure, trials, BATCH))


def asked(search: Search, sampler: BaseSampler, stored: Sequence[FrozenTrial], count: int) -> list[FrozenTrial]:
    """What a sampler tries next, at most so many trials, of which nothing is in any storage yet.

    The sampler is asked as by `Study.ask`, but in a study in memory that has the same trials: each trial then comes
    into its storage whole, and all that a sampler keeps in it comes along.

    Args:
        stored: trials that are finished, running or waiting.
    """
    study = optuna.create_study(directions=["minimize"] * len(search.question.settings.recorded), sampler=sampler)
    for trial in _penalised(stored) if isinstance(sampler, CmaEsSampler) else stored:
        if trial.params:
            study.add_trial(trial if trial.state in FINISHED else _running(trial))
    found = []
    for _ in range(count):
        study.ask(distributions(search, sampler))
        if isinstance(sampler, SurgerySampler) and sampler.is_exhausted:
            break
        trial = study.get_trials(deepcopy=False)[-1]
        source = {SOURCE: str(sampler).removesuffix("Sampler")} | trial.user_attrs
        trial.user_attrs = source | attributes(search.proposal(trial.params))
        found.append(trial)
    return found


def attributes(proposal: Proposal) -> dict[str, str]:
    """What a study's tools show of a trial beside its parameters."""
    return {PROGRAM: proposal.key, EDITS: "; ".join(map(str, proposal.choice))}


def told(search: Search, params: Mapping[str, Any], measured: MeasuredProgram, sublayers: float) -> Told:
    """What a study is told of a trial with such values of its parameters, for which so many sublayers ran."""
    proposal, as_text = search.proposal(params), json.dumps(measured.to_json())
    found = {MEASURED: as_text, SUBLAYERS: round(sublayers, 1)}  # readers of JSON do not agree on infinities and NaN
    constraints = search.constraints(proposal, measured)
    return Told(
        search.costs(proposal, measured), found, constraints, {} if measured.whole else _running_means(measured)
    )


def _penalised(stored: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """The trials for a sampler that knows no constraints: those that break some are worse than all others."""
    found = [copy(trial) for trial in stored]
    worst = max((trial.values[0] for trial in found if trial.values), default=0.0)
    for trial in found:
        broken = math.fsum(amount for amount in trial.constraints.values() if amount > 0)
        if trial.values and broken:
            trial.values = [worst + broken]
    return found


def _running(trial: FrozenTrial) -> FrozenTrial:
    return create_trial(
        state=TrialState.RUNNING,
        params=trial.params,
        distributions=trial.distributions,
        user_attrs=trial.user_attrs,
        system_attrs=trial.system_attrs,
    )


def _running_means(measured: MeasuredProgram) -> dict[int, float]:
    """The mean divergence of the windows so far, by their number, for some of the windows."""
    seen = len(measured.divergences)
    steps = sorted({max(1, round(seen * part / STEPS)) for part in range(1, STEPS + 1)})
    means = {step: math.fsum(measured.divergences[:step]) / step for step in steps}
    return {step: tellable(mean) for step, mean in means.items()}
