"""A search in a study in memory, as scripts run it."""

from __future__ import annotations

import optuna

from surgeon.searches.mixture import Trial
from surgeon.searches.question import SURGEON
from surgeon.searches.search import Search, make_sampler
from surgeon.searches.study import counted, run_trials


def try_programs(search: Search, trials: int) -> list[Trial]:
    """Try so many programs."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    directions = ["minimize"] * len(search.question.settings.recorded)
    study = optuna.create_study(directions=directions, sampler=make_sampler(search, SURGEON))
    run_trials(study, search.objective, trials, None, lambda _: None)
    return search.finished(counted(study))
