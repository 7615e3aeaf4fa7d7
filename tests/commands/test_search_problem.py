"""A search as an objective and a space of Optuna's, on a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest

import surgeon
from surgeon.commands.search_problem import SearchProblem
from surgeon.findings.result import RunResult

TEXT: dict[str, Any] = {"tokens": 128, "window": 32}


@pytest.fixture(autouse=True)
def _without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunResult, "draw", lambda *_: [])


@pytest.fixture
def problem(tiny_checkpoint: Path, tiny_text: Path) -> SearchProblem:
    return surgeon.SearchProblem(
        tiny_checkpoint, tiny_text, space="pair,drop:layers", budget="depth=2", **TEXT
    )


def test_a_notebook_finds_what_the_command_finds(
    problem: SearchProblem, tiny_text: Path, tmp_path: Path
) -> None:
    study = optuna.create_study(directions=problem.directions, sampler=problem.sampler())
    assert isinstance(study.sampler, surgeon.SurgerySampler)
    study.optimize(problem.objective, n_trials=100)  # fewer: all are tried
    found = surgeon.search(
        problem.opened.folder,
        tiny_text,
        tmp_path,
        space="pair,drop:layers",
        budget="depth=2",
        holdout=0,
        **TEXT,
    )
    assert str(problem.program(study.best_trial)) == str(found.program)
    assert study.best_value == pytest.approx(found.winner.trial.measured.divergence, rel=1e-5)
    assert {trial.user_attrs["program"] for trial in study.trials} == {*found.trials["program"]}
    recipe = problem.recipe(study.best_trial)
    assert recipe.to_yaml() == found.recipe.to_yaml()
    assert str(recipe.program(4)) == study.best_trial.user_attrs["program"]


@pytest.mark.parametrize("name", ["tpe", "nsga2", "random"])
def test_others_search_the_same_space_with_the_same_limits(problem: SearchProblem, name: str) -> None:
    study = optuna.create_study(directions=problem.directions, sampler=problem.sampler(name, seed=1))
    study.optimize(problem.objective, n_trials=6)
    for trial in study.trials:
        assert trial.params.keys() == problem.search_space.keys()
        depth = problem.program(trial).effective_depth()
        assert trial.constraints == {"depth=2": max(0.0, (depth - 2) / (4 - 2))}


def test_several_objectives(tiny_checkpoint: Path, tiny_text: Path) -> None:
    problem = surgeon.SearchProblem(tiny_checkpoint, tiny_text, space="pair", **TEXT)
    assert problem.metric_names == ["divergence", "depth"]
    study = optuna.create_study(directions=problem.directions, sampler=problem.sampler())
    study.optimize(problem.objective, n_trials=4, n_jobs=2)  # threads take turns with the model
    assert {trial.values[1] for trial in study.trials} == {3.0, 2.0}
    for trial in study.trials:
        program = problem.program(trial)
        assert trial.values[0] == pytest.approx(problem.evaluator.measure([program])[program].divergence)
    with pytest.raises(ValueError, match="time on this machine"):
        surgeon.SearchProblem(tiny_checkpoint, tiny_text, budget="latency=1ms@here", **TEXT)


def test_a_notebook_goes_on_with_the_study_of_a_command_and_the_command_with_that(
    problem: SearchProblem, tiny_text: Path, tmp_path: Path
) -> None:
    def searched(trials: int) -> list[str]:
        options: dict[str, Any] = {
            "space": "pair,drop:layers",
            "budget": "depth=2",
            "holdout": 0,
            **TEXT,
        }
        return [
            *surgeon.search(problem.opened.folder, tiny_text, tmp_path, trials, **options).trials[
                "program"
            ]
        ]

    first = searched(3)
    file = optuna.storages.journal.JournalFileBackend(str(tmp_path / "study.log"))
    storage = optuna.storages.JournalStorage(file)
    study = optuna.load_study(study_name="search", storage=storage, sampler=problem.sampler())
    study.optimize(problem.objective, n_trials=2)
    every = searched(6)
    assert every[:3] == first
    assert every[3:5] == [trial.user_attrs["program"] for trial in study.trials[3:5]]
    assert len({*every}) == 6


def test_what_passes_have_found_is_not_measured_again(
    tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path
) -> None:
    text: dict[str, Any] = {"tokens": 256, "window": 32}
    scan = surgeon.scan(tiny_checkpoint, tiny_text, tmp_path / "scan", operations=["lp"], **text)

    def tried(**more: Any) -> tuple[float, dict[str, float]]:
        problem = surgeon.SearchProblem(
            tiny_checkpoint, tiny_text, space="pair", budget="depth=3", **more, **text
        )
        study = optuna.create_study(directions=problem.directions, sampler=problem.sampler())
        study.optimize(problem.objective, n_trials=5)
        return problem.evaluator.sublayers, {
            one.user_attrs["program"]: one.values[0] for one in study.trials
        }

    (alone, measured), (fed, known) = tried(), tried(using=scan, output=tmp_path / "out")
    assert fed < alone
    assert len(measured) == 3
    assert known == pytest.approx(measured, rel=1e-5)


def test_factors_of_a_spectrum(tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path) -> None:
    """They are made, and measured, as for `surgeon.search`."""
    more: dict[str, Any] = {"ranks": "1/4,1/2", "layers": "1:3", "calibration_tokens": 128}
    using = [surgeon.spectrum(tiny_checkpoint, tiny_text, tmp_path / "spectrum", **more, **TEXT)]
    asked: dict[str, Any] = {"space": "rank", "budget": "params=0.95x", "using": using, **TEXT}
    problem = surgeon.SearchProblem(tiny_checkpoint, tiny_text, **asked)
    study = optuna.create_study(directions=problem.directions, sampler=problem.sampler())
    study.optimize(problem.objective, n_trials=3)
    found = surgeon.search(tiny_checkpoint, tiny_text, tmp_path / "found", trials=3, holdout=0, **asked)
    assert [one.values[0] for one in study.trials] == pytest.approx(
        [*found.trials["divergence"]], rel=1e-5
    )
    assert problem.recipe(study.best_trial).to_yaml() == found.recipe.to_yaml()
