"""What a search is asked, of which spaces, limits and objectives; and the goals that follow."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_matrix

from surgeon.cost.hardware import Hardware
from surgeon.findings.edit import Choice, Edit, as_choice
from surgeon.language.program import Program
from surgeon.quality.summary import Quality
from surgeon.searches.drafting import DraftValue
from surgeon.searches.front import FrontPoint, pareto_front
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
    """A search's question, and what follows from it: goals, what trials cost, and which of them win.

    Attributes:
        pricing: of `settings.aspects`.
        original: the unedited model's quality on the text.
        whole: the question of all spaces, of whose levels this one's are those that its own edits come to.
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
        """What programs are worth as drafts, where that is asked for."""
        if self.settings.draft is None:
            return None
        return DraftValue(self.pricing, self.settings.draft, self.settings.acceptance)

    @cached_property
    def levels(self) -> dict[Aspect, tuple[float, ...]]:
        """Those of each cost that is looked along."""
        if self.whole is None:
            every = {
                cost: levels_of(cost, self.settings.limits, self.pricing, self.mixture) for cost in self.settings.along
            }
            return {cost: levels for cost, levels in every.items() if levels}
        least = {cost: least_cost(cost, self.pricing, self.mixture) for cost in self.along}
        return {
            cost: tuple(level for level in levels if level >= least[cost] - NEAR * abs(least[cost]))
            for cost, levels in self.whole.levels.items()
        }

    @property
    def along(self) -> tuple[Aspect, ...]:
        """The costs that are looked along: of `Question.along`, those that edits lessen."""
        return tuple(self.levels if self.whole is None else self.whole.levels)

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
        """A program as it was measured, with what it is worth as a draft where that is asked for."""
        if self.drafting is None:
            return measured
        return self.drafting.valued(program, measured)

    @property
    def budget(self) -> str:
        return ",".join(map(str, self.settings.limits))

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
        pricing = self.pricing
        others = [cost for cost in self.along if cost not in self.objectives]
        trades = [(*self.objectives, cost) for cost in others] or [self.objectives]
        best = {point.trial.number: point.trial for one in trades for point in pareto_front(trials, one, pricing)}
        points = [FrontPoint(trial, pricing.costs(self.traded, trial)) for trial in best.values()]
        return sorted(points, key=lambda point: point.costs)

    @cached_property
    def goals(self) -> tuple[Goal, ...]:
        """One for the budget, or one for each level of each cost that is looked along, the dearest first."""
        most = tuple(limit.most(self.pricing.dense[limit.aspect]) for limit in self._kept)
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
            price = self.pricing.price(cost, program)
            met = [level for level in levels if price <= level * (1 + 1e-9)]
            if met:
                return min(met)
        return None

    @property
    def prices(self) -> Prices:
        """What programs cost, in the order of the goals' limits."""
        aspects = [*(limit.aspect for limit in self._kept), *self.along]
        return lambda program: tuple(self.pricing.price(aspect, program) for aspect in aspects)

    @property
    def _kept(self) -> list[Limit]:
        between = self.along if self.settings.is_between_limits else ()
        return [limit for limit in self.settings.limits if limit.aspect.is_priced and limit.aspect not in between]

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
        if not self.along or not self.settings.of_quality:
            return evenly(goals, trials, total)
        good = {trial.proposal.level for trial in trials if not any(self.lacks_of_quality(trial.measured))}
        limited = [limit for limit in self.settings.limits if limit.aspect.is_priced and limit not in self._kept]
        most = [limit.most(self.pricing.dense[limit.aspect]) for limit in limited[:1]]
        wanted = [place for place, goal in enumerate(goals) if goal.level in most]
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


