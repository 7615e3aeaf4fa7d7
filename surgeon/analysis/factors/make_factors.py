"""Factors for a program's matrices, made for the inputs that these get on a text, one node of the program at a time.

A folder gets a file for each matrix, as `surgeon.checkpoint.factor_cache` reads them, as soon as its factors are made:
started again on the same folder, the work goes on where it was, with equal results. Inputs are those in the program
with whole matrices, or with `sequential` those in the program as it has become so far: matrices that read the stream
come before those behind them. Inside a fork, all matrices are whole until those of the fork are made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from surgeon.analysis.factors.factor_folder import (
    GRADIENTS,
    RECORD,
    FactorFolder,
    FactorJournal,
    Made,
    NoSource,
    notes_on,
)
from surgeon.analysis.factors.factor_plan import FactorPlan, Making, Target
from surgeon.analysis.factors.gradients import squared_gradients
from surgeon.analysis.factors.inputs import InputSums, ProgramRun, Renaming, reads_stream, targets_in
from surgeon.analysis.factors.matrices import Matrix
from surgeon.checkpoint.factor_cache import FactorCache, write_factors
from surgeon.language.execute import State
from surgeon.language.program import WRITING, Node, Step, Sublayer
from surgeon.memory import stay_below
from surgeon.models.edit import as_stored, check_layers, program_of
from surgeon.models.families import family_of
from surgeon.models.weights import Factors
from surgeon.models.weights.decompose import (
    NEEDS,
    Decomposer,
    Statistics,
    decomposer,
    factors_by,
    fitted,
    truncation_loss,
)
from surgeon.models.weights.whitening import SecondMoment
from surgeon.processes.files import write_json
from surgeon.progress import progress
from surgeon.provenance import FORMAT
from surgeon.quality.data import Windows


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
) -> FactorFolder:
    """Make the factors of all matrices that a program has a rank for, and write them and `factors.json`.

    Args:
        model: whole in memory or streamed; it is left as it is. The program is over the layers that it is stored as.
        windows: the text to calibrate on; None if no method goes by one.
        folder: made if it is not there.
        memory: a limit in bytes on the memory of the whole process.
        record: provenance to begin `factors.json` with.
        kept: what the factors will be rounded to where they are used; the folder has them in float32.

    Raises:
        ValueError: if the model runs a program whose weights are those of no layer, or one of its own where a method
            goes by its gradients; if the program does not fit it, numbers are not finite (naming layer and matrix), the
            memory limit is too small, or the folder holds factors of something else.
        OSError: if the folder cannot be written to, or another process is writing to it.
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
    with as_stored(model) as own, FactorJournal(folder, identity) as journal:
        _check_gradients(plan, own == program_of(model))
        work = _Work(model, plan, windows, journal, memory, kept)
        if work.missing:
            work.make_missing()
        notes = tuple(notes_on(journal.made))
        made = {str(target): vars(found) for target, found in journal.made.items()}
        write_json(folder / RECORD, (record or {}) | identity | {"matrices": made, "notes": notes})
        return FactorFolder(work.kept, journal.made, notes)


def _check_gradients(plan: FactorPlan, unedited: bool) -> None:
    if not unedited and any(making.method == "fisher" for making in plan.makings.values()):
        raise ValueError(
            "the method fisher goes by gradients through layers one after the other, and the model runs a program of "
            "its own; use whitened"
        )


