"""What a search is asked: of which spaces, under which limits, by which objectives; and the goals that follow."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from surgeon.cost.drafts import DraftedPrediction
from surgeon.cost.hardware import Hardware
from surgeon.cost.predict import Deployment
from surgeon.cost.workload import Workload
from surgeon.language.program import Program
from surgeon.opened import Model
from surgeon.quality.head import GREEDY, SAMPLED
from surgeon.runtime.comm.link import parse_link
from surgeon.searches.drafting import DraftObstacles, drafted, promised, valued
from surgeon.searches.front import FrontPoint, pareto_front
from surgeon.searches.goals import ANY, Goal, Prices, at_the_edge, evenly, near_the_best
from surgeon.searches.limits import Limit, SearchBudget, parse_limits
from surgeon.searches.mixture import Mixture
from surgeon.searches.pricing import Pricing, open_pricing
from surgeon.searches.quantities import ACCURACY, DRAFT, DRAFT_PASS, HERE, Aspect, parse_objectives
from surgeon.searches.reach import reach, require_reachable
from surgeon.searches.spaces import DEEPER, Space, parse_spaces, usual_spaces
from surgeon.searches.trial import MeasuredProgram, Proposal, Trial

DEPTH, SIZE = Aspect("depth"), Aspect("size")
_BETWEEN_EQUALS = 1e-6  # weight of what decides between programs that cost the same
LEVELS = 10  # of a cost that is no depth, between the unedited model's and the least that can be reached
_SLOWEST_DRAFT = 0.8  # of a pass of the model: as long as one of a draft may take, where others are faster
_TO_LIMIT = 4  # of them, where the cost is limited: as far as the limit
_NEAR = 1e-9  # in parts of a cost: what sums round
_LITTLE = 0.01  # in parts of a cost: a space that saves less is not searched unless it is named


@dataclass(frozen=True)
class SearchSettings:
    """What is searched for, in a user's words; a study of one setting is not gone on with under another.

    Attributes:
        space: what may change, as `parse_spaces` takes it; None: all that lessens what is asked for (`on`).
        budget: limits, as `parse_limits` takes them; None: how deep is the model really, and how large?
        objective: what is to be small, as `parse_objectives` takes it; of several, the best of every trade-off. With
            costs alone, and no limit of quality, it is their trade-off with divergence. A draft is looked for alone.
        ranks: tensor-parallel ranks, for tracks and whatever depends on them.
        batch: for times, texts computed together.
        prompt, new: for times, tokens of each prompt, and added to it; by default 1024 and 512, or a half and a quarter
            of the model's positions.
        link_delay: for times, how long a collective takes at least, such as 1ms.
        sampled_acceptance: measure that of every program, too; a draft is looked for by it.

    Raises:
        ValueError: if budget or objectives cannot be read, or do not go together.
    """

    space: str | None = None
    budget: str | None = None
    objective: str = "divergence"
    ranks: int = 2
    batch: int = 1
    prompt: int | None = None
    new: int | None = None
    link_delay: str | None = None
    sampled_acceptance: bool = False

    def __post_init__(self) -> None:
        if self.draft is not None:
            if len(self.objectives) > 1:
                raise ValueError(f"objective {self.objective!r}: a {DRAFT} is looked for alone; leave the others out")
            of_quality = [limit for limit in self.limits if not limit.aspect.is_priced]
            if of_quality:
                raise ValueError(
                    f"budget {of_quality[0]}: drafts cost no quality, as the model verifies them; leave it out"
                )
        _ = self.limits

    @property
    def identity(self) -> dict[str, Any]:
        """All of them, as JSON values, but for what is not asked for: older studies do not know of it."""
        return {name: value for name, value in asdict(self).items() if value is not False}

    def on(self, model: Model) -> SearchSettings:
        """These settings with their spaces named: of the usual ones, those that the model can have edits of."""
        if self.space is not None:
            return self
        usual = usual_spaces({DEEPER if aspect.deep else aspect.name for aspect in self.aspects})
        obstacle = self._obstacle(model)
        spaces = {name: Mixture(parse_spaces(name, self.ranks), model, self.ranks, obstacle) for name in usual}
        if self.is_timed_here:  # which has to be measured first
            able = [name for name, mixture in spaces.items() if mixture.edits]
        else:
            pricing = self.pricing(model)
            able = [name for name, mixture in spaces.items() if _saves(mixture, pricing)]
        return replace(self, space=",".join(able or usual))

    @cached_property
    def limits(self) -> tuple[Limit, ...]:
        """Of the budget."""
        return () if self.budget is None else parse_limits(self.budget)

    @cached_property
    def objectives(self) -> tuple[Aspect, ...]:
        """What is to be small."""
        found = parse_objectives(self.objective)
        # A model that is destroyed has least of every cost.
        is_of_quality = any(not aspect.is_priced for aspect in (*found, *(limit.aspect for limit in self.limits)))
        return found if is_of_quality else (Aspect("divergence"), *found)

    @cached_property
    def draft(self) -> Aspect | None:
        """The objective that programs are to draft for the unedited model, if that is asked for."""
        return next((objective for objective in self.objectives if objective.name == DRAFT), None)

    @property
    def acceptance(self) -> str:
        """By which acceptance drafts are looked for."""
        return SAMPLED if self.sampled_acceptance else GREEDY

    @property
    def recorded(self) -> tuple[Aspect, ...]:
        """What a study has of every trial: the objectives, but those measured of the best only, and `along`."""
        if self.draft is not None:
            return self.objectives
        measured = tuple(one for one in self.objectives if one.name != ACCURACY) or (Aspect("divergence"),)
        return tuple(dict.fromkeys([*measured, *self.along]))

    @cached_property
    def along(self) -> tuple[Aspect, ...]:
        """The costs whose levels are to be looked along, as far as edits lessen them.

        Of drafts the time of a pass. Else one that is an objective; between limits of both a cost and quality, that
        cost; where no cost is limited, depth, and without a budget size, too, which edits may lessen that keep the
        depth.
        """
        if self.draft is not None:
            return (Aspect(DRAFT_PASS, self.draft.on),)
        costs = [objective for objective in self.objectives if objective.is_priced]
        if costs:
            return (costs[0],)
        limited = [limit.aspect for limit in self.limits if limit.aspect.is_priced]
        if limited:
            return (limited[0],) if self.is_between_limits else ()
        spaces = [] if self.space is None else parse_spaces(self.space)
        smaller = not spaces or any("size" in each.serves and "depth" not in each.serves for each in spaces)
        return (DEPTH, SIZE) if smaller and not self.limits else (DEPTH,)

    @property
    def is_between_limits(self) -> bool:
        """Whether both a cost and quality are limited and no cost is to be small: what is best lies between the two."""
        kinds = {limit.aspect.is_priced for limit in self.limits}
        return kinds == {True, False} and not any(objective.is_priced for objective in self.objectives)

    @property
    def aspects(self) -> tuple[Aspect, ...]:
        """The costs that have to be known, each once."""
        every = (*(limit.aspect for limit in self.limits), *self.objectives, *self.along)
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
        assert self.space is not None, "`on` names the spaces"
        spaces, stored = parse_spaces(self.space, self.ranks), model.in_turn
        mixture = Mixture(spaces, stored, self.ranks, self._obstacle(stored))
        mixture.require_edits()
        return mixture

    def _obstacle(self, model: Model) -> DraftObstacles | None:
        return None if self.draft is None else DraftObstacles(model, self.ranks)

    def pricing(self, model: Model, here: Hardware | None = None) -> Pricing:
        """What a model's programs cost; as `priced`."""
        deployment = Deployment(self.ranks, emulated=parse_link(self.link_delay, None))
        return open_pricing(model, self.aspects, deployment, self.workload(model.positions), here)

    def priced(self, mixture: Mixture, here: Hardware | None = None) -> SearchBudget:
        """The budget for a model, with warnings of what to know of it.

        Args:
            here: this machine, if a cost is a time on it.

        Raises:
            FileNotFoundError, ValueError: if there is no such hardware, the link's delay is no time, the model is
                within the budget already, the spaces do not bring it there, or lessen nothing of what is looked along.
        """
        pricing = self.pricing(mixture.model, here)
        for note in pricing.notes:
            warnings.warn(note, stacklevel=2)
        budget = SearchBudget(self.limits, pricing)
        if budget.of_programs:
            for note in budget.require_work():
                warnings.warn(note, stacklevel=2)
            require_reachable(budget, mixture)
        if self.along and not any(levels_of(cost, budget, mixture) for cost in self.along):
            names = " or ".join(map(str, self.along))
            raise ValueError(
                f"nothing of the space {self.space} lessens {names}, along which this search would look; add a "
                "space that does, or give a budget"
            )
        return budget


