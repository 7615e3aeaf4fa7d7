"""How far edits bring a model to a budget: whether a budget can be met is said before any model is loaded.

Which edits to choose is an integer program: each edit saves what it saves by itself, and of edits that claim the same
thing at most one is chosen. Where savings add up (depth, parameters) its optimum is that of the programs; elsewhere (a
late step saves more behind another) the program it comes to is priced as it is, and improved by single edits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_matrix

from surgeon.findings.edit import Choice, Edit, as_choice
from surgeon.language.program import Program
from surgeon.searches.limits import Limit, SearchBudget
from surgeon.searches.mixture import Mixture
from surgeon.searches.quantities import DEPTH, DRAFT_PASS, Aspect

_SECONDS = 20.0  # that an integer program may take; what it has found by then is used
_FEW = 1e-6  # what an edit costs in an integer program, so that none is chosen for nothing


@dataclass(frozen=True)
class Nearest:
    """The nearest that edits were found to bring a model to a budget.

    Attributes:
        shortfalls: as `SearchBudget.shortfalls`; all 0 where the budget is met.
    """

    choice: Choice
    program: Program
    shortfalls: tuple[float, ...]

    @property
    def met(self) -> bool:
        """Whether the program is within all limits on what it costs by itself."""
        return not any(self.shortfalls)


def reach(budget: SearchBudget, mixture: Mixture) -> Nearest:
    """The nearest to a budget's limits on programs, of which the sum of shortfalls is least."""
    if not budget.of_programs:
        return Nearest((), mixture.model.program, ())
    choice = _by_integers(budget, mixture)
    if not mixture.allows(choice):  # edits that do not go together after all are left out
        together: Choice = ()
        for edit in choice:
            if mixture.allows((*together, edit)):
                together = as_choice((*together, edit))
        choice = together
    found = _reached(budget, mixture, choice)
    while not found.met and (better := _better(budget, mixture, found)) is not None:
        found = better
    return found


def require_reachable(budget: SearchBudget, mixture: Mixture) -> Nearest:
    """The same, for a budget that has to be met.

    Raises:
        ValueError: if no programs within it were found; it says the nearest that were.
    """
    found = reach(budget, mixture)
    if found.met:
        return found
    spaces = ", ".join(space.name for space in mixture.spaces)
    missed = [limit for limit, short in zip(budget.of_programs, found.shortfalls, strict=True) if short]
    alone = {limit: reach(replace(budget, limits=(limit,)), mixture) for limit in missed}
    hopeless = [limit for limit in missed if not alone[limit].met]
    if hopeless:
        parts = [_out_of_reach(budget, limit, alone[limit], mixture, spaces) for limit in hopeless]
        raise ValueError(f"budget {'; '.join(parts)}")
    raise ValueError(
        f"budget {budget}: each of its limits can be met, but not all at once was found how; the nearest has "
        f"{_costs(budget, budget.of_programs, found.program)}"
    )


def _out_of_reach(budget: SearchBudget, limit: Limit, nearest: Nearest, mixture: Mixture, spaces: str) -> str:
    before, after = (_costs(budget, [limit], program) for program in (mixture.model.program, nearest.program))
    if before == after:
        moves = "raises" if limit.aspect.quantity.upward else "lowers"
        return f"{limit} is out of reach: no edit of {spaces} {moves} the model's {before}"
    verb = "bring" if "," in spaces else "brings"
    end = "most" if limit.aspect.quantity.upward else "least"
    last = sum(mixture.attentions_lost[edit] for edit in nearest.choice) == mixture.most_lost > 0
    why = ", as a program has to keep one attention" if last else ""
    return f"{limit} is out of reach: {spaces} {verb} the model from {before} to {after} at the {end}{why}"


def _costs(budget: SearchBudget, limits: Sequence[Limit], program: Program) -> str:
    return ", ".join(limit.aspect.show(budget.cost(limit, program)) for limit in limits)


def _by_integers(budget: SearchBudget, mixture: Mixture) -> Choice:
    """The choice of least shortfall if what edits save added up."""
    dense = np.array([budget.dense(limit) for limit in budget.of_programs])
    most = np.array([budget.most(limit) for limit in budget.of_programs])
    scale = np.where(dense > most, dense - most, np.abs(most))
    edits = []
    saved = []
    for edit in mixture.edits:
        costs = np.array([budget.cost(limit, mixture.program((edit,))) for limit in budget.of_programs])
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


def _reached(budget: SearchBudget, mixture: Mixture, choice: Choice) -> Nearest:
    program = mixture.program(choice)
    return Nearest(choice, program, budget.shortfalls(program))


def _better(budget: SearchBudget, mixture: Mixture, found: Nearest) -> Nearest | None:
    """The best that one more edit, or one less, makes of a choice; None if it is no better."""
    changed = [tuple(edit for edit in found.choice if edit != out) for out in found.choice]
    changed += [as_choice((*found.choice, edit)) for edit in mixture.edits if mixture.is_free(found.choice, edit)]
    best = None
    least = sum(found.shortfalls) * (1 - 1e-9)
    for choice in changed:
        try:
            other = _reached(budget, mixture, choice)
        except ValueError:
            continue
        if sum(other.shortfalls) < least and not math.isinf(sum(other.shortfalls)):
            best = other
            least = sum(other.shortfalls)
    return best


LEVELS = 10  # of a cost that is no depth, between the unedited model's and the least that can be reached
NEAR = 1e-9  # in parts of a cost: what sums round
_SLOWEST_DRAFT = 0.8  # of a pass of the model: as long as one of a draft may take, where others are faster
_TO_LIMIT = 4  # of them, where the cost is limited: as far as the limit


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
    return tuple(level for level in found if level >= least - NEAR * abs(least))


def least_cost(cost: Aspect, budget: SearchBudget, mixture: Mixture) -> float:
    """The least that edits were found to bring a cost to."""
    nothing = replace(budget, limits=(Limit(cost, 0.0, relative=False, text=f"{cost}=0"),))
    return budget.pricing.price(cost, reach(nothing, mixture).program)
