"""Allocation of ranks among a model's matrices, so that a budget is kept and the damage is small, and their recipe.

Three ways: every matrix keeps the same share of its parameters; every matrix keeps the same share of its energy (of the
sum of squares of its singular values); or the measured damages of the matrices' truncations add up to the least. The
last is one Lagrange multiplier over the lower convex hulls of the matrices' damage by cost (Shoham and Gersho 1988,
"Efficient bit allocation for an arbitrary set of quantizers"): a matrix's rank rises as long as that spares more damage
for its cost than elsewhere.

Damage is measured of one matrix at a time. A layer's matrices cut at once do more, or less, than the sum, by a term of
second order in their errors. So ranks by damage are allocated twice: each layer is measured with all its matrices at
their first ranks, their damage is scaled by the result, and ranks are allocated again.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from surgeon.analysis.factors.factor_plan import FactorPlan, Making
from surgeon.analysis.factors.make_factors import make_factors
from surgeon.analysis.factors.matrices import Matrix
from surgeon.analysis.factors.program_run import ProgramRun, ReferenceText
from surgeon.analysis.subject import Subject
from surgeon.findings.spectrum import Spectrum
from surgeon.language.operations.applied import AppliedOperation
from surgeon.language.operations.lowrank import Calibration, Method, rank_for, saves
from surgeon.language.program import Program
from surgeon.language.recipe import Recipe
from surgeon.language.sublayer import WRITING, Sublayer
from surgeon.machine import parse_size
from surgeon.models.edit import as_stored
from surgeon.opened import command_line
from surgeon.processes.files import write_text
from surgeon.progress import progress
from surgeon.quality.data import Windows
from surgeon.quality.summary import Values, estimate
from surgeon.words import did_you_mean

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


RECIPE = "recipe.yaml"

Quantity = Literal["params", "weight_bytes", "wire_bytes"]
_BUDGET = re.compile(r"\s*(\w+)\s*=\s*(.*?)(x?)\s*")


@dataclass(frozen=True)
class RankBudget:
    """The most that all matrices together may cost, and its allocation among them; checks itself.

    Attributes:
        quantity: parameters, the bytes that they take, or the bytes that one token puts on the wire (`wire_values`).
        most: how many; where it is relative, how many times as many as of the whole matrices.
        size: bytes of one number.
    """

    quantity: Quantity
    most: float
    relative: bool = False
    size: int = 1
    allocation: Allocation = "damage"

    def __post_init__(self) -> None:
        if self.relative and not 0 < self.most <= 1:
            name = "keep" if self.quantity == "params" else self.quantity
            raise ValueError(f"{name} must be more than 0 and at most 1, not {self.most:g}")
        if not 0 < self.most <= math.inf:
            raise ValueError(f"{self.quantity} must be more than 0, not {self.most:g}")

    @property
    def cost(self) -> Cost:
        if self.quantity == "params":
            return parameters
        numbers = parameters if self.quantity == "weight_bytes" else wire_values
        return lambda curve, rank: self.size * numbers(curve, rank)

    def amount(self, curves: Sequence[Curve]) -> float:
        if self.relative:
            return self.most * sum(self.cost(curve, None) for curve in curves)
        return self.most

    def ranks(self, curves: Sequence[Curve]) -> Ranks:
        """Allocate a rank to each matrix; ValueError as `allocate`."""
        return allocate(curves, self.allocation, self.amount(curves), self.cost)


def parse_budget(text: str, size: int, allocation: Allocation = "damage") -> RankBudget:
    """Parse a budget such as params=3M, weight_bytes=20MB or wire_bytes=0.5x.

    Args:
        size: bytes of one number.

    Raises:
        ValueError: if it cannot be read, or there is no such quantity.
    """
    match = _BUDGET.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text!r} is no budget; write e.g. params=0.6x, weight_bytes=20MB or wire_bytes=40KB"
        )
    name, amount, relative = match.groups()
    quantities: tuple[Quantity, ...] = get_args(Quantity)
    quantity = next((one for one in quantities if one == name), None)
    if quantity is None:
        raise ValueError(f"there is no budget on {name!r}; {did_you_mean(name, quantities)}")
    if quantity != "params" and not relative:
        return RankBudget(quantity, parse_size(amount), size=size, allocation=allocation)
    try:
        most = float(amount.replace(",", ""))
    except ValueError:
        raise ValueError(f"{amount!r} in the budget {text!r} is no number") from None
    return RankBudget(quantity, most, bool(relative), size, allocation)


def corrected_ranks(
    subject: Subject,
    curves: Sequence[Curve],
    budget: RankBudget,
    method: Method,
    calibration: Windows,
    folder: Path,
) -> Ranks:
    """Allocate ranks by damage, and once more by corrected damage."""
    model = subject.model
    ids = subject.windows.ids
    first = budget.ranks(curves)
    with as_stored(model) as own:
        plan = FactorPlan.all_by(Making(method), factorise_program(own, first))
        source, _ = make_factors(model, plan, calibration, folder, model_hash=subject.opened.hash)
        reference = ReferenceText(model, ProgramRun(model, own, ids))
        with progress("layers", len({curve.matrix.layer for curve in curves}), "layers") as ran:

            def together(ranks: Ranks) -> float:
                ran(1)
                changed = ProgramRun(model, factorise_program(own, ranks), ids, factors=source)
                return estimate(*reference.quality(changed)).divergence

            return budget.ranks(correct_curves(curves, first, together))


def factorise_program(own: Program, ranks: Mapping[Matrix, int | None]) -> Program:
    """Give a model's own program factors of these ranks; other matrices stay whole."""
    by_sublayer: dict[Sublayer, list[tuple[str, int]]] = {}
    for matrix, rank in ranks.items():
        if rank is not None:
            by_sublayer.setdefault(matrix.sublayer, []).append((matrix.role, rank))
    return own.map_sublayers(
        lambda one: replace(one, ranks=tuple(by_sublayer.get(Sublayer(one.kind, one.layers[:1]), ())))
    )


