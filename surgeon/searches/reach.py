"""Reach of edits: how near they come to limits on programs, and levels of a cost up to there."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_matrix

from surgeon.findings.edit import Choice, as_choice
from surgeon.searches.mixture import Mixture
from surgeon.searches.pricing import Pricing
from surgeon.searches.quantities import DEPTH, DRAFT_PASS, NEAR, Aspect, Limit, priced
from surgeon.words import plural

_SECONDS = 20.0  # that an integer program may take; what it has found by then is used
_FEW = 1e-6  # what an edit costs in an integer program, so that none is chosen for nothing


def require_work(limits: Sequence[Limit], pricing: Pricing) -> list[str]:
    """Refuse limits that ask for nothing.

    Returns:
        Notes on limits that only keep programs from getting worse.
    """
    said = []
    more = []
    notes = []
    for limit in priced(limits):
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
    if said and len(said) == len(priced(limits)):
        raise ValueError(
            f"budget {','.join(map(str, limits))}: {' and '.join(said)}; ask for {' and '.join(more)}"
        )
    return notes


def reach(limits: Sequence[Limit], pricing: Pricing, mixture: Mixture) -> Choice:
    """Find the choice that comes nearest to limits on programs, by the sum of shortfalls.

    From that of an integer program, in which what edits save adds up, the best single edit more or less is taken as
    long as it helps.
    """
    limits = priced(limits)
    if not limits:
        return ()
    found = _by_integers(limits, pricing, mixture)
    if not mixture.allows(found):  # edits that do not go together after all are left out
        together: Choice = ()
        for edit in found:
            if mixture.allows((*together, edit)):
                together = as_choice((*together, edit))
        found = together
    least = sum(pricing.shortfalls(limits, mixture.program(found)))
    while least:
        changed = [tuple(edit for edit in found if edit != out) for out in found]
        changed += [as_choice((*found, edit)) for edit in mixture.edits if mixture.is_free(found, edit)]
        better = None
        least *= 1 - 1e-9
        for choice in changed:
            if mixture.allows(choice):
                short = sum(pricing.shortfalls(limits, mixture.program(choice)))
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
    hopeless = []
    for limit, short in zip(priced(limits), shortfalls, strict=True):
        if short:
            nearest = reach([limit], pricing, mixture)
            after = mixture.program(nearest)
            if not any(pricing.shortfalls([limit], after)):
                continue
            last = sum(mixture.attentions_lost[edit] for edit in nearest) == mixture.most_lost > 0
            spaces = ", ".join(space.name for space in mixture.spaces)
            before = limit.aspect.show(pricing.dense[limit.aspect])
            least = limit.aspect.show(pricing.price(limit.aspect, after))
            upward = limit.aspect.quantity.upward
            verb = "bring" if "," in spaces else "brings"
            said = f"{spaces} {verb} the model from {before} to {least} at the {'most' if upward else 'least'}"
            if before == least:
                said = f"no edit of {spaces} {'raises' if upward else 'lowers'} the model's {before}"
            elif last:
                said += ", as a program has to keep one attention"
            hopeless.append(f"{limit} is out of reach: {said}")
    if hopeless:
        raise ValueError(f"budget {'; '.join(hopeless)}")
    had = ", ".join(limit.aspect.show(pricing.price(limit.aspect, program)) for limit in priced(limits))
    raise ValueError(
        f"budget {','.join(map(str, limits))}: each of its limits can be met, but not all at once was found how; the "
        f"nearest has {had}"
    )


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
# Longest pass of a draft, as a share of the model's, if other drafts are faster.
_SLOWEST_DRAFT = 0.8
_TO_LIMIT = 4  # of them, where the cost is limited: as far as the limit


def levels_of(
    cost: Aspect, limits: Sequence[Limit], pricing: Pricing, mixture: Mixture
) -> tuple[float, ...]:
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
        found = [
            most[0] if number == _TO_LIMIT else dense - step * number for number in range(1, LEVELS + 1)
        ]
    else:  # the nearer to the model, the closer: half of them save a quarter of what can be saved
        found = [dense - (dense - least) * (number / LEVELS) ** 2 for number in range(1, LEVELS + 1)]
    return tuple(level for level in found if level >= least - NEAR * abs(least))


def least_cost(cost: Aspect, pricing: Pricing, mixture: Mixture) -> float:
    """Find the lowest cost that edits reach."""
    nothing = Limit(cost, 0.0, relative=False, text=f"{cost}=0")
    return pricing.price(cost, mixture.program(reach([nothing], pricing, mixture)))
