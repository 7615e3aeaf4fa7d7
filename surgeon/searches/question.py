"""A search's question: in a user's words, and on a model."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from surgeon.cost.deployment import Deployment, Workload
from surgeon.cost.hardware import Hardware, load_hardware
from surgeon.language.program import Program
from surgeon.opened import Model, open_model
from surgeon.quality import DEFAULT_TOKENS
from surgeon.quality.head import GREEDY, SAMPLED
from surgeon.quality.summary import Quality
from surgeon.runtime.comm.collectives import Link, parse_link
from surgeon.searches.drafting import DraftValue, draft_obstacle
from surgeon.searches.mixture import Mixture, Trial
from surgeon.searches.pricing import (
    Pricing,
    least_cost,
    levels_of,
    pareto_front,
    require_reachable,
    require_work,
)
from surgeon.searches.proposer import ANY, Goal, Prices, at_the_edge, evenly, near_the_best
from surgeon.searches.quantities import (
    ACCURACY,
    DEPTH,
    DIVERGENCE,
    DRAFT,
    DRAFT_PASS,
    HERE,
    NEAR,
    SIZE,
    Aspect,
    Limit,
    parse_limits,
    parse_objectives,
    select_priced,
)
from surgeon.searches.spaces import DEEPER, Space, parse_spaces, usual_spaces

SURGEON = "surgeon"  # the sampler that goes by what edits do
_IDENTITY = (
    "space",
    "budget",
    "objective",
    "ranks",
    "batch",
    "prompt",
    "new",
    "link_delay",
    "sampled_acceptance",
)
_TIMED = ("batch", "prompt", "new", "link_delay")
_LITTLE = 0.01  # in parts of a cost: a space that saves less is not searched unless it is named


@dataclass(frozen=True)
class Question:
    """A user's question to a search; a study of one is not gone on with under another.

    Attributes:
        space: what may change, as `parse_spaces` takes it; None: all that lessens what is asked for (`on`).
        budget: limits, as `parse_limits` takes them; None: how deep is the model really, and how large?
        objective: as `parse_objectives` takes it; several give a front. Costs alone, without a limit of quality, are
            traded for divergence. A draft is looked for alone.
        ranks: tensor-parallel ranks, for tracks and whatever depends on them.
        batch, prompt, new: for times, texts computed together, and tokens of each prompt and added to it.
        link_delay: for times, how long a collective takes at least, such as 1ms.
        sampled_acceptance: measure that of every program, too; a draft is looked for by it.
        data, tokens, window, separator: the text, as `open_subject` takes it.
        using: folders of passes.
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
    data: str | None = None
    tokens: int = DEFAULT_TOKENS
    window: int | None = None
    separator: str | None = None
    using: tuple[str, ...] = ()
    memory: int | str | None = None
    output: str = ""
    trials: int = 60
    minutes: float | None = None
    sampler: str = SURGEON
    seed: int = 0
    holdout: int | None = None
    holdout_data: str | None = None
    heal: int | None = None
    heal_data: str | None = None
    heal_batch: int = 8
    storage: str | None = None
    study: str | None = None
    workers: int = 1

    def __post_init__(self) -> None:
        if self.draft is not None:
            if len(self.objectives) > 1:
                raise ValueError(
                    f"objective {self.objective!r}: a {DRAFT} is looked for alone; leave the others out"
                )
            if self.of_quality:
                raise ValueError(
                    f"budget {self.of_quality[0]}: drafts cost no quality, as the model verifies them; leave it out"
                )
        asked = (*(limit.aspect for limit in self.limits), *self.objectives)
        for each in fields(self) if not any(aspect.quantity.timed for aspect in asked) else ():
            if each.name in _TIMED and getattr(self, each.name) != each.default:
                raise ValueError(
                    f"`{each.name}` is for a latency, a speedup or a draft; ask for one, or leave `{each.name}` out"
                )

    @property
    def identity(self) -> dict[str, Any]:
        """Values that tell studies apart beside model, text, passes and sampler."""
        return {name: getattr(self, name) for name in _IDENTITY if getattr(self, name) is not False}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Question:
        """Invert `asdict`."""
        return cls(**{**values, "using": tuple(values["using"])})

    def on(self, model: Model) -> Question:
        """Name the spaces: of the usual ones, those with edits of this model that save something."""
        if self.space is not None:
            return self
        usual = usual_spaces({DEEPER if aspect.deep else aspect.name for aspect in self.aspects})
        # Prices on this machine need measurements first.
        pricing = None if self.is_timed_here else self.pricing(model)
        able = []
        for name in usual:
            mixture = self._mixture(name, model)
            if pricing is None:
                able += [name] if mixture.edits else []
                continue
            for aspect, dense in pricing.dense.items():
                best: dict[int, float] = {}
                for edit, program in zip(mixture.edits, mixture.single_edits, strict=True):
                    saved = dense - pricing.price(aspect, program)
                    best[edit.first] = max(best.get(edit.first, 0.0), saved)
                if sum(best.values()) > _LITTLE * abs(dense):
                    able.append(name)
                    break
        return replace(self, space=",".join(able or usual))

    @cached_property
    def limits(self) -> tuple[Limit, ...]:
        if self.budget is None:
            return ()
        return parse_limits(self.budget)

    @property
    def of_quality(self) -> tuple[Limit, ...]:
        return tuple(limit for limit in self.limits if not limit.aspect.is_priced)

    @cached_property
    def objectives(self) -> tuple[Aspect, ...]:
        found = parse_objectives(self.objective)
        # A model that is destroyed has least of every cost.
        if self.of_quality or any(not objective.is_priced for objective in found):
            return found
        return (DIVERGENCE, *found)

    @cached_property
    def draft(self) -> Aspect | None:
        """The objective of drafting for the unedited model, if that is asked for."""
        return next((objective for objective in self.objectives if objective.name == DRAFT), None)

    @property
    def acceptance(self) -> str:
        if self.sampled_acceptance:
            return SAMPLED
        return GREEDY

    @property
    def recorded_aspects(self) -> tuple[Aspect, ...]:
        """A study's values of every trial: the objectives, but those measured of the best only, and `along`."""
        if self.draft is not None:
            return self.objectives
        measured = tuple(one for one in self.objectives if one.name != ACCURACY) or (DIVERGENCE,)
        return tuple(dict.fromkeys([*measured, *self.along]))

    @cached_property
    def along(self) -> tuple[Aspect, ...]:
        """The costs whose levels are searched, as far as edits lessen them.

        Of drafts the time of a pass. Else a cost that is an objective; between limits of both a cost and quality, that
        cost; where no cost is limited, depth, and without a budget size, too, for edits that keep the depth.
        """
        if self.draft is not None:
            return (Aspect(DRAFT_PASS, self.draft.on),)
        costs = [objective for objective in self.objectives if objective.is_priced]
        if costs:
            return (costs[0],)
        limited = select_priced(self.limits)
        if limited:
            return (limited[0].aspect,) if self.is_between_limits else ()
        spaces = () if self.space is None else parse_spaces(self.space)
        smaller = not spaces or any(
            "size" in each.serves and "depth" not in each.serves for each in spaces
        )
        if smaller and not self.limits:
            return (DEPTH, SIZE)
        return (DEPTH,)

    @property
    def is_between_limits(self) -> bool:
        """True if a cost and quality are limited and no cost is an objective."""
        both = select_priced(self.limits) and self.of_quality
        return bool(both) and not any(objective.is_priced for objective in self.objectives)

    @property
    def aspects(self) -> tuple[Aspect, ...]:
        every = (*(limit.aspect for limit in self.limits), *self.objectives, *self.along)
        return tuple(dict.fromkeys(aspect for aspect in every if aspect.is_priced))

    @property
    def is_timed_here(self) -> bool:
        return any(aspect.on == HERE for aspect in self.aspects)

    def workload(self, positions: int) -> Workload:
        return Workload.within(positions, self.batch, self.prompt, self.new)

    def mixture(self, model: Model) -> Mixture:
        """Apply the spaces to a model, of which only the configuration has to be there."""
        assert self.space is not None, "`on` names the spaces"
        mixture = self._mixture(self.space, model)
        mixture.require_edits()
        return mixture

    def _mixture(self, spaces: str, model: Model) -> Mixture:
        obstacle = None if self.draft is None else draft_obstacle(model, self.ranks)
        return Mixture(parse_spaces(spaces, self.ranks), model, obstacle)

    def pricing(self, model: Model, here: Hardware | None = None) -> Pricing:
        """Price the costs of a model's programs on the hardware that is asked for."""
        hardware = {}
        for name in dict.fromkeys(aspect.on for aspect in self.aspects if aspect.on is not None):
            assert name != HERE or here is not None, "this machine has to be calibrated first"
            hardware[name] = here if name == HERE and here is not None else load_hardware(name)
        deployment = Deployment(self.ranks, emulated=self.link)
        return Pricing(model, self.aspects, deployment, self.workload(model.positions), hardware)

    @property
    def link(self) -> Link | None:
        """The link on top."""
        if self.link_delay is None:
            return None
        return parse_link(self.link_delay, None)