def write_recipe(
    folder: Path,
    subject: Subject,
    found: Spectrum,
    budget: RankBudget,
    ranks: Ranks,
    calibration: Calibration,
) -> Path:
    """Write recipe.yaml with the ranks that a spectrum gives, bound to the model; returns its path."""
    operation = as_operation(ranks, found.record["method"], calibration)
    recipe = Recipe(subject.opened.reference, (operation,), weights=subject.opened.hash)
    curves = found.curves
    whole = sum(parameters(curve, None) for curve in curves)
    kept = total_cost(curves, ranks) / whole
    comments = [
        f"# Ranks by {budget.allocation}, found by: {command_line()}",
        f"# {kept:.1%} of the {whole:,} parameters of {len(curves)} matrices are kept.",
    ]
    if all(curve.damage for curve in curves):
        comments.append(
            f"# Measured one by one, they add up to a divergence of {foreseen_damage(curves, ranks):.4g}."
        )
    path = folder / RECIPE
    write_text(path, "\n".join(comments) + "\n" + recipe.to_yaml())
    return path


def as_operation(ranks: Ranks, method: str, calibration: Calibration | None = None) -> AppliedOperation:
    """Make the entry of a recipe that gives matrices these ranks; a method that needs no text gets none."""
    layers = sorted({matrix.layer for matrix in ranks})
    stretch = range(layers[0], layers[-1] + 1)
    by_role: dict[str, dict[int, int | None]] = {}
    for matrix, rank in ranks.items():
        by_role.setdefault(matrix.role, {})[matrix.layer] = rank
    lists = {role: [given.get(layer) for layer in stretch] for role, given in by_role.items()}
    named = {
        role: given[0] if len(set(given)) == 1 else given for role, given in lists.items() if any(given)
    }
    given: dict[str, Any] = {"ranks": named, "method": method}
    if calibration is not None and method != "plain":
        given["calibration"] = dict(calibration)
    return AppliedOperation("lowrank", (stretch,), given)
