"""What the weights of a recipe's program follow from: how matrices are factorised, and which units are kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from surgeon.analysis.factors.matrices import Matrix
from surgeon.language.operations.lowrank import Calibration, Method
from surgeon.language.program import ATTENTION, Program
from surgeon.language.recipe import Recipe
from surgeon.models.weights import ListedUnits, Magnitude, RandomUnits, UnitsByLayer, UnitSource
from surgeon.models.weights.decompose import ALPHA, NEEDS
from surgeon.opened import Model


@dataclass(frozen=True)
class Making:
    """How the factors of a matrix are found.

    Attributes:
        alpha: of the method activation.
    """

    method: Method = "plain"
    alpha: float = ALPHA

    @property
    def is_calibrated(self) -> bool:
        """Whether it goes by text."""
        return NEEDS[self.method] is not None


@dataclass(frozen=True)
class FactorPlan:
    """What factors a program needs, and which KV groups and neurons its narrowed sublayers have.

    Attributes:
        makings: of every matrix that the program has a rank for.
        calibration: the text that they go by; empty if none does.
        units: of every narrowed sublayer whose units do not follow from its weights, by kind and layer.
    """

    program: Program
    makings: Mapping[Matrix, Making]
    calibration: Calibration = field(default_factory=Calibration)
    units: Mapping[tuple[str, int], UnitSource] = field(default_factory=dict)

    @property
    def is_calibrated(self) -> bool:
        """Whether some factors go by text."""
        return any(making.is_calibrated for making in self.makings.values())

    @property
    def is_of_weights(self) -> bool:
        """Whether the model's weights alone say all of it."""
        return not self.is_calibrated and not self.units

    @property
    def source(self) -> UnitsByLayer | None:
        """Where its weights come from if nothing goes by text; None if the layers' weights alone say it."""
        return UnitsByLayer(self.units) if self.units else None

    @classmethod
    def all_by(cls, making: Making, program: Program) -> FactorPlan:
        """All factors of a program, made in one way."""
        ranked = (Matrix(sublayer, role) for sublayer in program.sublayers() for role, _ in sublayer.ranks)
        return cls(program, dict.fromkeys(ranked, making))

    def to_json(self) -> dict[str, Any]:
        """What the values of the factors follow from, beside the model and the text."""
        methods = {str(matrix): [making.method, making.alpha] for matrix, making in sorted(self.makings.items())}
        ways = {name: self.calibration.get(name, False) for name in ("sequential", "update")}
        units = {f"{kind}{layer}": str(source) for (kind, layer), source in sorted(self.units.items())}
        return {"program": str(self.program), "methods": methods, **ways, **({"units": units} if units else {})}


def plan_factors(recipe: Recipe, model: Model) -> FactorPlan:
    """What a recipe says of the weights of its program.

    Raises:
        ValueError: as `recipe_program`; and if two entries name different texts, with file and line.
    """
    program = model.program
    by_rank: dict[tuple[str, tuple[int, ...], str], Making] = {}
    calibration: Calibration | None = None
    units: dict[tuple[str, int], UnitSource] = {}
    for operation, program in recipe.steps(model.program, model.family.layer_shapes(model.config), model.own):
        making = Making(operation.parameters.get("method", "plain"), operation.parameters.get("alpha", ALPHA))
        ranked = ((one.kind, one.layers, role) for one in program.sublayers() for role, _ in one.ranks)
        new = {key for key in ranked if key not in by_rank}
        by_rank |= dict.fromkeys(new, making)
        narrow = {one.parts[0] for one in program.sublayers() if one.width is not None}
        units |= {part: _unit_source(part[0], operation.parameters) for part in narrow - units.keys()}
        if new and making.is_calibrated:
            given: Calibration = operation.parameters.get("calibration") or Calibration()
            if calibration is not None and calibration != given:
                raise ValueError(
                    f"{recipe.source}:{operation.line}: {operation.name}: calibration is another than that of an "
                    "earlier entry; factors are made in one walk through the model, so give all entries the same"
                )
            calibration = given
    makings = {
        Matrix(replace(sublayer, piece=None), role): by_rank[sublayer.kind, sublayer.layers, role]
        for sublayer in program.sublayers()
        for role, _ in sublayer.ranks
    }
    chosen = {part: source for part, source in units.items() if source != Magnitude()}
    return FactorPlan(program, makings, calibration or Calibration(), chosen)


def _unit_source(kind: str, parameters: Mapping[str, Any]) -> UnitSource:
    """What says which units an entry of a recipe keeps of a kind."""
    if kind == ATTENTION and isinstance(listed := parameters.get("heads"), list):
        return ListedUnits(tuple(listed))
    return RandomUnits(parameters.get("seed", 0)) if parameters.get("by") == "random" else Magnitude()
