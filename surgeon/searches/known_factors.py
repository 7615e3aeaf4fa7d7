"""The factors of all ranks that a search may choose for a matrix, cut from those of the highest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from surgeon.analysis.factors.calibration import load_recorded
from surgeon.analysis.factors.factor_folder import NoSource
from surgeon.analysis.factors.factor_plan import FactorPlan, Making
from surgeon.analysis.factors.make_factors import make_factors
from surgeon.analysis.factors.matrices import Matrix
from surgeon.analysis.factors.rank_recipe import ranked
from surgeon.analysis.subject import Subject
from surgeon.checkpoint.factor_cache import FactorCache
from surgeon.language.program import Sublayer
from surgeon.models.weights import Factors, FactorSource, WeightMatrix
from surgeon.searches.spaces.measured_ranks import MeasuredRanks


@dataclass(frozen=True)
class NestedFactors:
    """Factors of any rank up to the one that a source has: the first rows of its first factor, columns of its second.

    Attributes:
        highest: by layer and role, the rank that the source has.
    """

    source: FactorSource
    highest: Mapping[tuple[int, str], int]

    def factors(self, sublayer: Sublayer, role: str, matrix: WeightMatrix) -> Factors:
        """As `FactorSource`."""
        rank, (layer,) = sublayer.rank(role), sublayer.layers
        whole = replace(sublayer, ranks=((role, self.highest[layer, role]),))
        first, second = self.source.factors(whole, role, matrix)
        return Factors(first[:rank], second[:, :rank])


def open_factors(subject: Subject, ranks: MeasuredRanks | None, folder: Path, make: bool) -> NestedFactors | None:
    """The factors that a search measures, made for the unedited model's inputs; None for plain ones.

    Args:
        folder: where they lie, a file for each matrix.
        make: make what is missing; else they are there.

    Raises:
        FileNotFoundError, ValueError: as `load_recorded` and `make_factors`.
        OSError: if the folder cannot be written to.
    """
    if ranks is None or ranks.method == "plain":
        return None
    highest = {where: own[0] for where, own in ranks.ranks.items()}
    source: FactorSource = FactorCache(NoSource(), folder)
    if make:
        text = load_recorded(subject.opened, ranks.calibration)
        wanted = {Matrix.of(layer, role): rank for (layer, role), rank in highest.items()}
        plan = FactorPlan.all_by(Making(ranks.method), ranked(subject.opened.program, wanted))
        source = make_factors(
            subject.model, plan, text, folder, model_hash=subject.opened.hash, memory=subject.memory
        ).source
    return NestedFactors(source, highest)