def priced(question: Question, mixture: Mixture, here: Hardware | None = None) -> Pricing:
    """What programs cost, for limits that can be met, with warnings of what to know of them.

    Args:
        here: this machine, if a cost is a time on it.

    Raises:
        FileNotFoundError, ValueError: if there is no such hardware, the link's delay is no time, the model is
            within the budget already, the spaces do not bring it there, or lessen nothing of what is looked along.
    """
    pricing = question.pricing(mixture.model, here)
    for note in pricing.notes:
        warnings.warn(note, stacklevel=2)
    for note in require_work(question.limits, pricing):
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


@dataclass(frozen=True)
class Nearest:
    """The nearest that edits were found to bring a model to a budget.

    Attributes:
        shortfalls: as `Pricing.shortfalls`; all 0 where the budget is met.
    """

    choice: Choice
    program: Program
    shortfalls: tuple[float, ...]

    @property
    def met(self) -> bool:
        return not any(self.shortfalls)


def require_work(limits: Sequence[Limit], pricing: Pricing) -> list[str]:
    """Refuse limits that ask for nothing.

    Returns:
        What to know of those that only keep programs from getting worse, one line each.

    Raises:
        ValueError: if the unedited model is within all limits on programs, or has nothing of what is limited.
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


def reach(limits: Sequence[Limit], pricing: Pricing, mixture: Mixture) -> Nearest:
    """The nearest to limits on programs, of which the sum of shortfalls is least."""
    priced = [limit for limit in limits if limit.aspect.is_priced]
    if not priced:
        return Nearest((), mixture.model.program, ())
    choice = _by_integers(priced, pricing, mixture)
    if not mixture.allows(choice):  # edits that do not go together after all are left out
        together: Choice = ()
        for edit in choice:
            if mixture.allows((*together, edit)):
                together = as_choice((*together, edit))
        choice = together
    found = _reached(priced, pricing, mixture, choice)
    while not found.met:
        better = _better(priced, pricing, mixture, found)
        if better is None:
            break
        found = better
    return found


def require_reachable(limits: Sequence[Limit], pricing: Pricing, mixture: Mixture) -> Nearest:
    """The same, for a budget that has to be met.

    Raises:
        ValueError: if no programs within it were found; it says the nearest that were.
    """
    found = reach(limits, pricing, mixture)
    if found.met:
        return found
    priced = [limit for limit in limits if limit.aspect.is_priced]
    spaces = ", ".join(space.name for space in mixture.spaces)
    hopeless = []
    for limit, short in zip(priced, found.shortfalls, strict=True):
        if short:
            alone = reach([limit], pricing, mixture)
            if not alone.met:
                hopeless.append(_out_of_reach(pricing, limit, alone, mixture, spaces))
    if hopeless:
        raise ValueError(f"budget {'; '.join(hopeless)}")
    had = ", ".join(limit.aspect.show(pricing.price(limit.aspect, found.program)) for limit in priced)
    raise ValueError(
        f"budget {_words(limits)}: each of its limits can be met, but not all at once was found how; the nearest has "
        f"{had}"
    )


def _words(limits: Sequence[Limit]) -> str:
    return ",".join(map(str, limits))


def _out_of_reach(pricing: Pricing, limit: Limit, nearest: Nearest, mixture: Mixture, spaces: str) -> str:
    before = limit.aspect.show(pricing.dense[limit.aspect])
    after = limit.aspect.show(pricing.price(limit.aspect, nearest.program))
    if before == after:
        moves = "raises" if limit.aspect.quantity.upward else "lowers"
        return f"{limit} is out of reach: no edit of {spaces} {moves} the model's {before}"
    verb = "bring" if "," in spaces else "brings"
    end = "most" if limit.aspect.quantity.upward else "least"
    last = sum(mixture.attentions_lost[edit] for edit in nearest.choice) == mixture.most_lost > 0
    why = ", as a program has to keep one attention" if last else ""
    return f"{limit} is out of reach: {spaces} {verb} the model from {before} to {after} at the {end}{why}"


def _by_integers(limits: Sequence[Limit], pricing: Pricing, mixture: Mixture) -> Choice:
    """The choice of least shortfall if what edits save added up."""
    dense = np.array([pricing.dense[limit.aspect] for limit in limits])
    most = np.array([limit.most(pricing.dense[limit.aspect]) for limit in limits])
    scale = np.where(dense > most, dense - most, np.abs(most))
    edits = []
    saved = []
    for edit in mixture.edits:
        program = mixture.program((edit,))
        costs = np.array([pricing.price(limit.aspect, program) for limit in limits])
        if np.isfinite(costs).all() and (costs < dense).any():
            edits.append(edit)
            saved.append((dense - costs) / scale)
    if not edits:
        return ()
    chosen = _solve(mixture, edits, np.array(saved), (dense - most) / scale)
    return as_choice(edit for edit, taken in zip(edits, chosen, strict=True) if taken)


def _solve(
    mixture: Mixture, edits: Sequence[Edit], saved: NDArray[np.float64], needed: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """Which edits to take.

    Args:
        saved: (edits, limits), in the same parts as `needed`, (limits,).
    """
    count, limits = saved.shape
    rows: dict[object, list[int]] = {}
    for number, edit in enumerate(edits):
        for claim in mixture.claims(edit):
            rows.setdefault(claim, []).append(number)
    claims = lil_matrix((len(rows), count + limits))
    for row, numbers in enumerate(rows.values()):
        claims[row, numbers] = 1.0
    lost = [mixture.attentions_lost[edit] for edit in edits]
    enough = np.hstack([saved.T, np.eye(limits)])
    found = milp(
        np.concatenate([np.full(count, _FEW), np.ones(limits)]),
        integrality=np.concatenate([np.ones(count), np.zeros(limits)]),
        bounds=Bounds(0.0, np.concatenate([np.ones(count), np.full(limits, np.inf)])),
        constraints=[
            LinearConstraint(claims.tocsr(), ub=1.0),
            LinearConstraint(enough, lb=needed),
            LinearConstraint(np.concatenate([lost, np.zeros(limits)])[None], ub=mixture.most_lost),
        ],
        options={"time_limit": _SECONDS},
    )
    taken: NDArray[np.bool_] = found.x[:count] > 0.5 if found.x is not None else np.zeros(count, dtype=bool)
    return taken


def _reached(limits: Sequence[Limit], pricing: Pricing, mixture: Mixture, choice: Choice) -> Nearest:
    program = mixture.program(choice)
    return Nearest(choice, program, pricing.shortfalls(limits, program))


def _better(limits: Sequence[Limit], pricing: Pricing, mixture: Mixture, found: Nearest) -> Nearest | None:
    """The best that one more edit, or one less, makes of a choice; None if it is no better."""
    changed = [tuple(edit for edit in found.choice if edit != out) for out in found.choice]
    changed += [as_choice((*found.choice, edit)) for edit in mixture.edits if mixture.is_free(found.choice, edit)]
    best = None
    least = sum(found.shortfalls) * (1 - 1e-9)
    for choice in changed:
        try:
            other = _reached(limits, pricing, mixture, choice)
        except ValueError:
            continue
        if sum(other.shortfalls) < least and not math.isinf(sum(other.shortfalls)):
            best = other
            least = sum(other.shortfalls)
    return best


LEVELS = 10  # of a cost that is no depth, between the unedited model's and the least that can be reached
_SLOWEST_DRAFT = 0.8  # of a pass of the model: as long as one of a draft may take, where others are faster
_TO_LIMIT = 4  # of them, where the cost is limited: as far as the limit


def levels_of(cost: Aspect, limits: Sequence[Limit], pricing: Pricing, mixture: Mixture) -> tuple[float, ...]:
    """Of a cost, between the unedited model's and the least that edits were found to bring it to, the dearest first.

    Its limit, if it has one, is one of them. There are none where the edits do not lessen it: late steps keep the
    depth, say.
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
    """Find the least that edits bring a cost to."""
    nothing = Limit(cost, 0.0, relative=False, text=f"{cost}=0")
    return pricing.price(cost, reach([nothing], pricing, mixture).program)
