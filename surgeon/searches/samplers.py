"""Samplers of Optuna for the edits of a search: ours, and Optuna's own on the same parameters and constraints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, CmaEsSampler, GPSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState

from surgeon.errors import did_you_mean
from surgeon.searches.question import SURGEON
from surgeon.searches.search import LEVEL, PROGRAM, SOURCE, Search
from surgeon.searches.trial import Proposal

CMAES = "cmaes"
POPULATION = 16  # of nsga2: searches have tens of trials, and Optuna's 50 would all be drawn at random


class SurgerySampler(BaseSampler):
    """Asks a search's proposer what a study is to try next.

    It goes by what each edit does alone, which is measured when it is first asked, and by the finished trials of the
    study, whoever chose them; those that are running count as tried. Nothing in it is random. When nothing is left to
    try it says the best trial's values again, and stops the study.

    Args:
        search: as `surgeon.SearchProblem` is one.

    Attributes:
        is_exhausted: whether nothing was left when it was asked last.
    """

    def __init__(self, search: Search) -> None:
        self.search = search
        self.is_exhausted = False
        self._others = RandomSampler(seed=0)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:  # noqa: ARG002
        return self.search.parameters.categories

    def sample_relative(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        search_space: dict[str, BaseDistribution],  # noqa: ARG002
    ) -> dict[str, Any]:
        with self.search.lock:
            stored = [one for one in study.get_trials(deepcopy=False) if one.number != trial.number]
            finished = self.search.finished(stored)
            # Of one that was asked for by somebody else just now the parameters are not there yet.
            open_ = [one for one in stored if not one.state.is_finished()]
            running = {one.user_attrs[PROGRAM] for one in open_ if PROGRAM in one.user_attrs}
            # Those who ask at this moment, and asked first, get what would be said first.
            asking = sum(PROGRAM not in one.user_attrs and one.number < trial.number for one in open_)
            proposal = self.search.next_proposal(finished, running, asking)
            self.is_exhausted = proposal is None
            if proposal is None:
                best = min(finished, key=lambda one: (one.measured.divergence, one.number), default=None)
                proposal = Proposal("", "", ()) if best is None else best.proposal
            for name, value in ((PROGRAM, proposal.key), (SOURCE, proposal.source), (LEVEL, proposal.level)):
                study._storage.set_trial_user_attr(trial._trial_id, name, value)  # as Optuna's samplers keep theirs
        return self.search.parameters.values(proposal.choice)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """A parameter that is none of the search's, at random."""
        return self._others.sample_independent(study, trial, param_name, param_distribution)

    def after_trial(
        self,
        study: optuna.Study,
        trial: FrozenTrial,  # noqa: ARG002
        state: TrialState,  # noqa: ARG002
        values: Sequence[float] | None,  # noqa: ARG002
    ) -> None:
        if self.is_exhausted and study._thread_local.in_optimize_loop:
            study.stop()


OTHERS: Mapping[str, Callable[[int], BaseSampler]] = {
    "tpe": lambda seed: TPESampler(seed=seed),
    "gp": lambda seed: GPSampler(seed=seed),
    CMAES: lambda seed: CmaEsSampler(seed=seed),
    "nsga2": lambda seed: NSGAIISampler(seed=seed, population_size=POPULATION),
    "random": lambda seed: RandomSampler(seed=seed),
}
SAMPLERS = (SURGEON, *OTHERS)


def make_sampler(search: Search, name: str, seed: int = 0) -> BaseSampler:
    """A sampler for the studies of a search.

    Raises:
        ValueError: if there is none of that name, or it is for one objective and the search has several.
        ImportError: if it needs a package that is not installed.
    """
    require_sampler(name, len(search.question.settings.recorded))
    if name == SURGEON:
        return SurgerySampler(search)
    return OTHERS[name](seed)


def require_sampler(name: str, objectives: int) -> None:
    """Refuse a sampler that cannot be had, as `make_sampler` does."""
    if name not in SAMPLERS:
        raise ValueError(f"unknown sampler {name!r}; {did_you_mean(name, SAMPLERS)}")
    if name == CMAES and find_spec("cmaes") is None:
        raise ImportError("the sampler cmaes needs a package that is not installed; pip install cmaes")
    if name == CMAES and objectives > 1:
        raise ValueError(
            f"the sampler cmaes makes one objective small, and this search has {objectives}; give a budget that limits "
            "a cost and one objective, or use another sampler"
        )
