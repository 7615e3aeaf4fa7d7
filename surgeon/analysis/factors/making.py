"""Weights of a recipe's program: plans of how matrices are factorised and units are kept, and the factors.

Factors are made for the inputs of matrices on a text, one node of the program at a time. A folder gets a file for each
matrix as soon as its factors are made, so that the work goes on where it was, with equal results. Inputs are those in
the program with whole matrices, or with `sequential` in the program as it has become so far: matrices that read the
stream come before those behind them. Inside a fork, all matrices are whole until those of the fork are made.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from surgeon.analysis.factors.matrices import Matrix, ProgramRun, Renaming, matrices_in
from surgeon.checkpoint.factor_cache import FactorCache, file_name, write_factors
from surgeon.checkpoint.tensor_file import read_header
from surgeon.language.execute import State
from surgeon.language.operations.lowrank import Calibration, Method
from surgeon.language.operations.width import CRITERIA, Criterion, chosen_by
from surgeon.language.program import Node, Program, Step
from surgeon.language.recipe import Recipe
from surgeon.language.sublayer import ATTENTION, FEED_FORWARD, WRITING, Sublayer
from surgeon.machine import stay_below
from surgeon.models.edit import as_stored, check_layers
from surgeon.models.families import family_of
from surgeon.models.weights import (
    Factors,
    FactorSource,
    ListedUnits,
    Magnitude,
    RandomUnits,
    ScoredUnits,
    UnitsByLayer,
    UnitSource,
    Untold,
    WeightMatrix,
)
from surgeon.models.weights.decompose import (
    ALPHA,
    NEEDS,
    Decomposer,
    SecondMoment,
    Statistics,
    decomposer,
    factors_by,
    fit_second_factor,
    truncation_loss,
)
from surgeon.opened import EditedModel, Model
from surgeon.processes.files import write_json
from surgeon.processes.journal import Journal
from surgeon.progress import progress
from surgeon.provenance import FORMAT
from surgeon.quality.data import Windows

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


@dataclass(frozen=True)
class FactorFolder:
    """The result of `make_factors`.

    Attributes:
        source: of the factors.
        facts: by matrix.
        notes: what the user should know, one line each.
    """

    source: FactorCache
    facts: Mapping[Matrix, FactorFacts]
    notes: tuple[str, ...]


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


def make_factors(
    model: PreTrainedModel,
    plan: FactorPlan,
    windows: Windows | None,
    folder: Path,
    *,
    model_hash: str,
    memory: int | None = None,
    record: dict[str, Any] | None = None,
    kept: torch.dtype = torch.float32,
    units: Mapping[tuple[str, int], UnitSource] | None = None,
) -> FactorFolder:
    """Make the factors of all matrices that a program has a rank for, and write them and `factors.json`.

    Args:
        model: whole in memory or streamed; it is left as it is. The program is over the layers that it is stored as.
        windows: the text to calibrate on; None if no method goes by one.
        memory: a limit in bytes on the memory of the whole process.
        record: provenance to begin `factors.json` with.
        kept: the dtype that factors will be rounded to where they are used; the folder has them in float32.
        units: sources of narrowed sublayers' units, by kind and layer; by default their weights.
    """
    check_layers(plan.program, model.config.num_hidden_layers)
    assert windows is not None or not plan.is_calibrated
    identity = {
        "format": FORMAT,
        "model_hash": model_hash,
        "calibration": None if windows is None else windows.digest,
        "dtype": str(model.dtype).removeprefix("torch."),
        **plan.to_json(),
    }
    if plan.calibration.get("update"):
        kept = max(kept, torch.float32, key=lambda dtype: torch.finfo(dtype).eps)
        identity["kept"] = str(kept).removeprefix("torch.")
    with as_stored(model), FactorJournal(folder / JOURNAL, "factors", identity) as journal:
        source = FactorCache(UnitsByLayer(units or {}, NoSource()), folder)
        missing = [matrix for matrix in sorted(plan.makings) if not journal.has(matrix)]
        if missing:
            assert windows is not None
            _Work(model, plan, missing, windows.ids, journal, memory, kept, source).make_missing()
        notes = tuple(notes_on(journal.facts))
        matrices = {str(matrix): vars(found) for matrix, found in journal.facts.items()}
        write_json(folder / RECORD, (record or {}) | identity | {"matrices": matrices, "notes": notes})
        return FactorFolder(source, journal.facts, notes)


class InputSums:
    """Sums over the inputs of one matrix, or of several that read the same.

    Attributes:
        moment: Z'Z, Z the inputs; None if it is not asked for.
        cross: X'Z, X the inputs of the same tokens in another run; None if there is none.
        size: of each input, summed over tokens, (in,), float64.
        samples: tokens.
    """

    def __init__(self, features: int, device: torch.device, moment: bool, cross: bool) -> None:
        self.moment = SecondMoment(features, device) if moment else None
        self.cross = (
            torch.zeros(features, features, dtype=torch.float64, device=device) if cross else None
        )
        self.size = torch.zeros(features, dtype=torch.float64, device=device)
        self.samples = 0

    def add(self, inputs: Tensor, others: Tensor | None = None) -> None:
        """Take in a batch, (..., in), and the other run's."""
        rows = inputs.detach().flatten(0, -2).double()
        self.size += rows.abs().sum(0)
        self.samples += len(rows)
        if self.moment is not None:
            self.moment.add(inputs)
        if self.cross is not None:
            assert others is not None
            self.cross.addmm_(others.detach().flatten(0, -2).to(rows).T, rows)


