"""Searches in studies in memory, as scripts run them, and what those of one model share."""

from __future__ import annotations

from dataclasses import dataclass

import optuna

from surgeon.analysis.subject import Subject, most_important
from surgeon.quality.summary import Quality
from surgeon.searches.evaluate import Evaluator, Terms, TermsPlan, measure_terms
from surgeon.searches.mixture import Mixture, Trial
from surgeon.searches.pricing import Pricing
from surgeon.searches.question import SURGEON, PricedQuestion, Question
from surgeon.searches.search import Search, make_sampler
from surgeon.searches.spaces import parse_spaces
from surgeon.searches.study import list_trials, run_trials


@dataclass(frozen=True)
class Known:
    """A model's edits, each measured alone, and the model itself."""

    mixture: Mixture
    terms: Terms
    evaluator: Evaluator
    original: Quality

    @classmethod
    def of(cls, subject: Subject, spaces: str) -> Known:
        """Measure the edits of some spaces."""
        mixture = Mixture(parse_spaces(spaces), subject.opened)
        factors = most_important(subject.model, mixture.single_edits, subject.windows)
        evaluator = Evaluator(subject.model, subject.windows, factors=factors)
        terms = measure_terms(evaluator, TermsPlan.whole(mixture))
        dense = mixture.model.program
        return cls(mixture, terms, evaluator, evaluator.measure([dense])[dense])

    def search(
        self, spaces: str, budget: str, pricing: Pricing, trials: int
    ) -> tuple[PricedQuestion, list[Trial]]:
        """Try so many programs of some of the spaces, as `surgeon search` does."""
        mixture = Mixture(parse_spaces(spaces), self.mixture.model)
        numbers = {edit: number for number, edit in enumerate(self.mixture.edits)}
        terms = self.terms.select([numbers[edit] for edit in mixture.edits])
        question = PricedQuestion(Question(spaces, budget), mixture, pricing, self.original)
        search = Search(question, self.evaluator, terms)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        directions = ["minimize"] * len(question.settings.recorded_aspects)
        study = optuna.create_study(directions=directions, sampler=make_sampler(search, SURGEON))
        run_trials(study, search.objective, trials, None, lambda _: None)
        return question, search.finished_trials(list_trials(study))
