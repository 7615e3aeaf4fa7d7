"""What a search is asked: of which spaces, under which limits, by which objectives; and the goals that follow."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from surgeon.cost.hardware import Hardware
from surgeon.cost.predict import Deployment
from surgeon.cost.workload import Workload
from surgeon.language.operations.within import require_whole_layers
from surgeon.opened import Model
from surgeon.runtime.comm.link import parse_link
from surgeon.searches.front import pareto_front
from surgeon.searches.goals import Goal, Prices, at_the_edge, evenly
from surgeon.searches.limits import Limit, SearchBudget, parse_limits
from surgeon.searches.mixture import Mixture
from surgeon.searches.pricing import open_pricing
from surgeon.searches.quantities import ACCURACY, HERE, Aspect, parse_objectives
from surgeon.searches.reach import reach, require_reachable
from surgeon.searches.spaces import parse_spaces
from surgeon.searches.trial import MeasuredProgram, Proposal, Trial

DEPTH = Aspect("depth")
_BETWEEN_EQUALS = 1e-6  # weight of what decides between programs that cost the same
LEVELS = 10  # of a cost that is no depth, between the unedited model's and the least that can be reached


@dataclass(frozen=True)
class SearchSettings:
    """What is searched for, in a user's words; a study of one setting is not gone on with under another.

    Attributes:
        space: what may change, as `parse_spaces` takes it.
        budget: limits, as `parse_limits` takes them; None: how deep is the model really?
        objective: what is to be small, as `parse_objectives` takes it; of several, the best of every trade-off.
        ranks: tensor-parallel ranks, for tracks and whatever depends on them.
        batch: for times, texts computed together.
        prompt, new: for times, tokens of each prompt, and added to it; by default 1024 and 512, or a half and a quarter
            of the model's positions.
        link_delay: for times, how long a collective takes at least, such as 1ms.

    Raises:
        ValueError: if budget or objectives cannot be read; or if neither is of quality, as the answer would be what
            edits can destroy most.
    """

    space: str = "pair"
    budget: str | None = None
    objective: str = "divergence"
    ranks: int = 2
    batch: int = 1
    prompt: int | None = None
    new: int | None = None
    link_delay: str | None = None

    def __post_init__(self) -> None:
        if all(one.is_priced for one in self.objectives) and all(limit.aspect.is_priced for limit in self.limits):
            names = ",".join(map(str, self.objectives))
            raise ValueError(
                f"objective {names} asks for no quality, and a model that is destroyed has least of it; limit what may "
                f"be lost, as in the budget divergence<=0.02, or look for a front of the objectives divergence,{names}"
            )

    @cached_property
    def limits(self) -> tuple[Limit, ...]:
        """Of the budget."""
        return () if self.budget is None else parse_limits(self.budget)

    @cached_property
    def objectives(self) -> tuple[Aspect, ...]:
        """What is to be small."""
        return parse_objectives(self.objective)

    @property
    def recorded(self) -> tuple[Aspect, ...]:
        """What a study has of every trial: the objectives but those of which only the best are measured."""
        return tuple(one for one in self.objectives if one.name != ACCURACY) or (Aspect("divergence"),)

    @cached_property
    def along(self) -> Aspect | None:
        """The cost whose levels are looked along: one that is an objective, or depth where no program is limited."""
        costs = [objective for objective in self.objectives if objective.is_priced]
        if costs:
            return costs[0]
        return None if any(limit.aspect.is_priced for limit in self.limits) else DEPTH

    @property
    def aspects(self) -> tuple[Aspect, ...]:
        """The costs that have to be known, each once."""
        every = (*(limit.aspect for limit in self.limits), *self.objectives, *([self.along] if self.along else []))
        return tuple(dict.fromkeys(aspect for aspect in every if aspect.is_priced))

    @property
    def is_timed_here(self) -> bool:
        """Whether a cost is a time on this machine."""
        return any(aspect.on == HERE for aspect in self.aspects)

    def workload(self, positions: int) -> Workload:
        """What is asked of a model of so many positions."""
        prompt, new = self.prompt or min(1024, positions // 2), self.new or max(2, min(512, positions // 4))
        return Workload(self.batch, prompt, new)

    def mixture(self, model: Model) -> Mixture:
        """The spaces on a model, of which only the configuration has to be there.

        Raises:
            ValueError: if there is no such space, the model can have none of its edits, or it is an edited one.
        """
        if model.own is not None:
            try:
                require_whole_layers(model.own, model.num_layers)
            except ValueError as error:
                raise ValueError(
                    f"{model.label} is an edited model; search the one that it was made of ({error})"
                ) from error
        mixture = Mixture(parse_spaces(self.space, self.ranks), model, self.ranks)
        mixture.require_edits()
        return mixture

    def priced(self, mixture: Mixture, here: Hardware | None = None) -> SearchBudget:
        """The budget for a model, with warnings of what to know of it.

        Args:
            here: this machine, if a cost is a time on it.

        Raises:
            FileNotFoundError, ValueError: if there is no such hardware, the link's delay is no time, the model is
                within the budget already, the spaces do not bring it there, or lessen nothing of what is looked along.
        """
        model = mixture.model
        deployment = Deployment(self.ranks, emulated=parse_link(self.link_delay, None))
        pricing = open_pricing(model, self.aspects, deployment, self.workload(model.positions), here)
        for note in pricing.notes:
            warnings.warn(note, stacklevel=2)
        budget = SearchBudget(self.limits, pricing)
        if budget.of_programs:
            for note in budget.require_work():
                warnings.warn(note, stacklevel=2)
            require_reachable(budget, mixture)
        if self.along is not None and not levels_of(self.along, budget, mixture):
            raise ValueError(
                f"nothing of the space {self.space} lessens {self.along}, along which this search would look; add a "
                "space that does, or give a budget"
            )
        return budget


@dataclass(frozen=True)
class Question:
    """A search's question, and what follows from it: goals, what trials cost, and which of them win.

    Attributes:
        budget: of the settings' limits; its pricing knows `settings.aspects`.
        original: the unedited model's quality on the text.
    """

    settings: SearchSettings
    mixture: Mixture
    budget: SearchBudget
    original: MeasuredProgram

    @property
    def along(self) -> Aspect | None:
        """As `SearchSettings.along`."""
        return self.settings.along

    @property
    def objectives(self) -> tuple[Aspect, ...]:
        """What is to be small."""
        return self.settings.objectives

    @property
    def traded(self) -> tuple[Aspect, ...]:
        """What a front is of: the objectives, and the cost that is looked along."""
        return tuple(dict.fromkeys([*self.objectives, *([self.along] if self.along else [])]))

    @cached_property
    def goals(self) -> tuple[Goal, ...]:
        """One for the budget, or one for each level of what is looked along, the dearest first."""
        most = tuple(self.budget.most(limit) for limit in self.budget.of_programs)
        if self.along is None:
            return (Goal(most),)
        return tuple(Goal((*most, level), level) for level in levels_of(self.along, self.budget, self.mixture))

    @property
    def prices(self) -> Prices:
        """What programs cost, in the order of the goals' limits."""
        aspects = [*(limit.aspect for limit in self.budget.of_programs), *([self.along] if self.along else [])]
        return lambda program: tuple(self.budget.pricing.price(aspect, program) for aspect in aspects)

    def shared_out(self, goals: Sequence[Goal], trials: Sequence[Trial], total: int) -> list[int]:
        """How many of a round's trials each goal gets: evenly along a cost, or where quality ends if it is limited."""
        if self.along is None or not self.budget.of_quality:
            return evenly(goals, trials, total)
        good = {trial.proposal.level for trial in trials if not any(self.lacks_of_quality(trial.measured))}
        return at_the_edge(goals, good, total)

    def cost(self, trial: Trial) -> float:
        """What a single winner is chosen by, less is better; infinite for a trial that breaks the budget.

        By the first objective; where only quality is limited, by the cost that is looked along. Of equally dear ones
        by their divergence.
        """
        if not trial.measured.whole or not self.is_met(trial):
            return math.inf
        if self.along is None or not self.budget.of_quality:
            return self.costs(trial)[0]
        dense = self.budget.pricing.price(self.along, self.mixture.model.program)
        divergence = trial.measured.divergence
        return self.price(self.along, trial) / dense + _BETWEEN_EQUALS * divergence / (1 + divergence)

    def costs(self, trial: Trial) -> tuple[float, ...]:
        """The objectives of a trial, less is better."""
        return self.budget.pricing.costs(self.objectives, trial)

    def recorded_costs(self, proposal: Proposal, measured: MeasuredProgram) -> tuple[float, ...]:
        """What a study has of a proposal, in the order of `settings.recorded`."""
        return self.budget.pricing.costs(self.settings.recorded, Trial(0, proposal, measured))

    def price(self, aspect: Aspect, trial: Trial) -> float:
        """What a trial's program costs of one quantity."""
        return self.budget.pricing.price(aspect, trial.program)

    def lacks_of_quality(self, measured: MeasuredProgram) -> tuple[float, ...]:
        """As `SearchBudget.quality_shortfalls`."""
        return self.budget.quality_shortfalls(measured, self.original)

    def is_met(self, trial: Trial) -> bool:
        """Whether a trial is within all limits."""
        return not any(self.budget.shortfalls(trial.program)) and not any(self.lacks_of_quality(trial.measured))

    def best_in_words(self, trials: Collection[Trial]) -> str:
        """The best trial in a few words, or where there is no single one, how many are on the front."""
        if self.along is not None and not self.budget.of_quality:
            return f"{len(pareto_front([*trials], self.traded, self.budget.pricing))} on the front"
        best = min(trials, key=lambda trial: (self.cost(trial), trial.number), default=None)
        if best is None or math.isinf(self.cost(best)):
            return ""
        cost = f"{self.cost(best):.4g}" if self.along is None else self.along.show(self.price(self.along, best))
        return f"best {cost}"


def levels_of(cost: Aspect, budget: SearchBudget, mixture: Mixture) -> tuple[float, ...]:
    """Of a cost, between the unedited model's and the least that edits were found to bring it to, the dearest first.

    There are none where the edits do not lessen it: late steps keep the depth, say.
    """
    nothing = replace(budget, limits=(Limit(cost, 0.0, relative=False, text=f"{cost}=0"),))
    dense = budget.pricing.price(cost, mixture.model.program)
    least = budget.pricing.price(cost, reach(nothing, mixture).program)
    if cost == DEPTH:
        return tuple(map(float, range(math.ceil(dense) - 1, math.ceil(least) - 1, -1)))
    return tuple(dense - (dense - least) * step / LEVELS for step in range(1, LEVELS + 1)) if least < dense else ()
