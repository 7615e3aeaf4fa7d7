"""Samplers on a made-up search, in studies of Optuna as a notebook runs them."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import optuna
import optuna.terminator
import pytest
from optuna.trial import FrozenTrial, TrialState

from surgeon.searches.samplers import SAMPLERS, SurgerySampler, make_sampler
from surgeon.searches.search import Search
from tests.searches.made_up_search import search, try_programs

INSTALLED = [name for name in SAMPLERS if name != "cmaes" or find_spec("cmaes")]


def study_of(searching: Search, **options: Any) -> optuna.Study:
    directions = ["minimize"] * len(searching.question.settings.recorded)
    return optuna.create_study(directions=directions, sampler=SurgerySampler(searching), **options)


def keys(searching: Search, trials: Sequence[FrozenTrial]) -> list[str]:
    return [searching.proposal(trial.params).key for trial in trials]


def test_a_study_that_is_optimised_finds_what_a_search_finds() -> None:
    searching, _ = search("pair,drop:layers", "depth=7")
    study = study_of(searching)
    study.optimize(searching.objective, n_trials=30)
    assert len({*keys(searching, study.trials)}) == 30
    other, _ = search("pair,drop:layers", "depth=7")
    assert study.best_value == pytest.approx(min(trial.measured.divergence for trial in try_programs(other, 30)))
    assert searching.question.mixture.program(searching.parameters.choice(study.best_params)).effective_depth() <= 7
    for evaluator in (optuna.importance.PedAnovaImportanceEvaluator(), optuna.importance.FanovaImportanceEvaluator()):
        assert {*optuna.importance.get_param_importances(study, evaluator=evaluator)} <= {*searching.parameters.edits}


def test_ask_and_tell_with_several_running_at_once() -> None:
    searching, _ = search("pair", "depth=7")
    study, measured = study_of(searching), searching.objective
    waiting = [study.ask(searching.parameters.categories) for _ in range(12)]
    assert len({*keys(searching, [trial._cached_frozen_trial for trial in waiting])}) == 12
    for trial in waiting[::2]:
        study.tell(trial, measured(trial))
    study.tell(waiting[1], state=TrialState.FAIL)
    more = [study.ask(searching.parameters.categories) for _ in range(6)]
    known = {*keys(searching, [t for t in study.trials if t.state != TrialState.FAIL])}
    assert len(known) == 17
    assert len({*keys(searching, [trial._cached_frozen_trial for trial in more])}) == 6


@pytest.mark.parametrize("storage", ["memory", "journal", "sqlite"])
def test_studies_in_every_storage_of_which_threads_and_later_sessions_go_on(storage: str, tmp_path: Path) -> None:
    backends = {
        "memory": optuna.storages.InMemoryStorage,
        "journal": lambda: optuna.storages.journal.JournalStorage(
            optuna.storages.journal.JournalFileBackend(str(tmp_path / "log"))
        ),
        "sqlite": lambda: f"sqlite:///{tmp_path}/study.db",
    }
    searching, _ = search("pair", "depth=7")
    study = study_of(searching, storage=backends[storage](), study_name="search")
    study.optimize(searching.objective, n_trials=6)
    if storage == "memory":
        study.optimize(searching.objective, n_trials=6, n_jobs=2)
    else:
        again, _ = search("pair", "depth=7")
        loaded = optuna.load_study(study_name="search", storage=backends[storage](), sampler=SurgerySampler(again))
        loaded.optimize(again.objective, n_trials=6)
    found = optuna.load_study(study_name="search", storage=study._storage).trials
    assert len(found) == 12
    assert len({*keys(searching, found)}) == 12 or storage == "memory"


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::optuna.exceptions.ExperimentalWarning")
def test_several_objectives_give_a_front_and_a_terminator_ends_a_study() -> None:
    searching, _ = search("pair", None)
    study = study_of(searching)
    study.optimize(searching.objective, n_trials=30)
    assert {trial.values[1] for trial in study.best_trials} >= {9.0, 8.0, 7.0, 6.0, 5.0}
    single, _ = search("pair", "depth=7")
    study = study_of(single)
    terminator = optuna.terminator.Terminator(
        improvement_evaluator=optuna.terminator.BestValueStagnationEvaluator(5),
        error_evaluator=optuna.terminator.StaticErrorEvaluator(0),
        min_n_trials=8,
    )
    callback = optuna.terminator.TerminatorCallback(terminator)
    study.optimize(single.objective, n_trials=60, callbacks=[callback])
    assert 8 <= len(study.trials) < 60


def test_trials_that_others_chose_and_measured_are_learnt_from() -> None:
    searching, _ = search("pair", "depth=7")
    study = study_of(searching)
    best = min(
        (trial for trial in try_programs(search("pair", "depth=7")[0], 40)), key=lambda trial: trial.measured.divergence
    )
    study.enqueue_trial(searching.parameters.values(best.proposal.choice))
    study.optimize(searching.objective, n_trials=8)
    assert study.best_trial.number == 0
    assert len({*keys(searching, study.trials)}) == 8
    broken = searching.trial(study.trials[0], 0)
    assert broken.measured.divergence == study.trials[0].value


def test_a_space_that_is_tried_out_stops_the_study() -> None:
    searching, _ = search("pair", "depth=9")
    study = study_of(searching)
    study.optimize(searching.objective, n_trials=200)
    other, _ = search("pair", "depth=9")
    assert len({*keys(searching, study.trials)}) == len([*try_programs(other, 200)]) == len(study.trials) - 1 < 199


@pytest.mark.parametrize("name", INSTALLED)
def test_every_sampler_runs_and_what_it_asks_follows_from_the_study(name: str) -> None:
    trials = 12 if name == "gp" else 24
    found = []
    for _ in range(2):
        searching, _ = search("pair,drop:layers", "depth=7")
        found.append([(trial.number, trial.proposal) for trial in try_programs(searching, trials, name, seed=3)])
    assert found[0] == found[1]
    assert [number for number, _ in found[0]] == list(range(trials))
    assert {proposal.source for _, proposal in found[0]} & {"TPE", "GP", "CmaEs", "NSGAII", "Random", "regression"}
    if name not in ("surgeon", "gp"):
        searching, _ = search("pair,drop:layers", "depth=7")
        other = [trial.proposal.key for trial in try_programs(searching, trials, name, seed=4)]
        assert other != [proposal.key for _, proposal in found[0]]


@pytest.mark.skipif("cmaes" not in INSTALLED, reason="cmaes is not installed")
def test_what_breaks_limits_is_worse_than_all_others_to_a_sampler_without_constraints() -> None:
    searching, _ = search("pair,drop:layers", "depth=7")
    within = [searching.question.is_met(trial) for trial in try_programs(searching, 60, "cmaes")]
    assert sum(within[30:]) > 15


def test_workers_that_ask_at_the_same_moment_ask_for_different_trials() -> None:
    """Others have begun a trial each of which nothing is said yet."""
    searching, _ = search("pair,drop:layers", "depth=7")
    asked: list[str] = []
    for others in range(4):
        study = optuna.create_study(sampler=SurgerySampler(searching))
        for _ in range(others):
            study._storage.create_new_trial(study._study_id)
        asked += keys(searching, [study.ask(searching.parameters.categories)._cached_frozen_trial])
    assert len({*asked}) == 4


def test_samplers_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    searching, _ = search("pair", "depth=7")
    with pytest.raises(ValueError, match="unknown sampler 'tp'; did you mean 'tpe'"):
        make_sampler(searching, "tp")
    monkeypatch.setattr("surgeon.searches.samplers.find_spec", lambda _: object())
    several, _ = search("pair", None)
    with pytest.raises(ValueError, match="cmaes makes one objective small, and this search has 2"):
        make_sampler(several, "cmaes")
    monkeypatch.setattr("surgeon.searches.samplers.find_spec", lambda _: None)
    with pytest.raises(ImportError, match="the sampler cmaes needs a package that is not installed; pip install cmaes"):
        make_sampler(searching, "cmaes")


def test_trials_of_another_objective_and_threads_that_ask_at_once() -> None:
    """A user's own objective says one number; nothing else is known of the trials."""
    searching, _ = search("pair", "depth=7")
    study = study_of(searching)
    names = searching.parameters.categories

    def own() -> None:
        for _ in range(5):
            trial = study.ask(names)
            study.tell(trial, math.sqrt(sum(value != "" for value in trial.params.values())))

    threads = [threading.Thread(target=own) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(study.trials) == 10
