"""Allocated ranks as a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surgeon.analysis.allocation import Allocation, Curve, Ranks, allocate, foreseen_damage, parameters, total_cost
from surgeon.analysis.spectrum import Spectrum
from surgeon.analysis.subject import Subject
from surgeon.operations.lowrank import Calibration
from surgeon.provenance import command_line, write_text
from surgeon.recipe import AppliedOperation, Recipe

RECIPE = "recipe.yaml"


@dataclass(frozen=True)
class Share:
    """How many of the parameters that the matrices have in all are kept, and how they are shared out; checks itself.

    Raises:
        ValueError: if the share is not above 0 and at most 1.
    """

    keep: float
    allocation: Allocation

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ValueError(f"keep must be more than 0 and at most 1, not {self.keep:g}")

    def ranks(self, curves: Sequence[Curve]) -> Ranks:
        """A rank for each matrix; ValueError as `allocate`."""
        return allocate(curves, self.allocation, self.keep * sum(parameters(curve, None) for curve in curves))


def write_recipe(
    folder: Path, subject: Subject, found: Spectrum, share: Share, ranks: Ranks, calibration: Calibration
) -> Path:
    """Write recipe.yaml with the ranks that a spectrum gives, bound to the model; returns its path.

    Raises:
        OSError: if it cannot be written.
    """
    operation = as_operation(ranks, found.record["method"], calibration)
    recipe = Recipe(subject.reference, (operation,), weights=subject.model_hash)
    comments = [f"# Ranks by {share.allocation}, found by: {command_line()}", *_said(found.curves, ranks)]
    path = folder / RECIPE
    write_text(path, "\n".join(comments) + "\n" + recipe.to_yaml())
    return path


def as_operation(ranks: Ranks, method: str, calibration: Calibration | None = None) -> AppliedOperation:
    """The entry of a recipe that gives matrices these ranks; a method that needs no text gets none."""
    layers = sorted({matrix.layer for matrix in ranks})
    stretch = range(layers[0], layers[-1] + 1)
    by_role: dict[str, dict[int, int | None]] = {}
    for matrix, rank in ranks.items():
        by_role.setdefault(matrix.weight, {})[matrix.layer] = rank
    lists = {role: [given.get(layer) for layer in stretch] for role, given in by_role.items()}
    named = {role: given[0] if len(set(given)) == 1 else given for role, given in lists.items() if any(given)}
    given: dict[str, Any] = {"ranks": named, "method": method}
    if calibration is not None and method != "plain":
        given["calibration"] = dict(calibration)
    return AppliedOperation("lowrank", (stretch,), given)


def _said(curves: tuple[Curve, ...], ranks: Ranks) -> list[str]:
    """What there is to know of an allocation, as comments of a recipe."""
    whole = sum(parameters(curve, None) for curve in curves)
    kept = total_cost(curves, ranks) / whole
    lines = [f"# {kept:.1%} of the {whole:,} parameters of {len(curves)} matrices are kept."]
    if all(curve.damage for curve in curves):
        lines.append(f"# Measured one by one, they add up to a divergence of {foreseen_damage(curves, ranks):.4g}.")
    return lines