class _Work:
    """Makes what a folder does not have yet."""

    def __init__(
        self,
        model: PreTrainedModel,
        plan: FactorPlan,
        windows: Windows | None,
        journal: FactorJournal,
        memory: int | None,
        rounded_to: torch.dtype,
    ) -> None:
        self.model, self.plan, self.windows, self.journal, self.memory = model, plan, windows, journal, memory
        self.rounded_to = rounded_to
        self.kept = FactorCache(NoSource(), journal.folder)
        self.sequential = bool(plan.calibration.get("sequential"))
        self.update = bool(plan.calibration.get("update"))
        self.missing = [target for target in sorted(plan.makings) if not journal.has(target)]
        self.gradients: dict[Matrix, Tensor] = {}

    def make_missing(self) -> None:
        """Go through the program up to the last node that lacks factors."""
        nodes = self.plan.program.nodes
        places = [place for place, node in enumerate(nodes) if targets_in(node, self.missing)]
        with progress("factors", len(self.plan.makings), "matrices", len(self.plan.makings) - len(self.missing)) as ran:
            self._find_gradients()
            run, whole = self._run(), self._run() if self.update else None
            for place in range(places[-1] + 1):
                before = len(self.missing)
                states = self._make(nodes[place], run, whole)
                ran(before - len(self.missing))
                if place < places[-1]:
                    run.step(states)
                    if whole is not None:
                        whole.step(self._see_whole(whole))

    def _run(self) -> ProgramRun:
        assert self.windows is not None
        return ProgramRun(self.model, self.plan.program, self.windows.ids, self._beside_bytes(), self.memory, self.kept)

    def _beside_bytes(self) -> int:
        """What sums over inputs and the decomposition of a matrix take."""
        shapes = family_of(self.model.config).layer_shapes(self.model.config).matrices
        sizes = [shapes[target.role] for target in self.missing]
        widest = max((inputs for _, inputs in sizes), default=0)
        largest = max((outputs * inputs for outputs, inputs in sizes), default=0)
        return 8 * ((5 + self.update) * widest**2 + 4 * largest)

    def _find_gradients(self) -> None:
        wanted = {
            Matrix(layer, target.role, target.sublayer.kind)
            for target in self.plan.makings
            if self.plan.makings[target].method == "fisher"
            for layer in target.sublayer.layers
        }
        if wanted:
            assert self.windows is not None
            matrices = sorted(wanted, key=lambda matrix: (matrix.layer, matrix.kind, matrix.weight))
            kept, identity = self.journal.folder / GRADIENTS, self.journal.identity
            self.gradients = squared_gradients(self.model, self.windows.ids, matrices, kept, identity)

    def _make(self, node: Node, run: ProgramRun, whole: ProgramRun | None) -> list[State] | None:
        """Make a node's missing factors; the states after the node, if it ran as it has to."""
        states = None
        for targets, run_as in self._stages(node):
            sums, states = self._collect(targets, run_as, run, whole)
            for group in _groups(targets):
                known = next((sums[target] for target in group if target in sums), None)
                self._factorise([target for target in group if target in self.missing], known, run)
        return None if self.sequential else states

    def _stages(self, node: Node) -> Iterator[tuple[list[Target], Renaming]]:
        """Which matrices of a node are made together, and what of its sublayers runs meanwhile."""
        targets = targets_in(node, self.missing)
        first = [target for target in targets if reads_stream(target)]
        behind = [target for target in targets if not reads_stream(target)]
        if self.sequential and isinstance(node, Step):
            if first:
                yield first, _without_ranks
            if behind:
                yield behind, _with_first_ranks
        elif targets or not self.sequential:
            yield targets, _without_ranks

    def _collect(
        self, targets: Sequence[Target], run_as: Renaming, run: ProgramRun, whole: ProgramRun | None
    ) -> tuple[dict[Target, InputSums], list[State]]:
        """Sums over the inputs of one matrix of each group, and the states after the node."""
        watched = {
            group[0]: group for group in _groups(targets) if any(self.plan.makings[t].is_calibrated for t in group)
        }
        sums: dict[Target, InputSums] = {}
        others: dict[Target, list[Tensor]] = {}

        def seen(target: Target, inputs: Tensor) -> None:
            if target not in sums:
                moment = self.update or any(NEEDS[self.plan.makings[t].method] == "moment" for t in watched[target])
                sums[target] = InputSums(inputs.shape[-1], inputs.device, moment, self.update)
            sums[target].add(inputs, others[target].pop(0) if whole is not None else None)

        states = []
        for index, part in enumerate(run.parts):
            if whole is not None and watched:
                others.clear()
                whole.see(whole.parts[index], _without_ranks, watched, lambda t, x: others.setdefault(t, []).append(x))
            states.append(run.see(part, run_as, watched, seen))
            stay_below(self.memory)
        return sums, states

    @staticmethod
    def _see_whole(whole: ProgramRun) -> list[State]:
        return [whole.see(part, _without_ranks, (), lambda *_: None) for part in whole.parts]

    def _factorise(self, targets: Sequence[Target], known: InputSums | None, run: ProgramRun) -> None:
        """Make the factors of matrices that get the same inputs."""
        ways: dict[Making, Decomposer] = {}
        for target in targets:
            making = self.plan.makings[target]
            if making.method == "fisher" or making not in ways:  # gradients are each matrix's own
                ways[making] = decomposer(making.method, self._statistics(target, known), making.alpha)
            calibrated = known if making.is_calibrated else None
            factors, made = self._factors(target, _values_of(target, run), ways[making], calibrated)
            write_factors(self.journal.file(target), factors)
            self.journal.add(target, made)
            self.missing.remove(target)
            stay_below(self.memory)

    def _factors(
        self, target: Target, matrix: Tensor, decompose: Decomposer, known: InputSums | None
    ) -> tuple[Factors, Made]:
        rank = target.sublayer.rank(target.role)
        assert rank is not None
        found = decompose(matrix)
        factors = factors_by(matrix, found.left, rank)
        if self.update and known is not None and known.moment is not None:
            factors = fitted(matrix, factors, known.moment, known.cross, self.rounded_to)
        factors = Factors(*(factor.float().cpu() for factor in factors))
        loss = None if known is None or known.moment is None else _share_lost(matrix, factors, known.moment)
        samples = 0 if known is None else known.samples
        return factors, Made(rank, min(matrix.shape), matrix.shape[1], found.reached, samples, loss)

    def _statistics(self, target: Target, known: InputSums | None) -> Statistics:
        layers = (Matrix(layer, target.role, target.sublayer.kind) for layer in target.sublayer.layers)
        gradients = [self.gradients[matrix] for matrix in layers if matrix in self.gradients]
        return Statistics(
            None if known is None else known.moment,
            None if known is None else known.size / known.samples,
            torch.stack(gradients).mean(0) if gradients else None,
        )


