"""Findings of passes over the same model, for a search that is given their folders.

A cell of a scan on the search's own text is a measured program, window by window, and is not measured again. Choices of
the search's edits among them (a longer stretch of LP pairs is several pairs together) teach its regression before there
is a trial. A spectrum has measured ranks of single matrices, which become the edits of the space `rank`, with factors
made as there. Passes on another text order what is measured.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from surgeon.analysis.engine.measure import read_programs
from surgeon.analysis.engine.sharing import simplify
from surgeon.analysis.factors.factor_plan import FactorPlan, Making, NoSource
from surgeon.analysis.factors.make_factors import make_factors
from surgeon.analysis.factors.matrices import Matrix
from surgeon.analysis.factors.ranks import factorise_program
from surgeon.analysis.scan import JOURNAL
from surgeon.analysis.spectrum import read_findings
from surgeon.analysis.subject import Subject, load_recorded
from surgeon.checkpoint.factor_cache import FactorCache
from surgeon.findings.scan import Scan
from surgeon.findings.sensitivity import Sensitivity
from surgeon.findings.similarity import Similarity
from surgeon.findings.spectrum import Spectrum
from surgeon.language.operations.applied import Choice, Edit, as_choice
from surgeon.language.operations.lowrank import saves
from surgeon.language.program import Program
from surgeon.language.sublayer import Sublayer
from surgeon.models.weights import Factors, FactorSource, TruncatedSVD, WeightMatrix
from surgeon.opened import Model
from surgeon.quality.data import Windows
from surgeon.quality.summary import ACCEPTANCES, Quality, mean_divergence, quality_of
from surgeon.searches.evaluate import Terms, TermsPlan
from surgeon.searches.mixture import Mixture, Trial
from surgeon.searches.optimise import Counts, Numbers
from surgeon.searches.proposer import Proposer
from surgeon.searches.question import PricedQuestion
from surgeon.searches.spaces.rank import LowRanks, MatrixRanks

PASSES = (Scan, Spectrum, Similarity, Sensitivity)  # that a search has a use for
MOST_COMPARED = 64  # edits that are known, and run for what they do together
FEW = 8  # edits of a kind, which are all measured
# The proxy for leaving out a layer, or its attention or MLP.
_PARTS = {"": "block_influence", "attention": "attention_size", "mlp": "mlp_size"}
# Spaces whose layers miss what the one before adds. Ladders miss it, too, but what an order of them by that leaves
# unmeasured is as good as chance (docs/measured-searches.md), so that all of them are measured.
_BESIDE = ("pair", "par", "tracks", "desync", "fuse")


@dataclass(frozen=True)
class KnownPass:
    """Findings of one pass over the same weights.

    Attributes:
        name: of the pass's command.
        programs: by their text, the quality on all of the search's text; none if the pass is of another text.
        divergence: of every program, on whatever text it was measured: nats per token.
        ranks: measured by a spectrum.
        missed: by layer, a number that rises with the damage of not seeing what the layer before adds.
        removed: by an edit's option and the layer, one that rises with the damage of losing the layer, or a part of it.
    """

    name: str
    folder: Path
    programs: Mapping[str, Quality] = field(default_factory=dict)
    divergence: Mapping[str, float] = field(default_factory=dict)
    ranks: MatrixRanks | None = None
    missed: Mapping[int, float] = field(default_factory=dict)
    removed: Mapping[tuple[str, int], float] = field(default_factory=dict)

    def foresees(self, edit: Edit, mixture: Mixture) -> float:
        """A number that rises with an edit's damage; NaN where the pass has none."""
        if self.divergence:
            return self.divergence.get(str(simplify(mixture.program((edit,)))), math.nan)
        if edit.space == "drop":
            return sum(self.removed.get((edit.option, layer), math.nan) for layer in edit.layers)
        if edit.space not in _BESIDE:
            return math.nan
        # The first layer of a group sees what it always saw; a late one misses something by itself.
        return sum(self.missed.get(layer, math.nan) for layer in edit.layers[1:] or edit.layers)

    def foreseen(self, mixture: Mixture) -> int:
        return sum(math.isfinite(self.foresees(edit, mixture)) for edit in mixture.edits)


