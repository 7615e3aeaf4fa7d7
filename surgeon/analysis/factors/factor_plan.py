"""Weights of a recipe's program: how matrices are factorised, and which units are kept; made, or found."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from surgeon.analysis.factors.matrices import Matrix
from surgeon.checkpoint.factor_cache import file_name
from surgeon.checkpoint.tensor_file import read_header
from surgeon.language.operations.lowrank import Calibration, Method
from surgeon.language.operations.width import CRITERIA, Criterion, chosen_by
from surgeon.language.program import Program
from surgeon.language.recipe import Recipe
from surgeon.language.sublayer import ATTENTION, FEED_FORWARD, Sublayer
from surgeon.models.weights import (
    Factors,
    ListedUnits,
    Magnitude,
    RandomUnits,
    UnitsByLayer,
    UnitSource,
    Untold,
    WeightMatrix,
)
from surgeon.models.weights.decompose import ALPHA, NEEDS
from surgeon.opened import EditedModel, Model
from surgeon.processes.journal import Journal

WAYS = ("sequential", "update")  # in which factors go by a text
_TEXT = tuple(Calibration.__annotations__.keys() - set(WAYS))  # which text that is


@dataclass(frozen=True)
class Making:
    """A method of factorising a matrix; `alpha` belongs to the method activation."""

    method: Method = "plain"
    alpha: float = ALPHA

    @property
    def is_calibrated(self) -> bool:
        """True if it is calibrated on text."""
        return NEEDS[self.method] is not None


@dataclass(frozen=True)
class FactorPlan:
    """The factors that a program needs, and the KV groups and neurons of its narrowed sublayers.

    Attributes:
        makings: of every matrix that the program has a rank for.
        calibration: the text that they go by; empty if none does.
        units: of narrowed sublayers whose units are known without a text, by kind and layer.
        importance: the criterion of those whose units go by text, likewise.
    """

    program: Program
    makings: Mapping[Matrix, Making]
    calibration: Calibration = field(default_factory=Calibration)
    units: Mapping[tuple[str, int], UnitSource] = field(default_factory=dict)
    importance: Mapping[tuple[str, int], Criterion] = field(default_factory=dict)

    @property
    def has_calibrated_factors(self) -> bool:
        return any(making.is_calibrated for making in self.makings.values())

    @property
    def is_calibrated(self) -> bool:
        """True if some factors, or the choice of some units, are calibrated on text."""
        return bool(self.importance) or self.has_calibrated_factors

    @property
    def is_of_weights(self) -> bool:
        return not self.is_calibrated and not self.units

    @property
    def source(self) -> UnitsByLayer | None:
        """The source of its weights if nothing goes by text; None if the layers' weights alone tell it."""
        if self.units:
            return UnitsByLayer(self.units)
        return None

    @classmethod
    def all_by(cls, making: Making, program: Program) -> FactorPlan:
        """All factors of a program, made in one way."""
        ranked = (
            Matrix(sublayer, role) for sublayer in program.sublayers() for role, _ in sublayer.ranks
        )
        return cls(program, dict.fromkeys(ranked, making))

    def to_json(self) -> dict[str, Any]:
        """Identify the values of the factors, beside the model and the text."""
        methods = {
            str(matrix): [making.method, making.alpha] for matrix, making in sorted(self.makings.items())
        }
        ways = {name: self.calibration.get(name, False) for name in WAYS}
        chosen = sorted({**self.units, **self.importance}.items())
        units = {f"{kind}{layer}": str(by) for (kind, layer), by in chosen}
        return {
            "program": str(self.program),
            "methods": methods,
            **ways,
            **({"units": units} if units else {}),
        }


def plan_factors(recipe: Recipe, model: Model) -> FactorPlan:
    """Plan the weights of a recipe's program; ValueError if two entries name different texts."""
    program = model.program
    by_rank: dict[tuple[str, tuple[int, ...], str], Making] = {}
    calibration: Calibration | None = None
    has_factors = False
    units: dict[tuple[str, int], UnitSource | Criterion] = dict.fromkeys(
        _narrow_sublayers(program), Untold()
    )
    for operation, program in recipe.steps(
        model.program, model.family.layer_shapes(model.config), model.own
    ):
        making = Making(
            operation.parameters.get("method", "plain"), operation.parameters.get("alpha", ALPHA)
        )
        ranked = ((one.kind, one.layers, role) for one in program.sublayers() for role, _ in one.ranks)
        new = {key for key in ranked if key not in by_rank}
        by_rank |= dict.fromkeys(new, making)
        chosen = {
            part: _choice(part[0], operation.parameters)
            for part in _narrow_sublayers(program) - units.keys()
        }
        units |= chosen
        if any(kind == FEED_FORWARD and by == Untold() for (kind, _), by in chosen.items()):
            warnings.warn(
                f"{operation.name}: nothing says which neurons are kept, so that these are any; those that matter are "
                "kept with calibration: {data: text.txt, tokens: 32768}",
                stacklevel=2,
            )
        if (new and making.is_calibrated) or any(isinstance(by, str) for by in chosen.values()):
            given: Calibration = operation.parameters.get("calibration") or Calibration()
            # How factors go by the text is nothing to units.
            ways = WAYS if making.is_calibrated and has_factors else ()
            if calibration is not None and any(
                calibration.get(key) != given.get(key) for key in (*_TEXT, *ways)
            ):
                raise ValueError(
                    f"{recipe.source}:{operation.line}: {operation.name}: calibration is another than that of an "
                    "earlier entry; what goes by a text goes by the same one, so give all entries the same"
                )
            calibration = {**(calibration or {}), **given}
            has_factors |= making.is_calibrated
    makings = {
        Matrix(replace(sublayer, piece=None), role): by_rank[sublayer.kind, sublayer.layers, role]
        for sublayer in program.sublayers()
        for role, _ in sublayer.ranks
    }
    importance = {part: by for part, by in units.items() if isinstance(by, str)}
    told = {part: by for part, by in units.items() if not isinstance(by, str) and by != Untold()}
    return FactorPlan(program, makings, calibration or Calibration(), told, importance)