@dataclass(eq=False)
class _Work:
    """Makes missing factors in a run of the program, and with `update` in one beside it, with whole matrices."""

    model: PreTrainedModel
    plan: FactorPlan
    missing: list[Matrix]
    ids: Tensor
    journal: FactorJournal
    memory: int | None
    rounded_to: torch.dtype
    source: FactorSource

    def __post_init__(self) -> None:
        self.sequential = bool(self.plan.calibration.get("sequential"))
        self.update = bool(self.plan.calibration.get("update"))
        config = self.model.config
        shapes = family_of(config).layer_shapes(config).matrices
        sizes = [shapes[matrix.role] for matrix in self.missing]
        # Beside the streams there are sums over inputs, and the decomposition of a matrix.
        widest = max(inputs for _, inputs in sizes)
        largest = max(outputs * inputs for outputs, inputs in sizes)
        beside = 8 * ((5 + self.update) * widest**2 + 4 * largest)
        runs = [
            ProgramRun(self.model, self.plan.program, self.ids, beside, self.memory, self.source)
            for _ in range(1 + self.update)
        ]
        self.run = runs[0]
        self.whole = runs[1] if self.update else None

    def make_missing(self) -> None:
        """Go through the program up to the last node that lacks factors."""
        nodes = self.plan.program.nodes
        whole = self.whole
        places = [place for place, node in enumerate(nodes) if matrices_in(node, self.missing)]
        with progress(
            "factors", len(self.plan.makings), "matrices", len(self.plan.makings) - len(self.missing)
        ) as ran:
            for place in range(places[-1] + 1):
                before = len(self.missing)
                states = None
                for matrices, run_as in self._stages(nodes[place]):
                    states = self._make(matrices, run_as)
                ran(before - len(self.missing))
                if place < places[-1]:
                    self.run.step(None if self.sequential else states)
                    if whole is not None:
                        whole.step(
                            [
                                whole.see(part, (), lambda *_: None, _without_ranks)
                                for part in whole.parts
                            ]
                        )

    def _make(self, matrices: Sequence[Matrix], run_as: Renaming) -> list[State]:
        """Make factors of matrices of the next node; the states after it, as it ran."""
        groups: dict[tuple[Sublayer, bool], list[Matrix]] = {}
        for matrix in matrices:
            groups.setdefault(matrix.inputs, []).append(matrix)
        sums, states = self._collect(list(groups.values()), run_as)
        weights = self.run.parts[0].machine.layers.weights()
        for group in groups.values():
            known = sums.get(group[0])
            ways: dict[Making, Decomposer] = {}
            for matrix in group:
                making = self.plan.makings[matrix]
                if making not in ways:
                    statistics = Statistics()
                    if known is not None:
                        statistics = Statistics(known.moment, known.size / known.samples)
                    ways[making] = decomposer(making.method, statistics, making.alpha)
                stored = weights.matrix(replace(matrix.sublayer, ranks=()), matrix.role)
                values = stored.whole(torch.promote_types(stored.dtype, torch.float32))
                if not values.isfinite().all():
                    raise ValueError(
                        f"{matrix} holds NaN or infinity; fetch or convert the checkpoint again"
                    )
                own = known if making.is_calibrated else None
                factors, facts = self._factors(matrix, values, ways[making], own)
                write_factors(self.journal.file(matrix), factors)
                self.journal.keep(
                    {"sublayer": str(matrix.sublayer), "role": matrix.role, "made": vars(facts)}
                )
                self.missing.remove(matrix)
                stay_below(self.memory)
        return states

    def _stages(self, node: Node) -> Iterator[tuple[list[Matrix], Renaming]]:
        """Yield matrices of a node that are made together, with the sublayers that run meanwhile."""
        matrices = matrices_in(node, self.missing)
        if self.sequential and isinstance(node, Step):
            first = [matrix for matrix in matrices if matrix.role not in WRITING]
            behind = [matrix for matrix in matrices if matrix.role in WRITING]
            if first:
                yield first, _without_ranks
            if behind:
                # Matrices that read the stream have their factors by now.
                yield (
                    behind,
                    lambda one: replace(
                        one, ranks=tuple(entry for entry in one.ranks if entry[0] not in WRITING)
                    ),
                )
        elif matrices or not self.sequential:
            yield matrices, _without_ranks

    def _collect(
        self, groups: Sequence[list[Matrix]], run_as: Renaming
    ) -> tuple[dict[Matrix, InputSums], list[State]]:
        """Sums over the inputs of the first matrix of each group that goes by text, and the states after the node."""
        makings = self.plan.makings
        whole = self.whole
        watched = {
            group[0]: group for group in groups if any(makings[one].is_calibrated for one in group)
        }
        sums: dict[Matrix, InputSums] = {}
        others: dict[Matrix, list[Tensor]] = {}

        def seen(matrix: Matrix, inputs: Tensor) -> None:
            if matrix not in sums:
                moment = self.update or any(
                    NEEDS[makings[one].method] == "moment" for one in watched[matrix]
                )
                sums[matrix] = InputSums(inputs.shape[-1], inputs.device, moment, self.update)
            sums[matrix].add(inputs, others[matrix].pop(0) if whole is not None else None)

        states = []
        for index, part in enumerate(self.run.parts):
            if whole is not None and watched:
                others.clear()
                others.update((matrix, []) for matrix in watched)
                whole.see(
                    whole.parts[index],
                    watched,
                    lambda matrix, x: others[matrix].append(x),
                    _without_ranks,
                )
            states.append(self.run.see(part, watched, seen, run_as))
            stay_below(self.memory)
        return sums, states

    def _factors(
        self, matrix: Matrix, values: Tensor, decompose: Decomposer, known: InputSums | None
    ) -> tuple[Factors, FactorFacts]:
        """A matrix's factors and facts; `known` are sums over its inputs, if it goes by them."""
        rank = matrix.sublayer.rank(matrix.role)
        assert rank is not None
        found = decompose(values)
        factors = factors_by(values, found.left, rank)
        loss = None
        moment = None if known is None else known.moment
        if known is not None and moment is not None and self.update:
            factors = fit_second_factor(values, factors, moment, known.cross, self.rounded_to)
        factors = Factors(*(factor.float().cpu() for factor in factors))
        if moment is not None:
            nothing = Factors(torch.zeros_like(factors.first), torch.zeros_like(factors.second))
            whole = truncation_loss(values.cpu(), nothing, moment)
            if whole > 0:
                loss = truncation_loss(values.cpu(), factors, moment) / whole
        samples = 0 if known is None else known.samples
        return factors, FactorFacts(
            rank, min(values.shape), values.shape[1], found.reached, samples, loss
        )


