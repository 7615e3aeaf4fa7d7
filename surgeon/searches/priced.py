"""A search's question on a model: goals, and how near its edits come to a budget."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_matrix

from surgeon.cost.hardware import Hardware
from surgeon.findings.edit import Choice, as_choice
from surgeon.language.program import Program
from surgeon.quality.summary import Quality
from surgeon.searches.drafting import DraftValue
from surgeon.searches.front import pareto_front
from surgeon.searches.mixture import Mixture, Trial
from surgeon.searches.pricing import Pricing
from surgeon.searches.proposer import ANY, Goal, Prices, at_the_edge, evenly, near_the_best
from surgeon.searches.quantities import DEPTH, DRAFT_PASS, NEAR, Aspect, Limit
from surgeon.searches.question import Question
from surgeon.searches.spaces import Space
from surgeon.words import plural

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

    def of(self, spaces: Sequence[Space]) -> PricedQuestion:
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

    @property
    def objectives(self) -> tuple[Aspect, ...]:
        return self.settings.objectives

    def valued(self, program: Program, measured: Quality) -> Quality:
        """Add a program's value as a draft to its quality, where that is asked for."""
        if self.drafting is None:
            return measured
        return self.drafting.valued(program, measured)

    @property
    def budget(self) -> str:
        return ",".join(map(str, self.settings.limits))

    @property
    def traded(self) -> tuple[Aspect, ...]:
        """The axes of the front: objectives, and costs in `along` unless drafts settle them."""
        if self.settings.draft is not None:
            return self.objectives
        return tuple(dict.fromkeys([*self.objectives, *self.along]))

    def front(self, trials: Sequence[Trial]) -> list[Trial]:
        """Non-dominated trials in the objectives, and in those with each cost of `along` beside; sorted by costs."""
        others = [cost for cost in self.along if cost not in self.objectives]
        trades = [(*self.objectives, cost) for cost in others] or [self.objectives]
        best = {trial.number: trial for one in trades for trial in pareto_front(trials, one, self.pricing)}
        return sorted(best.values(), key=lambda trial: self.pricing.costs(self.traded, trial))

    @cached_property
    def goals(self) -> tuple[Goal, ...]:
        """One for the budget, or one for each level of each cost in `along`, the dearest first."""
        most = tuple(limit.most(self.pricing.dense[limit.aspect]) for limit in self._kept)
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
        aspects = [*(limit.aspect for limit in self._kept), *self.along]
        return lambda program: tuple(self.pricing.price(aspect, program) for aspect in aspects)

    @property
    def _kept(self) -> list[Limit]:
        between = self.along if self.settings.is_between_limits else ()
        return [limit for limit in self.settings.limits if limit.aspect.is_priced and limit.aspect not in between]

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
        limited = [limit for limit in self.settings.limits if limit.aspect.is_priced and limit not in self._kept]
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
            return self.costs(trial)[0]
        dense = self.pricing.dense[self.along[0]]
        divergence = trial.measured.divergence
        return self.price(self.along[0], trial) / dense + _BETWEEN_EQUALS * divergence / (1 + divergence)

    def costs(self, trial: Trial) -> tuple[float, ...]:
        return self.pricing.costs(self.objectives, trial)

    def price(self, aspect: Aspect, trial: Trial) -> float:
        return self.pricing.price(aspect, trial.program)

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
        if self.is_for_the_cheapest:
            return f"best {self.along[0].show(self.price(self.along[0], best))}"
        if self.settings.draft is not None:
            return f"best {self.settings.draft.show(self.cost(best))}"
        return f"best {self.cost(best):.4g}"


def priced(question: Question, mixture: Mixture, here: Hardware | None = None) -> Pricing:
    """Open the pricing of a question whose limits can be met, with warnings about them.

    Args:
        here: this machine, if a cost is a time on it.

    Raises:
        FileNotFoundError, ValueError: if there is no such hardware, the link's delay is no time, the model is
            within the budget already, or the spaces do not bring it there, or lessen no cost of `along`.
    """
    pricing = question.pricing(mixture.model, here)
    for note in (*pricing.notes, *require_work(question.limits, pricing)):
        warnings.warn(note, stacklevel=2)
    require_reachable(question.limits, pricing, mixture)
    if question.along and not any(levels_of(cost, question.limits, pricing, mixture) for cost in question.along):
        names = " or ".join(map(str, question.along))
        raise ValueError(
            f"nothing of the space {question.space} lessens {names}, along which this search would look; add a "
            "space that does, or give a budget"
        )
    return pricing


