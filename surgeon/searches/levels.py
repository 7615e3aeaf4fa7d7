"""The levels of a cost that a search looks along."""

from __future__ import annotations

import math
from dataclasses import replace

from surgeon.searches.limits import Limit, SearchBudget
from surgeon.searches.mixture import Mixture
from surgeon.searches.quantities import DEPTH, DRAFT_PASS, Aspect
from surgeon.searches.reach import reach

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