@dataclass(frozen=True)
class Question:
    """A search's question, and what follows from it: goals, what trials cost, and which of them win.

    Attributes:
        budget: of the settings' limits; its pricing knows `settings.aspects`.
        original: the unedited model's quality on the text.
        whole: the question of all spaces, of whose levels this one's are those that its own edits come to.
    """

    settings: SearchSettings
    mixture: Mixture
    budget: SearchBudget
    original: MeasuredProgram
    whole: Question | None = None

    def of(self, spaces: Sequence[Space]) -> Question:
        """The same question of some of the spaces, along the same levels."""
        return replace(self, mixture=replace(self.mixture, spaces=tuple(spaces)), whole=self)

    def promised(self, program: Program, divergence: float) -> float:
        """As `searches.drafting.promised`, in a search for drafts."""
        draft = self.settings.draft
        assert draft is not None, "nothing is asked of drafts"
        return promised(self.budget.pricing, draft, program, divergence)

    def drafted(self, program: Program, *measured: MeasuredProgram) -> list[DraftedPrediction]:
        """Drafting by a program as it was measured on each of several texts, where drafts are asked for."""
        settings, pricing = self.settings, self.budget.pricing
        if settings.draft is None:
            return []
        found = (drafted(pricing, settings.draft, program, one, settings.acceptance) for one in measured)
        return [one for one in found if one is not None]

    @cached_property
    def levels(self) -> dict[Aspect, tuple[float, ...]]:
        """Those of each cost that is looked along."""
        if self.whole is None:
            every = {cost: levels_of(cost, self.budget, self.mixture) for cost in self.settings.along}
            return {cost: levels for cost, levels in every.items() if levels}
        least = {cost: least_cost(cost, self.budget, self.mixture) for cost in self.along}
        return {
            cost: tuple(level for level in levels if level >= least[cost] - _NEAR * abs(least[cost]))
            for cost, levels in self.whole.levels.items()
        }

    @property
    def along(self) -> tuple[Aspect, ...]:
        """The costs that are looked along: of `SearchSettings.along`, those that edits lessen."""
        return tuple(self.levels if self.whole is None else self.whole.levels)

    @property
    def is_for_the_cheapest(self) -> bool:
        """Whether quality is limited, and the winner is the cheapest that has it."""
        return bool(self.along and self.budget.of_quality) and not self.settings.is_between_limits

    @property
    def has_one_best(self) -> bool:
        """Whether trials of all levels compare, and the best of all of them wins."""
        return not self.along or bool(self.budget.of_quality) or self.settings.draft is not None

    @property
    def objectives(self) -> tuple[Aspect, ...]:
        """What is to be small."""
        return self.settings.objectives

    def valued(self, program: Program, measured: MeasuredProgram) -> MeasuredProgram:
        """A program as it was measured, with what it is worth as a draft where that is asked for."""
        settings = self.settings
        if settings.draft is None:
            return measured
        return valued(self.budget.pricing, settings.draft, program, measured, settings.acceptance)

    @property
    def traded(self) -> tuple[Aspect, ...]:
        """What a front is of: the objectives, and the costs that are looked along, but for one that drafts settle."""
        if self.settings.draft is not None:
            return self.objectives
        return tuple(dict.fromkeys([*self.objectives, *self.along]))

    def front(self, trials: Sequence[Trial]) -> list[FrontPoint]:
        """The trials that no other is better than in all objectives; by the first one, least first.

        Where costs are looked along that are no objectives: in the objectives and one of these, for each of them.
        """
        pricing, others = self.budget.pricing, [cost for cost in self.along if cost not in self.objectives]
        trades = [(*self.objectives, cost) for cost in others] or [self.objectives]
        best = {point.trial.number: point.trial for one in trades for point in pareto_front(trials, one, pricing)}
        points = [FrontPoint(trial, pricing.costs(self.traded, trial)) for trial in best.values()]
        return sorted(points, key=lambda point: point.costs)

    @cached_property
    def goals(self) -> tuple[Goal, ...]:
        """One for the budget, or one for each level of each cost that is looked along, the dearest first."""
        most = tuple(self.budget.most(limit) for limit in self._kept)
        if not self.along:
            return (Goal(most),)
        return tuple(
            Goal((*most, *(level if other == cost else ANY for other in self.along)), level)
            for cost, levels in self.levels.items()
            for level in levels
        )

    def level(self, program: Program) -> float | None:
        """Of the first cost that is looked along and that a program lessens, the last level that it comes down to."""
        for cost, levels in self.levels.items():
            price = self.budget.pricing.price(cost, program)
            met = [level for level in levels if price <= level * (1 + 1e-9)]
            if met:
                return min(met)
        return None

    @property
    def prices(self) -> Prices:
        """What programs cost, in the order of the goals' limits."""
        aspects = [*(limit.aspect for limit in self._kept), *self.along]
        return lambda program: tuple(self.budget.pricing.price(aspect, program) for aspect in aspects)

    @property
    def _kept(self) -> list[Limit]:
        """The limits on programs that every goal keeps."""
        between = self.along if self.settings.is_between_limits else ()
        return [limit for limit in self.budget.of_programs if limit.aspect not in between]

    @cached_property
    def _wanted(self) -> float | None:
        """Of the cost that is looked along between limits, the level that is the limit."""
        limits = [limit for limit in self.budget.of_programs if limit not in self._kept]
        return self.budget.most(limits[0]) if limits else None

    def shared_out(self, goals: Sequence[Goal], trials: Sequence[Trial], total: int) -> list[int]:
        """How many of a round's trials each goal gets: evenly along a cost, or where quality ends if it is limited.

        Where the cost is limited, too, half of them are of programs at its limit. Of drafts, where the best ones are.
        """
        if self.settings.draft is not None:
            best: dict[float | None, float] = {}
            for trial in trials:
                level = trial.proposal.level
                best[level] = min(best.get(level, math.inf), self.cost(trial))
            return near_the_best(goals, best, total)
        if not self.along or not self.budget.of_quality:
            return evenly(goals, trials, total)
        good = {trial.proposal.level for trial in trials if not any(self.lacks_of_quality(trial.measured))}
        wanted = [place for place, goal in enumerate(goals) if goal.level == self._wanted]
        half = (total + len(trials) % 2) // 2 if wanted else 0
        counts = at_the_edge(goals, good, total - half)
        for place in wanted:
            counts[place] += half
        return counts

    def cost(self, trial: Trial) -> float:
        """What a single winner is chosen by, less is better; infinite for a trial that breaks the budget.

        By the first objective; where only quality is limited, by the cost that is looked along. Of equally dear ones
        by their divergence.
        """
        if not trial.measured.whole or not self.is_met(trial):
            return math.inf
        if not self.is_for_the_cheapest:
            return self.costs(trial)[0]
        dense = self.budget.pricing.price(self.along[0], self.mixture.model.program)
        divergence = trial.measured.divergence
        return self.price(self.along[0], trial) / dense + _BETWEEN_EQUALS * divergence / (1 + divergence)

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
        if not self.has_one_best:
            return f"{len(self.front([*trials]))} on the front"
        best = min(trials, key=lambda trial: (self.cost(trial), trial.number), default=None)
        if best is None or math.isinf(self.cost(best)):
            return ""
        if self.is_for_the_cheapest:
            return f"best {self.along[0].show(self.price(self.along[0], best))}"
        if self.settings.draft is not None:
            return f"best {self.settings.draft.show(self.cost(best))}"
        return f"best {self.cost(best):.4g}"


