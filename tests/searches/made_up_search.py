"""A whole search of a made-up model whose programs' damage is known: no weights, no text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import optuna

from surgeon.cost.deployment import Deployment
from surgeon.language.operations.applied import Edit
from surgeon.language.program import Program
from surgeon.opened import Model
from surgeon.quality.summary import Quality
from surgeon.searches.evaluate import Terms
from surgeon.searches.mixture import Proposal, Trial
from surgeon.searches.pricing import Pricing
from surgeon.searches.question import SURGEON, PricedQuestion, Question
from surgeon.searches.search import Search, make_sampler
from surgeon.searches.study import list_trials, run_trials
from tests.tiny_models import tiny_model

LAYERS, WINDOWS = 10, 4


def damage(choice: Sequence[Edit]) -> float:
    """Every edit costs something of its own, later layers less; two side by side cost more than their sum."""
    alone = sum(
        0.02 * (LAYERS - edit.first) * len(edit.layers) / (3 if edit.space == "ladder" else 1)
        for edit in choice
    )
    return alone + sum(0.03 for one, other in pairwise(sorted(choice)) if other.first == one.stop)


class MadeUpEvaluator:
    """Knows the damage of every choice by its program's text; remembers whom programs were raced against."""

    def __init__(self) -> None:
        self.known: dict[str, float] = {}
        self.raced: list[float | None] = []
        self.sublayers = 0.0

    def measure(
        self, programs: Sequence[Program], best: Quality | None = None
    ) -> Mapping[Program, Quality]:
        self.raced.append(None if best is None else best.divergence)
        return {program: self.measured(self.known[str(program)]) for program in programs}

    def measured(self, value: float) -> Quality:
        windows = tuple(value * (1 + 0.1 * (number - 1.5)) for number in range(WINDOWS))
        return Quality(
            math.exp(2 + value),
            divergence=value,
            tokens=100,
            windows={"nll": tuple(2 + w for w in windows), "divergence": windows},
        )


class MadeUpSearch(Search):
    """A search that tells its evaluator what its proposals will cost."""

    def proposal(
        self, values: Mapping[str, Any], attributes: Mapping[str, Any] | None = None
    ) -> Proposal:
        found = super().proposal(values, attributes)
        made: Any = self.evaluator
        made.known[found.key] = damage(found.choice)
        return found


def try_programs(searching: Search, trials: int, sampler: str = SURGEON, seed: int = 0) -> list[Trial]:
    """Run a search in a study in memory."""
    directions = ["minimize"] * len(searching.question.settings.recorded_aspects)
    study = optuna.create_study(directions=directions, sampler=make_sampler(searching, sampler, seed))
    run_trials(study, searching.objective, trials, None, lambda _: None)
    return searching.finished_trials(list_trials(study))


def search(spaces: str, budget: str | None, objectives: str = "divergence") -> tuple[Search, Any]:
    model = Model.of_config(tiny_model("llama", num_layers=LAYERS).config, "tiny")
    settings, evaluator = Question(spaces, budget, objectives), MadeUpEvaluator()
    mixture = settings.mixture(model)
    pricing = Pricing(model, settings.aspects, Deployment(2))
    question = PricedQuestion(settings, mixture, pricing, evaluator.measured(0.0))
    alone = np.array([damage([edit]) for edit in mixture.edits])
    made: Any = evaluator
    return MadeUpSearch(question, made, Terms(alone, np.eye(len(alone)))), evaluator
