"""Ranks by damage, with what truncations of a layer's matrices do to each other.

Damage is measured of one matrix at a time. A layer's matrices cut at once do more, or less, than the sum, which is of
second order in their errors. So each layer is measured with all its matrices at the ranks that were found, their damage
is scaled by what comes out, and ranks are shared out again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel

from surgeon.analysis.factors.allocation import Curve, Ranks, corrected
from surgeon.analysis.factors.factor_plan import FactorPlan, Making
from surgeon.analysis.factors.make_factors import make_factors
from surgeon.analysis.factors.program_run import ProgramRun, ReferenceText
from surgeon.analysis.factors.rank_recipe import Share
from surgeon.language.operations.lowrank import Method
from surgeon.language.program import Program, Sublayer
from surgeon.models.edit import as_stored
from surgeon.progress import progress
from surgeon.quality.data import Windows
from surgeon.quality.summary import estimate


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
        plan = FactorPlan.all_by(Making(method), ranked(own, first))
        source = make_factors(model, plan, calibration, folder, model_hash=model_hash).source
        reference = ReferenceText(model, ProgramRun(model, own, windows.ids))
        with progress("layers", len({curve.matrix.layer for curve in curves}), "layers") as ran:

            def together(ranks: Ranks) -> float:
                ran(1)
                changed = ProgramRun(model, ranked(own, ranks), windows.ids, factors=source)
                return estimate(*reference.quality(changed)).divergence

            return share.ranks(corrected(curves, first, together))


def ranked(own: Program, ranks: Ranks) -> Program:
    """A model's own program with factors of these ranks; matrices that are not named stay whole."""
    by_sublayer: dict[Sublayer, list[tuple[str, int]]] = {}
    for matrix, rank in ranks.items():
        if rank is not None:
            by_sublayer.setdefault(matrix.sublayer, []).append((matrix.role, rank))

    def with_ranks(sublayer: Sublayer) -> Sublayer:
        stored = Sublayer(sublayer.kind, sublayer.layers[:1])
        return replace(sublayer, ranks=tuple(by_sublayer.get(stored, ())))

    return own.renamed(with_ranks)