def _saves(mixture: Mixture, pricing: Pricing) -> bool:
    """Whether edits of every layer together save more than a hundredth of something."""
    for aspect, dense in zip(pricing.aspects, pricing.dense, strict=True):
        best: dict[int, float] = {}
        for edit, program in zip(mixture.edits, mixture.single_edits, strict=True):
            best[edit.first] = max(best.get(edit.first, 0.0), dense - pricing.price(aspect, program))
        if sum(best.values()) > _LITTLE * abs(dense):
            return True
    return False


def levels_of(cost: Aspect, budget: SearchBudget, mixture: Mixture) -> tuple[float, ...]:
    """Of a cost, between the unedited model's and the least that edits were found to bring it to, the dearest first.

    Its limit, if it has one, is one of them. There are none where the edits do not lessen it: late steps keep the
    depth, say.
    """
    dense = budget.pricing.price(cost, mixture.model.program)
    least = least_cost(cost, budget, mixture)
    most = [budget.most(limit) for limit in budget.of_programs if limit.aspect == cost and budget.most(limit) < dense]
    if cost == DEPTH:
        whole = map(float, range(math.ceil(dense) - 1, math.ceil(least) - 1, -1))
        return tuple(sorted({*whole, *most}, reverse=True))
    if least >= dense:
        return ()
    if cost.name == DRAFT_PASS:  # one that takes nearly as long as the model never pays
        slowest = min(dense, max(_SLOWEST_DRAFT * dense, (dense + least) / 2))
        found = [slowest - (slowest - least) * number / (LEVELS - 1) for number in range(LEVELS)]
    elif most:
        step = (dense - most[0]) / _TO_LIMIT
        found = [most[0] if number == _TO_LIMIT else dense - step * number for number in range(1, LEVELS + 1)]
    else:  # the nearer to the model, the closer: half of them save a quarter of what can be saved
        found = [dense - (dense - least) * (number / LEVELS) ** 2 for number in range(1, LEVELS + 1)]
    return tuple(level for level in found if level >= least - _NEAR * abs(least))


def least_cost(cost: Aspect, budget: SearchBudget, mixture: Mixture) -> float:
    """The least that edits were found to bring a cost to."""
    nothing = replace(budget, limits=(Limit(cost, 0.0, relative=False, text=f"{cost}=0"),))
    return budget.pricing.price(cost, reach(nothing, mixture).program)