_SECONDS = 20.0  # that an integer program may take; what it has found by then is used
_FEW = 1e-6  # what an edit costs in an integer program, so that none is chosen for nothing


def require_work(limits: Sequence[Limit], pricing: Pricing) -> list[str]:
    """Refuse limits that ask for nothing.

    Returns:
        Notes on limits that only keep programs from getting worse.
    """
    priced = [limit for limit in limits if limit.aspect.is_priced]
    said = []
    more = []
    notes = []
    for limit in priced:
        dense = pricing.dense[limit.aspect]
        if dense == 0:
            on = plural(pricing.deployment.ranks, "rank")
            raise ValueError(f"budget {limit}: the unedited model has {limit.aspect} 0 on {on}")
        if limit.shortfall(dense, dense):
            continue
        words = f"the unedited model has {limit.aspect.show(dense)} already"
        said.append(words)
        kept = "needing more"
        if limit.aspect.deep:
            kept = "being shallower"
            more.append("more")
        elif limit.aspect.name == "depth" and not limit.relative:
            more.append(f"less, or for a deeper model by depth>={limit.amount:g}")
        else:
            more.append("less")
        notes.append(f"{limit}: {words}; it only keeps programs from {kept}")
    if said and len(said) == len(priced):
        raise ValueError(f"budget {_words(limits)}: {' and '.join(said)}; ask for {' and '.join(more)}")
    return notes


def reach(limits: Sequence[Limit], pricing: Pricing, mixture: Mixture) -> Choice:
    """Find the choice that comes nearest to limits on programs, by the sum of shortfalls.

    From that of an integer program, in which what edits save adds up, the best single edit more or less is taken as
    long as it helps.
    """
    priced = [limit for limit in limits if limit.aspect.is_priced]
    if not priced:
        return ()
    found = _by_integers(priced, pricing, mixture)
    if not mixture.allows(found):  # edits that do not go together after all are left out
        together: Choice = ()
        for edit in found:
            if mixture.allows((*together, edit)):
                together = as_choice((*together, edit))
        found = together
    least = sum(pricing.shortfalls(priced, mixture.program(found)))
    while least:
        changed = [tuple(edit for edit in found if edit != out) for out in found]
        changed += [as_choice((*found, edit)) for edit in mixture.edits if mixture.is_free(found, edit)]
        better = None
        least *= 1 - 1e-9
        for choice in changed:
            if mixture.allows(choice):
                short = sum(pricing.shortfalls(priced, mixture.program(choice)))
                if short < least and not math.isinf(short):
                    better = choice
                    least = short
        if better is None:
            break
        found = better
    return found


def require_reachable(limits: Sequence[Limit], pricing: Pricing, mixture: Mixture) -> Choice:
    """Find a choice within limits on programs."""
    choice = reach(limits, pricing, mixture)
    program = mixture.program(choice)
    shortfalls = pricing.shortfalls(limits, program)
    if not any(shortfalls):
        return choice
    priced = [limit for limit in limits if limit.aspect.is_priced]
    hopeless = []
    for limit, short in zip(priced, shortfalls, strict=True):
        if short:
            nearest = reach([limit], pricing, mixture)
            after = mixture.program(nearest)
            if any(pricing.shortfalls([limit], after)):
                last = sum(mixture.attentions_lost[edit] for edit in nearest) == mixture.most_lost > 0
                hopeless.append(_out_of_reach(limit, pricing, mixture, after, last))
    if hopeless:
        raise ValueError(f"budget {'; '.join(hopeless)}")
    had = ", ".join(limit.aspect.show(pricing.price(limit.aspect, program)) for limit in priced)
    raise ValueError(
        f"budget {_words(limits)}: each of its limits can be met, but not all at once was found how; the nearest has "
        f"{had}"
    )