_BETWEEN_EQUALS = 1e-6  # weight of what decides between programs that cost the same


@dataclass(frozen=True)
class PricedQuestion:
    """A question with what follows from it on a model: goals, costs of trials, and their order.

    Attributes:
        pricing: of `settings.aspects`.
        original: the unedited model's quality on the text.
        whole: the question of all spaces, if this is one of some; its levels are those of the whole that it reaches.
    """

    settings: Question
    mixture: Mixture
    pricing: Pricing
    original: Quality
    whole: PricedQuestion | None = None

    def with_spaces(self, spaces: Sequence[Space]) -> PricedQuestion:
        return replace(self, mixture=replace(self.mixture, spaces=tuple(spaces)), whole=self)

    @cached_property
    def drafting(self) -> DraftValue | None:
        if self.settings.draft is None:
            return None
        return DraftValue(self.pricing, self.settings.draft, self.settings.acceptance)

    @cached_property
    def levels(self) -> dict[Aspect, tuple[float, ...]]:
        """Levels of each cost in `along`."""
        found = {}
        if self.whole is None:
            for cost in self.settings.along:
                levels = levels_of(cost, self.settings.limits, self.pricing, self.mixture)
                if levels:
                    found[cost] = levels
            return found
        for cost, levels in self.whole.levels.items():
            least = least_cost(cost, self.pricing, self.mixture)
            found[cost] = tuple(level for level in levels if level >= least - NEAR * abs(least))
        return found

    @property
    def along(self) -> tuple[Aspect, ...]:
        """The costs whose levels are searched: those of `Question.along` that edits lessen."""
        return tuple((self.whole or self).levels)

    @property
    def is_for_the_cheapest(self) -> bool:
        return bool(self.along and self.settings.of_quality) and not self.settings.is_between_limits

    @property
    def has_one_best(self) -> bool:
        return not self.along or bool(self.settings.of_quality) or self.settings.draft is not None

    def add_value(self, program: Program, measured: Quality) -> Quality:
        """Add to a program's quality its value as a draft, and what else is asked for that quality has no field of."""
        if self.drafting is not None:
            measured = self.drafting.add_value(program, measured)
        asked = [*self.settings.objectives, *(limit.aspect for limit in self.settings.of_quality)]
        more = {
            str(one): one.natural(one.read_cost(measured))
            for one in asked
            if not (one.is_priced or one.name in (ACCURACY, DRAFT) or hasattr(measured, one.name))
        }
        return replace(measured, more={**measured.more, **more})

    @property
    def traded_aspects(self) -> tuple[Aspect, ...]:
        """The axes of the front: objectives, and costs in `along` unless drafts settle them."""
        if self.settings.draft is not None:
            return self.settings.objectives
        return tuple(dict.fromkeys([*self.settings.objectives, *self.along]))

    def front(self, trials: Sequence[Trial]) -> list[Trial]:
        """Non-dominated trials in the objectives, and in those with each cost of `along` beside; sorted by costs."""
        others = [cost for cost in self.along if cost not in self.settings.objectives]
        trades = [(*self.settings.objectives, cost) for cost in others] or [self.settings.objectives]
        best = {
            trial.number: trial for one in trades for trial in pareto_front(trials, one, self.pricing)
        }
        return sorted(best.values(), key=lambda trial: self.pricing.costs(self.traded_aspects, trial))

    @cached_property
    def goals(self) -> tuple[Goal, ...]:
        """One for the budget, or one for each level of each cost in `along`, the dearest first."""
        most = tuple(limit.most(self.pricing.dense[limit.aspect]) for limit in self._kept_limits)
        if not self.along:
            return (Goal(most),)
        return tuple(
            Goal((*most, *(level if other == cost else ANY for other in self.along)), level)
            for cost, levels in self.levels.items()
            for level in levels
        )

    def level(self, program: Program) -> float | None:
        """Find the lowest level that a program meets, of the first cost of `along` that it lessens."""
        for cost, levels in self.levels.items():
            price = self.pricing.price(cost, program)
            met = [level for level in levels if price <= level * (1 + 1e-9)]
            if met:
                return min(met)
        return None

    @property
    def prices(self) -> Prices:
        """Costs of programs, in the order of the goals' limits."""
        aspects = [*(limit.aspect for limit in self._kept_limits), *self.along]
        return lambda program: tuple(self.pricing.price(aspect, program) for aspect in aspects)

    @property
    def _kept_limits(self) -> list[Limit]:
        between = self.along if self.settings.is_between_limits else ()
        return [limit for limit in select_priced(self.settings.limits) if limit.aspect not in between]

    def shared_out(self, goals: Sequence[Goal], trials: Sequence[Trial], total: int) -> list[int]:
        """Share out a round's trials among goals: evenly along a cost, or near where a limited quality ends.

        Where the cost is limited, too, half go to programs at its limit. Drafts are tried where the best ones are.
        """
        if self.settings.draft is not None:
            best: dict[float | None, float] = {}
            for trial in trials:
                level = trial.level
                best[level] = min(best.get(level, math.inf), self.cost(trial))
            return near_the_best(goals, best, total)
        if not self.along or not self.settings.of_quality:
            return evenly(goals, trials, total)
        good = {trial.level for trial in trials if not any(self.lacks_of_quality(trial.measured))}
        limited = [
            limit for limit in select_priced(self.settings.limits) if limit not in self._kept_limits
        ]
        most = [limit.most(self.pricing.dense[limit.aspect]) for limit in limited[:1]]
        wanted = [place for place, goal in enumerate(goals) if goal.level in most]
        half = (total + len(trials) % 2) // 2 if wanted else 0
        counts = at_the_edge(goals, good, total - half)
        for place in wanted:
            counts[place] += half
        return counts

    def cost(self, trial: Trial) -> float:
        """The cost that a single winner is chosen by; infinite for a trial that breaks the budget.

        The first objective; where only quality is limited, the first cost of `along`, with ties broken by divergence.
        """
        if not trial.measured.whole or not self.is_met(trial):
            return math.inf
        if not self.is_for_the_cheapest:
            return self.pricing.costs(self.settings.objectives, trial)[0]
        dense = self.pricing.dense[self.along[0]]
        divergence = trial.measured.divergence
        price = self.pricing.price(self.along[0], trial.program)
        return price / dense + _BETWEEN_EQUALS * divergence / (1 + divergence)

    def lacks_of_quality(self, measured: Quality) -> tuple[float, ...]:
        return tuple(limit.lack(measured, self.original) for limit in self.settings.of_quality)

    def is_met(self, trial: Trial) -> bool:
        short = self.pricing.shortfalls(self.settings.limits, trial.program)
        return not any(short) and not any(self.lacks_of_quality(trial.measured))

    def best_in_words(self, trials: Collection[Trial]) -> str:
        """Describe the best trial in a few words, or the size of the front."""
        if not self.has_one_best:
            return f"{len(self.front([*trials]))} on the front"
        best = min(trials, key=lambda trial: (self.cost(trial), trial.number), default=None)
        if best is None or math.isinf(self.cost(best)):
            return ""
        aspect = self.along[0] if self.is_for_the_cheapest else self.settings.objectives[0]
        return f"best {aspect.show(self.pricing.costs([aspect], best)[0])}"


def open_question(
    model: str | Path | Model, question: Question
) -> tuple[Model, Question, Pricing | None]:
    """Open a model for a question, without its weights, and refuse what cannot be had.

    Returns:
        The model, the question with its spaces named, and its pricing: None where that needs passes or this machine.
    """
    opened = model if isinstance(model, Model) else open_model(model, weights=False)
    question = question.on(opened)
    mixture = question.mixture(opened)
    if question.is_timed_here or question.using:
        return opened, question, None
    return opened, question, price_question(question, mixture)


def price_question(question: Question, mixture: Mixture, here: Hardware | None = None) -> Pricing:
    """Open the pricing of a question whose limits can be met, with warnings about them."""
    pricing = question.pricing(mixture.model, here)
    for note in (*pricing.notes, *require_work(question.limits, pricing)):
        warnings.warn(note, stacklevel=2)
    require_reachable(question.limits, pricing, mixture)
    if question.along and not any(
        levels_of(cost, question.limits, pricing, mixture) for cost in question.along
    ):
        names = " or ".join(map(str, question.along))
        raise ValueError(
            f"nothing of the space {question.space} lessens {names}, along which this search would look; add a "
            "space that does, or give a budget"
        )
    return pricing