def _without_ranks(sublayer: Sublayer) -> Sublayer:
    return replace(sublayer, ranks=())


def with_factors(
    edited: EditedModel, folder: Path, memory: int | None = None, kept: torch.dtype | None = None
) -> EditedModel:
    """Make or find the factors that a recipe has calibrated on a text, and choose heads and neurons by it.

    The recipe then names the text that was used; notes on the factors are warnings. A model without such a recipe, or
    with factors already, comes back as it is.

    Args:
        memory: the most that making them may take, in bytes.
        kept: the dtype they will be stored in, where that is not the model's own.
    """
    recipe = edited.recipe
    model = edited.model
    if recipe is None or edited.factors is not None:
        return edited
    plan = plan_factors(recipe, model)
    if not plan.is_calibrated:
        return with_units(edited, plan)
    # What makes them takes a second to import, which most recipes have no use for.
    from surgeon.analysis.factors.making import make_factors
    from surgeon.analysis.importance import unit_importance
    from surgeon.analysis.subject import calibration_entry, load_for_analysis, load_recorded

    windows = load_recorded(model, plan.calibration)
    loaded = load_for_analysis(model, memory)
    notes = list(windows.notes)
    used = calibration_entry(windows, plan.calibration.get("after", 0))
    by = plan.importance
    found = unit_importance(loaded, by, windows, folder, model_hash=model.hash, memory=memory)
    scored = {part: ScoredUnits(values, by[part]) for part, values in found.items()}
    units = {**plan.units, **scored}
    source: FactorSource = UnitsByLayer(units)
    if plan.has_calibrated_factors:
        ways = {way: True for way in WAYS if plan.calibration.get(way)}
        record = model.provenance(calibration_text={**used, **ways}) | {"model": recipe.model}
        made = make_factors(
            loaded,
            plan,
            windows,
            folder,
            model_hash=model.hash,
            memory=memory,
            record=record,
            kept=kept or model.dtype,
            units=units,
        )
        source = made.source
        notes = [*notes, *made.notes]
    for note in notes:
        warnings.warn(note, stacklevel=2)
    # The recipe names the text that was used; a file goes by its bare name, not by where it lies here.
    data = Path(used["data"])
    named = {**used, "data": data.name if data.is_absolute() else str(data)}
    entries = []
    for entry in recipe.operations:
        given = entry.parameters
        criterion = chosen_by(given) if entry.name == "width" else None
        if given.get("method", "plain") == "plain" and criterion not in CRITERIA:
            entries.append(entry)
            continue
        ways = {way: True for way in WAYS if given.get("calibration", {}).get(way)}
        entries.append(replace(entry, parameters={**given, "calibration": {**named, **ways}}))
    published = replace(recipe, operations=tuple(entries))
    identity = plan.to_json() | {"calibration": windows.digest}
    return replace(edited, recipe=published, factors=source, factors_identity=identity)


def with_units(edited: EditedModel, plan: FactorPlan) -> EditedModel:
    """Choose an edited model's heads and neurons that its recipe names without a text."""
    if plan.source is None:
        return edited
    return replace(edited, factors=plan.source, factors_identity=plan.to_json())
