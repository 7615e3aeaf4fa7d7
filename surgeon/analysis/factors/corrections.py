"""Ranks by damage, with what truncations of a layer's matrices do to each other.

Damage is measured of one matrix at a time. A layer's matrices cut at once do more, or less, than the sum, which is of
second order in their errors. So each layer is measured with all its matrices at the ranks that were found, their damage
is scaled by what comes out, and ranks are shared out again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel

from surgeon.analysis.factors.allocation import Curve, Ranks, corrected
from surgeon.analysis.factors.factor_plan import FactorPlan, Making, Target
from surgeon.analysis.factors.inputs import ProgramRun
from surgeon.analysis.factors.make_factors import make_factors
from surgeon.analysis.factors.rank_recipe import Share
from surgeon.language.execute import land
from surgeon.language.operations.lowrank import Method
from surgeon.language.program import Program, Sublayer
from surgeon.models.edit import as_stored, program_of
from surgeon.models.weights import FactorSource
from surgeon.progress import progress
from surgeon.quality.data import Windows
from surgeon.quality.head import OutputHead, ReferencePredictions, joined
from surgeon.quality.summary import Estimate, estimate


def corrected_ranks(
    model: PreTrainedModel,
    curves: Sequence[Curve],
    share: Share,
    method: Method,
    windows: Windows,
    calibration: Windows,
    folder: Path,
    model_hash: str,
) -> Ranks:
    """Ranks for a share of the parameters, shared out by damage and then once more by corrected damage.

    Args:
        method: of the factors.
        windows: what layers are measured on.
        calibration: what factors are calibrated on.
        folder: for the factors of the ranks that were found first.

    Raises:
        ValueError, OSError: as `allocate` and `make_factors`.
    """
    first = share.ranks(curves)
    with as_stored(model) as own:
        plan = plan_of(ranked(own, first), Making(method))
        source = make_factors(model, plan, calibration, folder, model_hash=model_hash).source
        measured = MeasuredText(model, windows, own)
        with progress("layers", len({curve.matrix.layer for curve in curves}), "layers") as ran:

            def together(ranks: Ranks) -> float:
                ran(1)
                return measured.quality(ranked(own, ranks), source).divergence

            return share.ranks(corrected(curves, first, together))


class MeasuredText:
    """A text and what a model predicts on it, to compare programs with factors with.

    Args:
        model: the layers that it is stored as.
        own: its program over these; by default they run one after the other.
    """

    def __init__(self, model: PreTrainedModel, windows: Windows, own: Program | None = None) -> None:
        self.model, self.windows, self.head = model, windows, OutputHead(model)
        self.references = list(self._references(own or program_of(model)))

    def _references(self, own: Program) -> Iterator[ReferencePredictions]:
        run = self._run(own)
        return (self.head.reference(land(part.state).stream, part.ids) for part in run.parts)

    def quality(self, program: Program, factors: FactorSource) -> Estimate:
        """Perplexity, and divergence from the model's own program."""
        parts = zip(self._run(program, factors).parts, self.references, strict=True)
        return estimate(*joined([self.head.compare(land(part.state).stream, known) for part, known in parts]))

    def _run(self, program: Program, factors: FactorSource | None = None) -> ProgramRun:
        run = ProgramRun(self.model, program, self.windows.ids, factors=factors)
        for _ in program.nodes:
            run.step()
        return run


def ranked(own: Program, ranks: Ranks) -> Program:
    """A model's own program with factors of these ranks; matrices that are not named stay whole."""
    by_sublayer: dict[tuple[str, int], list[tuple[str, int]]] = {}
    for matrix, rank in ranks.items():
        if rank is not None:
            by_sublayer.setdefault((matrix.kind, matrix.layer), []).append((matrix.weight, rank))

    def with_ranks(sublayer: Sublayer) -> Sublayer:
        return replace(sublayer, ranks=tuple(by_sublayer.get((sublayer.kind, sublayer.layers[0]), ())))

    return own.renamed(with_ranks)


def plan_of(program: Program, making: Making) -> FactorPlan:
    """All factors of a program, made in one way."""
    return FactorPlan(
        program, {Target(sublayer, role): making for sublayer in program.sublayers() for role, _ in sublayer.ranks}
    )
