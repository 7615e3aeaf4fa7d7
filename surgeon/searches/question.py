"""What a search is asked: of which spaces, under which limits, by which objectives; and the goals that follow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from surgeon.language.program import Program
from surgeon.searches.goals import Focus, Goal, Prices, at_the_edge, evenly
from surgeon.searches.limits import Limit, SearchBudget
from surgeon.searches.mixture import Mixture
from surgeon.searches.objectives import Objective
from surgeon.searches.quantities import Aspect
from surgeon.searches.reach import reach
from surgeon.searches.trial import MeasuredProgram, Trial

DEPTH = Aspect("depth")
_BETWEEN_EQUALS = 1e-6  # weight of what decides between programs that cost the same
LEVELS = 10  # of a cost that is no depth, between the unedited model's and the least that can be reached


@dataclass(frozen=True)
class Question:
    """A search's question, and what follows from it: goals, what trials cost, and which of them win.

    Attributes:
        budget: its pricing knows the costs among the objectives, and `along`, too.
        objectives: what is to be small; of several, the best of every trade-off are looked for.
        original: the unedited model's quality on the text.

    Raises:
        ValueError: as `require_quality`.
    """

    mixture: Mixture
    budget: SearchBudget
    objectives: tuple[Objective, ...]
    original: MeasuredProgram

    def __post_init__(self) -> None:
        require_quality(self.budget.limits, self.objectives)

    @property
    def along(self) -> Aspect | None:
        """The cost whose levels are looked along; None where limits say what to come down to."""
        return looked_along(self.budget.limits, self.objectives)

    @cached_property
    def goals(self) -> tuple[Goal, ...]:
        """One for the budget, or one for each level, the dearest first."""
        most = tuple(self.budget.most(limit) for limit in self.budget.of_programs)
        if self.along is None:
            return (Goal(most),)
        return tuple(Goal((*most, level), level) for level in self.levels)

    @cached_property
    def levels(self) -> tuple[float, ...]:
        """Of the cost that is looked along, below the unedited model's, the dearest first."""
        assert self.along is not None
        return levels_of(self.along, self.budget, self.mixture)

    @property
    def prices(self) -> Prices:
        """What programs cost, in the order of the goals' limits."""
        pricing, along = self.budget.pricing, self.along
        aspects = [limit.aspect for limit in self.budget.of_programs] + ([along] if along else [])
        return lambda program: tuple(pricing.price(aspect, program) for aspect in aspects)

    @property
    def focus(self) -> Focus:
        """Where trials go: along a cost evenly, or where quality ends if it is limited."""
        if self.along is None or not self.budget.of_quality:
            return evenly
        return at_the_edge(lambda measured: not any(self.budget.quality_shortfalls(measured, self.original)))

    def cost(self, trial: Trial) -> float:
        """What a single winner is chosen by, less is better; infinite for a trial that breaks the budget.

        By the first objective; where only quality is limited, by the cost that is looked along. Of equally dear ones
        by their divergence.
        """
        if not trial.measured.whole or not self.is_met(trial):
            return math.inf
        if self.along is None or not self.budget.of_quality:
            return self.values(trial)[0]
        dense = self.budget.pricing.price(self.along, self.mixture.model.dense)
        divergence = trial.measured.divergence
        return self.price(self.along, trial) / dense + _BETWEEN_EQUALS * divergence / (1 + divergence)

    def price(self, aspect: Aspect, trial: Trial) -> float:
        """What a trial's program costs of one quantity."""
        return self.budget.pricing.price(aspect, Program.parse(trial.proposal.key))

    def is_met(self, trial: Trial) -> bool:
        """Whether a trial is within all limits."""
        return self.budget.meets(Program.parse(trial.proposal.key), trial.measured, self.original)

    @property
    def traded(self) -> tuple[Objective, ...]:
        """What a front is of: the objectives, and the cost that is looked along."""
        along = self.along
        known = along is None or any(objective.aspect == along for objective in self.objectives)
        return self.objectives if known else (*self.objectives, Objective(along))

    def told(self, key: str, measured: MeasuredProgram) -> tuple[float, ...]:
        """The values of `told_names` for a program's text and what was measured of it."""
        known = told(self.objectives)
        program = Program.parse(key)
        return tuple(objective.cost(program, measured, self.budget.pricing) for objective in known)

    def values(self, trial: Trial) -> tuple[float, ...]:
        """The objectives of a trial, less is better."""
        return tuple(objective.of(trial, self.budget.pricing) for objective in self.objectives)


def require_quality(limits: Sequence[Limit], objectives: Sequence[Objective]) -> None:
    """Refuse a question to which the answer is what edits can destroy most.

    Raises:
        ValueError: if neither an objective nor a limit is of quality; it says how one is asked for.
    """
    if all(one.is_priced for one in objectives) and not any(limit.aspect.quantity.measured for limit in limits):
        names = ",".join(map(str, objectives))
        raise ValueError(
            f"objective {names} asks for no quality, and a model that is destroyed has least of it; limit what may be "
            f"lost, as in --budget 'divergence<=0.02', or look for a front with --objective divergence,{names}"
        )


def told(objectives: Sequence[Objective]) -> tuple[Objective, ...]:
    """What a study is told of every trial: the objectives but those of which only the best are measured."""
    known = tuple(objective for objective in objectives if not objective.is_of_few)
    return known or (Objective(Aspect("divergence")),)


def told_names(objectives: Sequence[Objective]) -> tuple[str, ...]:
    """Their names."""
    return tuple(map(str, told(objectives)))


def levels_of(cost: Aspect, budget: SearchBudget, mixture: Mixture) -> tuple[float, ...]:
    """Of a cost, between the unedited model's and the least that edits were found to bring it to, the dearest first.

    There are none where the edits do not lessen it: late steps keep the depth, say.
    """
    nothing = replace(budget, limits=(Limit(cost, 0.0, relative=False, text=f"{cost}=0"),))
    dense = budget.pricing.price(cost, mixture.model.dense)
    least = budget.pricing.price(cost, reach(nothing, mixture).program)
    if cost == DEPTH:
        return tuple(map(float, range(math.ceil(dense) - 1, math.ceil(least) - 1, -1)))
    return tuple(dense - (dense - least) * step / LEVELS for step in range(1, LEVELS + 1)) if least < dense else ()


def looked_along(limits: Sequence[Limit], objectives: Sequence[Objective]) -> Aspect | None:
    """The cost whose levels are looked along: one that is an objective, or depth where no program is limited."""
    costs = [objective.aspect for objective in objectives if objective.aspect is not None and objective.is_priced]
    if costs:
        return costs[0]
    return None if any(not limit.aspect.quantity.measured for limit in limits) else DEPTH
