"""The factors of all ranks that a search may choose for a matrix, cut from those of the highest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
from surgeon.language.program import Program
from surgeon.language.sublayer import Sublayer
from surgeon.models.weights import Factors, FactorSource, TruncatedSVD, WeightMatrix
from surgeon.searches.spaces.measured_ranks import MeasuredRanks

HASH_DIGITS = 12  # that tell models' folders apart


@dataclass(frozen=True)
class NestedFactors:
    """Factors of any rank up to the one that a source has: the first rows of its first factor, columns of its second.

    Attributes:
        highest: by layer and role, the rank that the source has.
    """

    source: FactorSource
    highest: Mapping[tuple[int, str], int]

    def factors(self, sublayer: Sublayer, role: str, matrix: WeightMatrix) -> Factors:
        rank, (layer,) = sublayer.rank(role), sublayer.layers
        whole = replace(sublayer, ranks=((role, self.highest[layer, role]),))
        first, second = self.source.factors(whole, role, matrix)
        return Factors(first[:rank], second[:, :rank])


def open_factors(
    subject: Subject, programs: Iterable[Program], ranks: MeasuredRanks | None, folder: Path, make: bool
) -> NestedFactors | None:
    """The factors that a search measures, each made once, in files that all trials and workers share; None without any.

    Args:
        programs: of the edits, which have the ranks that a trial may have.
        ranks: what a spectrum has measured, whose factors are made for the unedited model's inputs; None: plain ones,
            of the matrices alone, each made when it is first asked for.
        folder: where they lie, a file for each matrix.
        make: make what is missing of those that go by inputs; else they are there.

    Raises:
        FileNotFoundError, ValueError: as `load_recorded` and `make_factors`.
        OSError: if the folder cannot be written to.
    """
    highest: dict[tuple[int, str], int] = {}
    for sublayer in (one for program in programs for one in program.sublayers()):
        for role, rank in sublayer.ranks:
            where = sublayer.layers[0], role
            highest[where] = max(rank, highest.get(where, 0))
    if not highest:
        return None
    if ranks is None or ranks.method == "plain":
        own = folder / f"plain-{subject.opened.hash[:HASH_DIGITS]}"
        own.mkdir(parents=True, exist_ok=True)
        return NestedFactors(FactorCache(TruncatedSVD(), own), highest)
    source: FactorSource = FactorCache(NoSource(), folder)
    if make:
        text = load_recorded(subject.opened, ranks.calibration)
        wanted = {Matrix.of(layer, role): rank for (layer, role), rank in highest.items()}
        plan = FactorPlan.all_by(Making(ranks.method), ranked(subject.opened.program, wanted))
        source = make_factors(
            subject.model, plan, text, folder, model_hash=subject.opened.hash, memory=subject.memory
        ).source
    return NestedFactors(source, highest)
