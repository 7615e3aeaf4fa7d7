"""Factors for a program's matrices, made for their inputs on a text, one node of the program at a time.

A folder gets a file for each matrix as soon as its factors are made, so that the work goes on where it was, with equal
results. Inputs are those in the program with whole matrices, or with `sequential` in the program as it has become so
far: matrices that read the stream come before those behind them. Inside a fork, all matrices are whole until those of
the fork are made.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from surgeon.analysis.factors.factor_plan import (
    JOURNAL,
    RECORD,
    WAYS,
    FactorFacts,
    FactorJournal,
    FactorPlan,
    Making,
    NoSource,
    notes_on,
    plan_factors,
    with_units,
)
from surgeon.analysis.factors.matrices import Matrix
from surgeon.analysis.factors.program_run import InputSums, ProgramRun, Renaming, matrices_in
from surgeon.analysis.importance import unit_importance
from surgeon.analysis.subject import calibration_entry, load_for_analysis, load_recorded
from surgeon.checkpoint.factor_cache import FactorCache, write_factors
from surgeon.language.execute import State
from surgeon.language.operations.width import CRITERIA, chosen_by
from surgeon.language.program import Node, Step
from surgeon.language.sublayer import WRITING, Sublayer
from surgeon.machine import stay_below
from surgeon.models.edit import as_stored
from surgeon.models.families import family_of
from surgeon.models.shapes import check_layers
from surgeon.models.weights import Factors, FactorSource, ScoredUnits, UnitsByLayer, UnitSource
from surgeon.models.weights.decompose import (
    NEEDS,
    Decomposer,
    Statistics,
    decomposer,
    factors_by,
    fit_second_factor,
    truncation_loss,
)
from surgeon.opened import EditedModel
from surgeon.processes.files import write_json
from surgeon.progress import progress
from surgeon.quality.data import Windows
from surgeon.version import FORMAT


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
) -> tuple[FactorCache, list[str]]:
    """Make the factors of all matrices that a program has a rank for, and write them and `factors.json`.

    Returns:
        Their source, and notes that the user should see, one line each.

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
        notes = list(notes_on(journal.facts))
        matrices = {str(matrix): vars(found) for matrix, found in journal.facts.items()}
        write_json(folder / RECORD, (record or {}) | identity | {"matrices": matrices, "notes": notes})
        return source, notes


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
            matrix_sums = sums.get(group[0])
            ways: dict[Making, Decomposer] = {}
            for matrix in group:
                making = self.plan.makings[matrix]
                if making not in ways:
                    statistics = Statistics()
                    if matrix_sums is not None:
                        statistics = Statistics(
                            matrix_sums.moment, matrix_sums.sizes / matrix_sums.samples
                        )
                    ways[making] = decomposer(making.method, statistics, making.alpha)
                stored = weights.matrix(replace(matrix.sublayer, ranks=()), matrix.role)
                values = stored.whole(torch.promote_types(stored.dtype, torch.float32))
                if not values.isfinite().all():
                    raise ValueError(
                        f"{matrix} holds NaN or infinity; fetch or convert the checkpoint again"
                    )
                own = matrix_sums if making.is_calibrated else None
                moment = None if own is None else own.moment
                rank = matrix.sublayer.rank(matrix.role)
                assert rank is not None
                found = ways[making](values)
                factors = factors_by(values, found.left, rank)
                if own is not None and moment is not None and self.update:
                    factors = fit_second_factor(values, factors, moment, own.cross, self.rounded_to)
                factors = Factors(*(factor.float().cpu() for factor in factors))
                loss = None
                if moment is not None:
                    nothing = Factors(torch.zeros_like(factors.first), torch.zeros_like(factors.second))
                    whole = truncation_loss(values.cpu(), nothing, moment)
                    if whole > 0:
                        loss = truncation_loss(values.cpu(), factors, moment) / whole
                samples = 0 if own is None else own.samples
                facts = FactorFacts(
                    rank, min(values.shape), values.shape[1], found.reached, samples, loss
                )
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

        def add_inputs(matrix: Matrix, inputs: Tensor) -> None:
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
            states.append(self.run.see(part, watched, add_inputs, run_as))
            stay_below(self.memory)
        return sums, states


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
        source, said = make_factors(
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
        notes += said
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