def _values_of(target: Target, run: ProgramRun) -> Tensor:
    """The matrix that factors stand for, (out, in), in float32 or wider."""
    weights = run.parts[0].machine.layers.weights()
    matrix = weights.matrix(replace(target.sublayer, ranks=()), target.role)
    values = matrix.whole(torch.promote_types(matrix.dtype, torch.float32))
    if not values.isfinite().all():
        raise ValueError(f"{target} holds NaN or infinity; fetch or convert the checkpoint again")
    return values


def _groups(targets: Sequence[Target]) -> list[list[Target]]:
    """Targets that get the same inputs."""
    found: dict[tuple[Sublayer, bool], list[Target]] = {}
    for target in targets:
        found.setdefault((target.sublayer, reads_stream(target)), []).append(target)
    return list(found.values())


def _without_ranks(sublayer: Sublayer) -> Sublayer:
    return replace(sublayer, ranks=())


def _with_first_ranks(sublayer: Sublayer) -> Sublayer:
    """With factors in place of what reads the stream only."""
    return replace(sublayer, ranks=tuple(entry for entry in sublayer.ranks if entry[0] not in WRITING))


def _share_lost(matrix: Tensor, factors: Factors, moment: SecondMoment) -> float | None:
    nothing = Factors(torch.zeros_like(factors.first), torch.zeros_like(factors.second))
    whole = truncation_loss(matrix.cpu(), nothing, moment)
    return truncation_loss(matrix.cpu(), factors, moment) / whole if whole > 0 else None