@dataclass(frozen=True)
class Known:
    """All passes that a search is given."""

    passes: tuple[KnownPass, ...] = ()

    @property
    def identity(self) -> dict[str, Any]:
        """The inputs of a study beside its settings."""
        digests = []
        for one in self.passes:
            ranks = one.ranks and [sorted(map(str, one.ranks.measured.items())), one.ranks.parameters]
            orders = [
                sorted(one.missed.items()),
                [[*key, value] for key, value in sorted(one.removed.items())],
            ]
            found = [one.name, sorted(one.divergence.items()), sorted(one.programs), ranks, orders]
            digests.append(hashlib.sha256(json.dumps(found).encode()).hexdigest())
        if digests:
            return {"using": digests}
        return {}

    @property
    def ranks(self) -> MatrixRanks | None:
        """Ranks of the space `rank`, if there is a spectrum."""
        return next((one.ranks for one in self.passes if one.ranks is not None), None)

    def mixture(self, mixture: Mixture) -> Mixture:
        """Give the spaces the edits that passes have measured."""
        ranks = self.ranks
        if ranks is None:
            return mixture
        spaces = mixture.spaces
        return replace(
            mixture,
            spaces=tuple(
                replace(ranks, ranks=one.ranks) if isinstance(one, LowRanks) else one for one in spaces
            ),
        )

    def find_quality(self, program: Program) -> Quality | None:
        """A program's quality on the search's text, if a pass has measured it."""
        text = str(simplify(program))
        return next((one.programs[text] for one in self.passes if text in one.programs), None)

    def choices(self, mixture: Mixture) -> dict[Choice, float]:
        """The divergence of unbroken stretches of edits, of two or more, on the search's text."""
        texts = [text for one in self.passes if one.ranks is None for text in one.programs]
        with_ranks = any("@" in text for text in texts)
        found = dict[Choice, float]()
        for stretch in mixture.stretches() if texts else ():
            if stretch[0].space == LowRanks.name and not with_ranks:
                continue  # such stretches are many
            for length in range(2, len(stretch) + 1):
                choice = as_choice(stretch[:length])
                if choice not in found and mixture.allows(choice):
                    measured = self.find_quality(mixture.program(choice))
                    if measured is not None:
                        found[choice] = measured.divergence
        return found

    def plan(self, question: PricedQuestion) -> TermsPlan:
        """Plan the measurement of single edits.

        Known ones run only where a good choice may have them, for their correlations. Of edits of one kind, where they
        are many and a pass orders them, the better half is measured, and those without an order.
        """
        mixture = question.mixture
        whole = TermsPlan.whole(mixture)
        if not self.passes:
            return whole
        measured = [self.find_quality(program) for program in whole.programs]
        divergences = np.array([np.nan if one is None else one.divergence for one in measured])
        guess = Terms(np.where(np.isnan(divergences), 0.0, divergences), np.eye(len(divergences)))
        running = Proposer(mixture, guess, question.prices, question.goals).running[:MOST_COMPARED]
        run = np.isnan(divergences) | np.isin(np.arange(len(divergences)), running)
        foreseen, groups = self.foreseen(mixture)
        for group in set(groups.tolist()):
            ordered = np.flatnonzero((groups == group) & np.isnan(divergences) & np.isfinite(foreseen))
            if len(ordered) > FEW:
                order = ordered[np.argsort(foreseen[ordered], kind="stable")]
                run[order[max(FEW, len(order) // 2) :]] = False
        return replace(whole, known=divergences, run=run, foreseen=foreseen, groups=groups)

    def foreseen(self, mixture: Mixture) -> tuple[Numbers, Counts]:
        """(edits,) each: a number that rises with edits' damage, NaN where passes have none, and the group.

        A group are edits of one space, option and number of layers. Its numbers are those of one pass, as those of two
        do not compare: of the first one that knows most of them.
        """
        numbers: dict[tuple[str, str, int], int] = {}
        groups = np.array(
            [numbers.setdefault((e.space, e.option, len(e.layers)), len(numbers)) for e in mixture.edits]
        )
        found = np.full(len(groups), np.nan)
        for one in self.passes:
            values = np.array([one.foresees(edit, mixture) for edit in mixture.edits])
            values[np.isinf(values)] = np.nan  # no power law goes through these
            for group in range(len(numbers)):
                own = groups == group
                if np.isnan(values[own]).sum() < np.isnan(found[own]).sum():
                    found[own] = values[own]
        return found, groups

    def notes(self, mixture: Mixture) -> Iterator[str]:
        """Notes for the user on each pass."""
        for one in self.passes:
            if not one.foreseen(mixture):
                yield f"the {one.name} in {one.folder} says nothing of the edits of this search; nothing is taken of it"
            elif one.divergence and not one.programs:
                yield (
                    f"the {one.name} in {one.folder} is of another text than this search: it says where to look first, "
                    "and its numbers stand for no measurement"
                )

    def record(self, mixture: Mixture, trials: Sequence[Trial]) -> list[dict[str, Any]]:
        """Record what each pass gave: how many single edits, choices and trials."""
        singles = {str(simplify(program)) for program in mixture.single_edits}
        choices = {str(simplify(mixture.program(choice))) for choice in self.choices(mixture)}
        tried = {str(simplify(trial.program)) for trial in trials}
        return [
            {
                "pass": one.name,
                "folder": str(one.folder),
                "same_text": bool(one.programs),
                "edits": len(singles & one.programs.keys()),
                "choices": len(choices & one.programs.keys()),
                "trials": len(tried & one.programs.keys()),
                "foreseen": one.foreseen(mixture) - len(singles & one.programs.keys()),
            }
            for one in self.passes
        ]


def read_known(folders: Iterable[Path], model: Model, windows: Windows) -> Known:
    """Read the findings of passes from their folders.

    Raises:
        FileNotFoundError: if a folder holds no finished pass that a search has a use for.
        ValueError: if one is of another model, or damaged; or if there are two spectra.
    """
    passes = tuple(one for folder in folders for one in _read_folder(folder, model, windows))
    spectra = [one for one in passes if one.ranks is not None]
    if len(spectra) > 1:
        raise ValueError(
            f"{spectra[0].folder} and {spectra[1].folder} are two spectra, and ranks are those of one; give one of them"
        )
    if not spectra or spectra[0].ranks is None or spectra[0].ranks.method == "plain":
        return Known(passes)
    # Programs of other passes have plain factors, where a search's are not.
    findings = []
    for one in passes:
        if one.ranks is None:
            programs = {text: quality for text, quality in one.programs.items() if "@" not in text}
            divergence = {text: value for text, value in one.divergence.items() if "@" not in text}
            findings.append(replace(one, programs=programs, divergence=divergence))
        else:
            findings.append(one)
    return Known(tuple(findings))


def _read_folder(folder: Path, model: Model, windows: Windows) -> Iterator[KnownPass]:
    there = [kind for kind in PASSES if (folder / kind.RECORD).is_file()]
    if not there:
        *names, last = (kind.COMMAND for kind in PASSES)
        raise FileNotFoundError(
            f"{folder} holds no finished {', '.join(names)} or {last}, which a search could use"
        )
    if Scan in there:
        Scan.read(folder, model.hash)
        identity, values = read_programs(folder / JOURNAL, "scan")
        programs = {}
        divergence = {}
        for text, (nll, diverged, done, *accepted) in values.items():
            seen = ~np.isnan(done)
            divergence[text] = mean_divergence(diverged[seen])
            if seen.all() and identity.get("data") == windows.digest:
                by_name = zip(ACCEPTANCES, accepted, strict=True)
                measured = {name: own for name, own in by_name if not np.isnan(own).any()}
                programs[text] = quality_of(
                    {"nll": nll, "divergence": diverged, **measured}, windows.predicted_tokens
                )
        yield KnownPass(Scan.COMMAND, folder, programs, divergence)
    if Spectrum in there:
        yield _read_spectrum(folder, model, windows)
    if Similarity in there:
        table = Similarity.read(folder, model.hash).layers
        removed = {
            (option, layer): value
            for option, name in _PARTS.items()
            for layer, value in _by_layer(table["layer"], table[name]).items()
        }
        missed = _by_layer(table["layer"], 1 - table[["cka_attention", "cka_mlp"]].mean(axis=1))
        yield KnownPass(Similarity.COMMAND, folder, missed=missed, removed=removed)
    if Sensitivity in there:
        pairs = Sensitivity.read(folder, model.hash).pairs
        yield KnownPass(
            Sensitivity.COMMAND, folder, missed=_by_layer(pairs["last"], pairs["relative_bound"])
        )


def _by_layer(layers: pd.Series[int], values: pd.Series[float]) -> dict[int, float]:
    return {
        int(layer): float(value)
        for layer, value in zip(layers, values, strict=True)
        if math.isfinite(value)
    }


def _read_spectrum(folder: Path, model: Model, windows: Windows) -> KnownPass:
    record = Spectrum.read(folder, model.hash).record
    identity, found = read_findings(folder)
    method = record["method"]
    calibration = record.get("calibration_text")
    if calibration is None:
        raise ValueError(
            f"{folder} was made by an earlier version of surgeon spectrum, and does not name the text that its factors "
            "go by; run the same command again"
        )
    programs = {}
    divergence = {}
    ranks: dict[tuple[int, str], list[int]] = {}
    for truncation, quality in found.damage.items():
        matrix = truncation.matrix
        rank = truncation.rank
        if truncation.method != method or not saves(rank, *found.spectra[matrix].size):
            continue  # it is of another method, or larger than the matrix
        ranks.setdefault((matrix.layer, matrix.role), []).append(rank)
        text = str(factorise_program(model.program, {matrix: rank}))
        divergence[text] = mean_divergence(quality["divergence"])
        if identity.get("data") == windows.digest:
            programs[text] = quality_of(quality, windows.predicted_tokens)
    if not ranks:
        raise ValueError(
            f"{folder} has measured no rank that saves parameters, so that there is nothing to search; run surgeon "
            "spectrum again, with lower ranks"
        )
    by_matrix = {where: tuple(sorted(own, reverse=True)) for where, own in sorted(ranks.items())}
    return KnownPass(
        Spectrum.COMMAND,
        folder,
        programs,
        divergence,
        MatrixRanks(measured=by_matrix, method=method, calibration=calibration),
    )


HASH_DIGITS = 12  # that tell models' folders apart


@dataclass(frozen=True)
class NestedFactors:
    """Factors of any rank up to the source's: the first rows of its first factor, and columns of its second.

    Attributes:
        highest: by layer and role, the rank that the source has.
    """

    source: FactorSource
    highest: Mapping[tuple[int, str], int]

    def factors(self, sublayer: Sublayer, role: str, matrix: WeightMatrix) -> Factors:
        rank = sublayer.rank(role)
        (layer,) = sublayer.layers
        whole = replace(sublayer, ranks=((role, self.highest[layer, role]),))
        first, second = self.source.factors(whole, role, matrix)
        return Factors(first[:rank], second[:, :rank])


def open_factors(
    subject: Subject, programs: Iterable[Program], ranks: MatrixRanks | None, folder: Path, make: bool
) -> NestedFactors | None:
    """Open the factors that a search measures, each made once, in files that all workers share; None without ranks.

    Args:
        ranks: measured by a spectrum, whose factors are made for the unedited model's inputs; None: plain ones, of the
            matrices alone, each made when it is first asked for.
        make: make missing ones that go by inputs; else they are there.
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
        plan = FactorPlan.all_by(Making(ranks.method), factorise_program(subject.opened.program, wanted))
        source, _ = make_factors(
            subject.model, plan, text, folder, model_hash=subject.opened.hash, memory=subject.memory
        )
    return NestedFactors(source, highest)