def _words(limits: Sequence[Limit]) -> str:
    return ",".join(map(str, limits))


def _out_of_reach(limit: Limit, pricing: Pricing, mixture: Mixture, nearest: Program, last: bool) -> str:
    spaces = ", ".join(space.name for space in mixture.spaces)
    before = limit.aspect.show(pricing.dense[limit.aspect])
    after = limit.aspect.show(pricing.price(limit.aspect, nearest))
    upward = limit.aspect.quantity.upward
    if before == after:
        return f"{limit} is out of reach: no edit of {spaces} {'raises' if upward else 'lowers'} the model's {before}"
    verb = "bring" if "," in spaces else "brings"
    why = ", as a program has to keep one attention" if last else ""
    end = "most" if upward else "least"
    return f"{limit} is out of reach: {spaces} {verb} the model from {before} to {after} at the {end}{why}"


def _by_integers(limits: Sequence[Limit], pricing: Pricing, mixture: Mixture) -> Choice:
    """The choice of least shortfall if what edits save added up."""
    dense = np.array([pricing.dense[limit.aspect] for limit in limits])
    most = np.array([limit.most(pricing.dense[limit.aspect]) for limit in limits])
    scale = np.where(dense > most, dense - most, np.abs(most))
    edits = []
    saved = []
    for edit, program in zip(mixture.edits, mixture.single_edits, strict=True):
        costs = np.array([pricing.price(limit.aspect, program) for limit in limits])
        if np.isfinite(costs).all() and (costs < dense).any():
            edits.append(edit)
            saved.append((dense - costs) / scale)
    if not edits:
        return ()
    count = len(edits)
    rows: dict[object, list[int]] = {}
    for number, edit in enumerate(edits):
        for claim in mixture.claims(edit):
            rows.setdefault(claim, []).append(number)
    claims = lil_matrix((len(rows), count + len(limits)))
    for row, numbers in enumerate(rows.values()):
        claims[row, numbers] = 1.0
    lost = [mixture.attentions_lost[edit] for edit in edits]
    none = np.zeros(len(limits))
    enough = np.hstack([np.array(saved).T, np.eye(len(limits))])
    found = milp(
        np.concatenate([np.full(count, _FEW), none + 1]),
        integrality=np.concatenate([np.ones(count), none]),
        bounds=Bounds(0.0, np.concatenate([np.ones(count), none + np.inf])),
        constraints=[
            LinearConstraint(claims.tocsr(), ub=1.0),
            LinearConstraint(enough, lb=(dense - most) / scale),
            LinearConstraint(np.concatenate([lost, none])[None], ub=mixture.most_lost),
        ],
        options={"time_limit": _SECONDS},
    )
    if found.x is None:
        return ()
    return as_choice(edit for edit, amount in zip(edits, found.x, strict=False) if amount > 0.5)


LEVELS = 10  # of a cost that is no depth, between the unedited model's and the least that can be reached
_SLOWEST_DRAFT = 0.8  # of a pass of the model: as long as one of a draft may take, where others are faster
_TO_LIMIT = 4  # of them, where the cost is limited: as far as the limit


def levels_of(cost: Aspect, limits: Sequence[Limit], pricing: Pricing, mixture: Mixture) -> tuple[float, ...]:
    """Levels of a cost between the unedited model's and the least that edits reach, the dearest first.

    A limit of the cost is one of them. There are none where edits do not lessen it, as late steps keep the depth.
    """
    dense = pricing.dense[cost]
    least = least_cost(cost, pricing, mixture)
    most = [limit.most(dense) for limit in limits if limit.aspect == cost and limit.most(dense) < dense]
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
    return tuple(level for level in found if level >= least - NEAR * abs(least))


def least_cost(cost: Aspect, pricing: Pricing, mixture: Mixture) -> float:
    """Find the lowest cost that edits reach."""
    nothing = Limit(cost, 0.0, relative=False, text=f"{cost}=0")
    return pricing.price(cost, mixture.program(reach([nothing], pricing, mixture)))
