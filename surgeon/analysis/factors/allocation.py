"""Allocation of ranks among a model's matrices, so that a budget is kept and the damage is small.

Three ways: every matrix keeps the same share of its parameters; every matrix keeps the same share of its energy (of the
sum of squares of its singular values); or the measured damages of the matrices' truncations add up to the least. The
last is one Lagrange multiplier over the lower convex hulls of the matrices' damage by cost (Shoham and Gersho 1988,
"Efficient bit allocation for an arbitrary set of quantizers"): a matrix's rank rises as long as that spares more damage
for its cost than elsewhere.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple, get_args

import numpy as np

from surgeon.analysis.factors.matrices import Matrix
from surgeon.errors import did_you_mean
from surgeon.language.operations.lowrank import rank_for, saves
from surgeon.language.sublayer import WRITING
from surgeon.quality.summary import Values

Allocation = Literal["uniform", "energy", "damage"]
Ranks = dict[Matrix, int | None]  # None: the matrix stays whole
_STEPS = 1000  # of the share that uniform and energy allocations try
_LEAST = 1e-12  # nats: measured damage below this, or below 0, is noise


@dataclass(frozen=True)
class Curve:
    """One matrix's singular values and damage.

    Attributes:
        size: (out_features, in_features).
        values: singular values by which it is truncated, largest first.
        damage: measured of truncations: by rank, nats per token.
        weight: a factor of its damage, for what matrices of a layer do to each other.
    """

    matrix: Matrix
    size: tuple[int, int]
    values: Values
    damage: Mapping[int, float] = field(default_factory=dict)
    weight: float = 1.0

    def useful_ranks(self) -> range:
        """The ranks whose factors have fewer parameters than the matrix."""
        most = min(self.size)
        return range(1, 1 + next((rank for rank in range(most, 0, -1) if saves(rank, *self.size)), 0))

    def lost_energy(self) -> Values:
        """The share of the energy that a truncation loses, by rank from 0 on."""
        energy = self.values**2
        total = energy.sum()
        if total == 0:
            return np.zeros(len(energy) + 1)
        kept = np.concatenate([[0.0], np.cumsum(energy)])
        lost: Values = np.maximum(1 - kept / total, 0)
        lost[-1] = 0
        return lost

    def damage_by_rank(self) -> Values:
        """Damage by rank from 0 on, falling: a power of the lost energy between measured ranks.

        Beyond the outermost of them it is proportional to the lost energy, as small errors' divergence is.
        """
        if not self.damage:
            raise ValueError(f"no damage was measured of {self.matrix}; measure some of its ranks")
        lost = self.lost_energy()
        ranks = sorted(self.damage)
        # Noise must not make a higher rank look worse than a lower one.
        measured = np.maximum.accumulate([max(self.damage[rank], _LEAST) for rank in reversed(ranks)])[
            ::-1
        ]
        points = {
            float(lost[rank]): float(value)
            for rank, value in zip(ranks, measured, strict=True)
            if lost[rank] > 0
        }
        if not points:
            return np.zeros(len(lost))
        places = np.array(sorted(points))
        heights = np.array([points[place] for place in places])
        with np.errstate(divide="ignore"):
            inside = np.exp(np.interp(np.log(lost), np.log(places), np.log(heights)))
        below = lost / places[0] * heights[0]
        above = lost / places[-1] * heights[-1]
        found: Values = np.where(lost < places[0], below, np.where(lost > places[-1], above, inside))
        return found * self.weight


class Option(NamedTuple):
    """One rank of a matrix."""

    cost: float
    damage: float
    rank: int | None


Cost = Callable[[Curve, int | None], float]


def parameters(curve: Curve, rank: int | None) -> float:
    """Count the parameters of a matrix at a rank."""
    outputs, inputs = curve.size
    if rank is None:
        return outputs * inputs
    return rank * (outputs + inputs)


def wire_values(curve: Curve, rank: int | None) -> float:
    """Count the values a matrix puts on the wire for each token under tensor parallelism (DeInfer, table 1).

    First factors that read the stream are gathered, whole matrices send nothing; matrices that write to it are reduced,
    in their rank or in the width of the stream, which costs twice as much a value.
    """
    if curve.matrix.role in WRITING:
        return 2.0 * (curve.size[0] if rank is None else rank)
    if rank is None:
        return 0.0
    return float(rank)


def allocate(curves: Sequence[Curve], how: Allocation, budget: float, cost: Cost = parameters) -> Ranks:
    """Allocate a rank to every matrix, which together cost no more than the budget.

    Raises:
        ValueError: if the budget is below what rank 1 everywhere costs, there is no such way, or for `damage` a
            matrix has no damage measured.
    """
    if how not in get_args(Allocation):
        raise ValueError(f"there is no allocation {how!r}; {did_you_mean(how, get_args(Allocation))}")
    if how == "damage":
        return by_damage(curves, budget, cost)
    for step in range(_STEPS, 0, -1):
        share = step / _STEPS
        if how == "uniform":
            ranks = {curve.matrix: rank_for(share, *curve.size) for curve in curves}
        else:
            found = ((curve, max(1, energy_rank(curve.values, share))) for curve in curves)
            ranks = {curve.matrix: rank if saves(rank, *curve.size) else None for curve, rank in found}
        if total_cost(curves, ranks, cost) <= budget:
            return ranks
    raise _too_small(budget, total_cost(curves, ranks, cost))


def by_damage(curves: Sequence[Curve], budget: float, cost: Cost = parameters) -> Ranks:
    """Find the ranks of the least sum of damages."""
    options: dict[Matrix, list[Option]] = {}
    for curve in curves:
        damage = curve.damage_by_rank()
        some = [Option(cost(curve, rank), float(damage[rank]), rank) for rank in curve.useful_ranks()]
        some.append(Option(cost(curve, None), 0.0, None))
        options[curve.matrix] = sorted(some, key=lambda option: (option.cost, option.damage))
    chosen = {matrix: _hull(some)[0] for matrix, some in options.items()}
    left = budget - sum(option.cost for option in chosen.values())
    if left < 0:
        raise _too_small(budget, budget - left)
    steps = [
        ((after.damage - before.damage) / (after.cost - before.cost), index, after)
        for index, matrix in enumerate(options)
        for before, after in pairwise(_hull(options[matrix]))
    ]
    heapq.heapify(steps)
    matrices = list(options)
    while steps:
        _, index, after = heapq.heappop(steps)
        needed = after.cost - chosen[matrices[index]].cost
        if needed > left:
            break
        chosen[matrices[index]] = after
        left -= needed
    # The rest, less than the next step costs, goes for the largest spared damage that it pays for.
    costs = {matrix: np.array([option.cost for option in some]) for matrix, some in options.items()}
    least = {
        matrix: list(accumulate(some, partial(min, key=lambda option: option.damage)))
        for matrix, some in options.items()
    }
    while True:
        affordable = {}
        for matrix, some in least.items():
            paid = np.searchsorted(costs[matrix], chosen[matrix].cost + left, side="right")
            affordable[matrix] = some[int(paid) - 1]
        best = max(options, key=lambda matrix: chosen[matrix].damage - affordable[matrix].damage)
        if affordable[best].damage >= chosen[best].damage:
            return {matrix: option.rank for matrix, option in chosen.items()}
        left -= affordable[best].cost - chosen[best].cost
        chosen[best] = affordable[best]


def total_cost(
    curves: Sequence[Curve], ranks: Mapping[Matrix, int | None], cost: Cost = parameters
) -> float:
    """Sum the cost of all matrices at these ranks."""
    return sum(cost(curve, ranks[curve.matrix]) for curve in curves)


def foreseen_damage(curves: Sequence[Curve], ranks: Mapping[Matrix, int | None]) -> float:
    """The sum of the matrices' damages at these ranks, nats per token."""
    cut = ((curve, ranks[curve.matrix]) for curve in curves)
    return sum(float(curve.damage_by_rank()[rank]) for curve, rank in cut if rank is not None)