def _narrow_sublayers(program: Program) -> set[tuple[str, int]]:
    return {one.parts[0] for one in program.sublayers() if one.width is not None}


def _choice(kind: str, parameters: Mapping[str, Any]) -> UnitSource | Criterion:
    """The source of an entry's kept units of a kind, or a criterion that goes by text."""
    if kind == ATTENTION and isinstance(listed := parameters.get("heads"), list):
        return ListedUnits(tuple(listed))
    by = chosen_by(parameters)
    if by in CRITERIA:
        return by
    if by == "random":
        return RandomUnits(parameters.get("seed") or 0)
    # Both give the same order of KV groups.
    return Magnitude() if by == "magnitude" and kind == FEED_FORWARD else Untold()


JOURNAL = "journal.jsonl"
RECORD = "factors.json"


@dataclass(frozen=True)
class FactorFacts:
    """Facts about the factors of one matrix.

    Attributes:
        rank, full_rank: theirs, and the matrix's.
        features: its inputs.
        reached: how many directions of its outputs the inputs have an order for.
        samples: tokens that it was calibrated on; 0 for a method that needs none.
        loss: the error of the outputs on these tokens, as a share of their size; None where it is not known.
    """

    rank: int
    full_rank: int
    features: int
    reached: int
    samples: int
    loss: float | None


@dataclass(eq=False)
class FactorJournal(Journal):
    """Factors in a folder, by matrix; they depend on `identity`."""

    facts: dict[Matrix, FactorFacts] = field(default_factory=dict, init=False)

    def file(self, matrix: Matrix) -> Path:
        assert self.path is not None
        return self.path.with_name(file_name(matrix.sublayer, matrix.role))

    def has(self, matrix: Matrix) -> bool:
        """Tell whether they are there; missing or damaged ones that should be are warned of."""
        if matrix not in self.facts:
            return False
        try:
            read_header(self.file(matrix))
        except (FileNotFoundError, ValueError) as error:
            what = "is gone" if isinstance(error, FileNotFoundError) else "is damaged"
            warnings.warn(f"{self.file(matrix)} {what}; it is made again", stacklevel=2)
            return False
        return True

    def take(self, line: Any) -> None:
        (sublayer,) = Program.parse(line["sublayer"]).sublayers()
        self.facts[Matrix(sublayer, line["role"])] = FactorFacts(**line["made"])


class NoSource:
    """The source of factors that are read before they are made."""

    def factors(self, sublayer: Sublayer, role: str, matrix: WeightMatrix) -> Factors:  # noqa: ARG002
        raise ValueError(f"there are no factors of {role} of {sublayer} in the folder; make them again")


def notes_on(facts: Mapping[Matrix, FactorFacts]) -> Iterator[str]:
    """Notes on the text that factors were calibrated on."""
    calibrated = {matrix: found for matrix, found in facts.items() if found.samples}

    def others(count: int) -> str:
        if count == 1:
            return ""
        return f" (and likewise of {count - 1} more)"

    short = {matrix: found for matrix, found in calibrated.items() if found.samples < found.features}
    if short:
        matrix, found = max(short.items(), key=lambda item: item[1].features)
        yield (
            f"the calibration text has {found.samples} tokens, fewer than the {found.features} inputs of {matrix}"
            f"{others(len(short))}: it says nothing of some of them; give more tokens"
        )
    singular = {matrix: found for matrix, found in calibrated.items() if found.reached < found.full_rank}
    if singular:
        matrix, found = min(singular.items(), key=lambda item: item[1].reached / item[1].full_rank)
        yield (
            f"the inputs of {matrix} reach {found.reached} of {found.full_rank} directions of its outputs"
            f"{others(len(singular))}: beyond these it is truncated as without a text"
        )


def with_units(edited: EditedModel, plan: FactorPlan) -> EditedModel:
    """Choose an edited model's heads and neurons that its recipe names without a text."""
    if plan.source is None:
        return edited
    return replace(edited, factors=plan.source, factors_identity=plan.to_json())
