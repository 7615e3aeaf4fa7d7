"""Ranks under a budget, and allocated ranks as a recipe.

Damage is measured of one matrix at a time. A layer's matrices cut at once do more, or less, than the sum, by a term of
second order in their errors. So ranks by damage are allocated twice: each layer is measured with all its matrices at
their first ranks, their damage is scaled by the result, and ranks are allocated again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from surgeon.analysis.factors.allocation import (
    Allocation,
    Cost,
    Curve,
    Ranks,
    allocate,
    correct_curves,
    foreseen_damage,
    parameters,
    total_cost,
    wire_values,
)
from surgeon.analysis.factors.factor_plan import FactorPlan, Making
from surgeon.analysis.factors.make_factors import make_factors
from surgeon.analysis.factors.matrices import Matrix
from surgeon.analysis.factors.program_run import ProgramRun, ReferenceText
from surgeon.analysis.subject import Subject
from surgeon.errors import did_you_mean
from surgeon.findings.spectrum import Spectrum
from surgeon.language.operations.applied import AppliedOperation
from surgeon.language.operations.lowrank import Calibration, Method
from surgeon.language.program import Program
from surgeon.language.recipe import Recipe
from surgeon.language.sublayer import Sublayer
from surgeon.machine import parse_size
from surgeon.models.edit import as_stored
from surgeon.processes.files import write_text
from surgeon.progress import progress
from surgeon.provenance import command_line
from surgeon.quality.data import Windows
from surgeon.quality.summary import estimate

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
        source = make_factors(model, plan, calibration, folder, model_hash=subject.opened.hash).source
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
    return own.renamed(
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