def correct_curves(
    curves: Sequence[Curve], ranks: Mapping[Matrix, int | None], together: Callable[[Ranks], float]
) -> list[Curve]:
    """The curves with each layer's damage as it is where all its matrices are truncated at once.

    The sum of single damages leaves out their interaction, which is of second order in their errors; it is taken to be
    as large for all matrices of a layer.
    """
    weights = {}
    for layer in sorted({curve.matrix.layer for curve in curves}):
        own = [replace(curve, weight=1.0) for curve in curves if curve.matrix.layer == layer]
        cut: Ranks = {curve.matrix: ranks[curve.matrix] for curve in own}
        alone = foreseen_damage(own, cut)
        weights[layer] = max(together(cut), _LEAST) / alone if alone > 0 else 1.0
    return [replace(curve, weight=weights[curve.matrix.layer]) for curve in curves]


def energy_rank(values: Values, share: float) -> int:
    """Count the leading singular values that hold this share of the sum of all squares; 0 for a matrix of zeros."""
    energy = np.cumsum(values**2)
    if not len(energy) or energy[-1] == 0:
        return 0
    # A share that is reached exactly must not be missed by the last digit of a running sum.
    return int(np.searchsorted(energy, share * energy[-1] * (1 - 1e-12))) + 1


def effective_rank(values: Values) -> float:
    """Exp of the entropy of the singular values as shares of their sum (Roy and Vetterli 2007, "The effective rank").

    Between 1 and the number of values; 0 for a matrix of zeros.
    """
    total = values.sum()
    if total == 0:
        return 0.0
    shares = values[values > 0] / total
    return float(np.exp(-(shares * np.log(shares)).sum()))


def kept_parameters(out_features: int, in_features: int, rank: int) -> float:
    """Parameters of two factors of this rank, (out + in) r, as a share of the matrix's own."""
    return (out_features + in_features) * rank / (out_features * in_features)


def _hull(options: Sequence[Option]) -> list[Option]:
    """The lower convex hull of damage by cost, up to the least damage; options in the order of their costs."""
    hull: list[Option] = []
    for option in options:
        if hull and option.damage >= hull[-1].damage:
            continue
        if hull and option.cost == hull[-1].cost:
            hull.pop()
        while len(hull) > 1:
            *_, first, last = hull
            step = (last.damage - first.damage) / (last.cost - first.cost)
            if step < (option.damage - first.damage) / (option.cost - first.cost):
                break
            hull.pop()
        hull.append(option)
    return hull


def _too_small(budget: float, least: float) -> ValueError:
    return ValueError(
        f"a budget of {budget:,.0f} is below {math.ceil(least):,}, which rank 1 of every matrix costs"
    )
