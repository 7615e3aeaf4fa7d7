"""Ranks shared out with what a layer's matrices do together, against whole models that are edited and run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from surgeon.analysis.factors.factor_plan import FactorPlan, Making
from surgeon.analysis.factors.make_factors import make_factors
from surgeon.analysis.factors.matrices import Matrix
from surgeon.analysis.factors.program_run import ProgramRun, ReferenceText
from surgeon.analysis.factors.ranks import (
    RankBudget,
    allocate,
    corrected_ranks,
    factorise_program,
    parameters,
)
from surgeon.checkpoint.factor_cache import FactorCache
from surgeon.language.program import Program
from surgeon.models.edit import edit, program_of, restore
from surgeon.models.weights import TruncatedSVD
from tests.analysis.spectra import CALIBRATION, MEASURED, logits_of, run
from tests.analysis.subjects import subject_of
from tests.tiny_models import tiny_model


def divergence(model: Any, program: Program, factors: Any) -> float:
    """KL(original || edited), the mean over predicted tokens."""
    original = logits_of(model, MEASURED.ids)
    edited = logits_of(edit(model, program, factors=factors), MEASURED.ids)
    restore(model)
    return float(functional.kl_div(edited, original, log_target=True, reduction="batchmean"))


def test_programs_with_factors_are_measured_as_they_run(tmp_path: Path) -> None:
    model = tiny_model("llama", 3)
    ranks = {Matrix.of(0, "q"): 6, Matrix.of(1, "down"): 7, Matrix.of(2, "k"): None}
    program = factorise_program(program_of(model), ranks)
    assert str(program) == "A0@q6 F0 A1 F1@down7 A2 F2"
    source, _ = make_factors(
        model,
        FactorPlan.all_by(Making("whitened"), program),
        CALIBRATION,
        tmp_path,
        model_hash="weights",
    )
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    expected = divergence(model, program, source)
    reference = ReferenceText(model, ProgramRun(model, program_of(model), MEASURED.ids))
    _, measured = reference.quality(ProgramRun(model, program, MEASURED.ids, factors=source))
    assert measured.mean() == pytest.approx(expected, rel=1e-4)


def test_layers_are_weighed_by_what_their_matrices_do_together(tmp_path: Path) -> None:
    model = tiny_model("llama", 3)
    curves = run(tmp_path / "spectrum", model, ranks="1/8,1/4,1/2").curves
    share = RankBudget("params", 0.5, relative=True)
    folder = tmp_path / "factors"
    found = corrected_ranks(subject_of(model, MEASURED), curves, share, "whitened", CALIBRATION, folder)
    budget = 0.5 * sum(parameters(curve, None) for curve in curves)
    first = allocate(curves, "damage", budget)
    source, weights = FactorCache(TruncatedSVD(), folder), {}
    for layer in range(3):
        own = {matrix: rank for matrix, rank in first.items() if matrix.layer == layer}
        alone = sum(
            float(curve.damage_by_rank()[rank])
            for curve in curves
            if (rank := own.get(curve.matrix)) is not None
        )
        weights[layer] = divergence(model, factorise_program(program_of(model), own), source) / alone
    assert np.ptp(list(weights.values())) > 0.01
    again = [_weighed(curve, weights[curve.matrix.layer]) for curve in curves]
    assert found == allocate(again, "damage", budget)
    assert torch.equal(logits_of(model, MEASURED.ids), logits_of(tiny_model("llama", 3), MEASURED.ids))


def _weighed(curve: Any, weight: float) -> Any:
    """The same curve of damages, multiplied."""
    scaled = {rank: damage * weight for rank, damage in curve.damage.items()}
    return type(curve)(curve.matrix, curve.size, curve.values, scaled)
