"""`surgeon.SearchProblem`: a search's question for a study of Optuna that a notebook runs."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Unpack

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial

from surgeon.commands.search import ProblemFlags, read_question
from surgeon.language.program import Program
from surgeon.language.recipe import Recipe
from surgeon.opened import Model
from surgeon.searches.question import SURGEON, open_question
from surgeon.searches.search import Search, SearchSetup, make_sampler


class SearchProblem(Search):
    """An objective and a space of Optuna's, of a search's question.

        problem = surgeon.SearchProblem("demo", "demo", budget="depth=12")
        study = optuna.create_study(directions=problem.directions, sampler=problem.sampler())
        study.optimize(problem.objective, n_trials=30)
        problem.recipe(study.best_trial)

    Limits of the budget are constraints. Parameters are tried as far as their edits go together (`Mixture.choice`).
    Every trial has its program and its edits among its attributes.

    Args:
        model: a folder, a hub name, "demo", or a model that is open.
        data: a text file, a table or a dataset, or "demo"; by default that, with a warning.
        output: folder for factors and the original's predictions; by default a temporary one.
        asked: space, budget, objective, tokens, using and others, as `surgeon.search` takes them.

    Raises:
        FileNotFoundError, ValueError: if model or text cannot be used, or what is asked for cannot be had.
        OSError: if the folder cannot be written to.
    """

    def __init__(
        self,
        model: str | Path | Model,
        data: str | Path | None = None,
        output: str | Path | None = None,
        **asked: Unpack[ProblemFlags],
    ) -> None:
        question = read_question({**asked, "data": data})
        if question.is_timed_here:
            raise ValueError(
                "time on this machine (@here) is calibrated by surgeon.search; name a hardware file here"
            )
        _, question, pricing = open_question(model, question)
        if output is None:
            self._folder = tempfile.TemporaryDirectory(prefix="search-")  # gone with the problem
            output = self._folder.name
        setup = SearchSetup.load(model, question, pricing, Path(output))
        evaluator = setup.evaluator
        priced = setup.question(evaluator.measure([evaluator.dense])[evaluator.dense])
        super().__init__(priced, evaluator, known=setup.known)
        self.opened = setup.subject.opened

    @property
    def directions(self) -> list[str]:
        """Directions of a study: all objectives are minimised."""
        return ["minimize"] * len(self.metric_names)

    @property
    def metric_names(self) -> list[str]:
        """Names of the objective's values."""
        return [str(aspect) for aspect in self.question.settings.recorded_aspects]

    @property
    def search_space(self) -> dict[str, BaseDistribution]:
        """By parameter, one of each space and layer: none ("") or one of the edits that begin there."""
        return self.question.mixture.categories

    def sampler(self, name: str = SURGEON, seed: int = 0) -> BaseSampler:
        """A sampler for this problem's studies: "surgeon", "tpe", "gp", "nsga2" or "random".

        Raises:
            ValueError: if there is none of that name.
        """
        return make_sampler(self, name, seed)

    def program(self, trial: FrozenTrial | optuna.Trial) -> Program:
        """The program of a trial of this problem."""
        return Program.parse(self.proposal(trial.params).key)

    def recipe(self, trial: FrozenTrial | optuna.Trial) -> Recipe:
        choice = self.proposal(trial.params).choice
        return self.question.mixture.recipe(choice, self.opened.reference, self.opened.hash)
