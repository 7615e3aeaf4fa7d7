"""Singular values of a model's matrices, and the damage of cutting each of them down to a lower rank.

One walk through the model, node by node. Before a node lie the streams of the text to calibrate on, which give the
second moments of its matrices' inputs, and of the text to measure on, from which every truncation of one of its
matrices goes on: layers before the changed one run once for all of them. The two texts differ, so that a truncation is
not measured on the text it was fitted to. A fork of a program of its own (native tracks) is one node, all of which runs
again for each truncation in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
from transformers import PreTrainedModel

from surgeon.analysis.engine.machine import HEAD_NOT_FINITE
from surgeon.analysis.factors.matrices import Matrices, Matrix, choose_weights, find_matrices
from surgeon.analysis.factors.program_run import ProgramRun, ReferenceText, matrices_in
from surgeon.analysis.factors.ranks import Curve, effective_rank, energy_rank, kept_parameters
from surgeon.analysis.subject import Subject, calibration_entry
from surgeon.findings.spectrum import METHODS, Spectrum, TargetRank, parse_ranks
from surgeon.language.operations.base import show_range
from surgeon.language.program import Program
from surgeon.language.sublayer import Sublayer
from surgeon.models.edit import as_stored, program_of
from surgeon.models.families import family_of
from surgeon.models.weights.decompose import (
    SecondMoment,
    Whitening,
    decompose,
    truncate,
    whiten,
)
from surgeon.processes.journal import Journal, read_journal
from surgeon.progress import progress
from surgeon.quality.data import Windows
from surgeon.quality.summary import ESTIMATE_COLUMNS, Values, estimate, perplexity, perplexity_interval
from surgeon.words import show_value

JOURNAL = "journal.jsonl"
ByWindow = dict[str, Values]  # nll and divergence from the original, nats per token, (windows,) each


@dataclass(frozen=True)
class SingularValues:
    """The singular values of one matrix.

    Attributes:
        size: (out_features, in_features).
        values: by method, of W and of W S, largest first.
        factor: how S was made, as in `Whitening.how`.
        input_rank: the rank of S.
    """

    size: tuple[int, int]
    values: Mapping[str, Values]
    factor: str
    input_rank: int


@dataclass(frozen=True)
class Truncation:
    """One matrix cut down to a rank."""

    matrix: Matrix
    method: str
    rank: int


@dataclass(eq=False)
class SpectrumJournal(Journal):
    """A spectrum's measurements, kept in a file as they are made.

    Attributes:
        base_nll: the unedited model's negative log-likelihood by window, once it is known.
        spectra: by matrix.
        damage: by truncation.
    """

    base_nll: Values | None = field(default=None, init=False)
    spectra: dict[Matrix, SingularValues] = field(default_factory=dict, init=False)
    damage: dict[Truncation, ByWindow] = field(default_factory=dict, init=False)

    def take(self, line: Any) -> None:
        if "base" in line:
            self.base_nll = np.array(line["base"], dtype=np.float64)
            return
        matrix = Matrix.of(line["layer"], line["weight"])
        if "rank" in line:
            numbers = {name: np.array(line[name], dtype=np.float64) for name in ("nll", "divergence")}
            self.damage[Truncation(matrix, line["method"], line["rank"])] = numbers
            return
        values = {name: np.array(line[name], dtype=np.float64) for name in METHODS}
        out_features, in_features = line["size"]
        self.spectra[matrix] = SingularValues(
            (out_features, in_features), values, line["factor"], line["input_rank"]
        )


def read_findings(folder: Path) -> tuple[dict[str, Any], SpectrumJournal]:
    """Read a folder's journal, with the identity of its numbers."""
    found = SpectrumJournal(None, "spectrum")
    return read_journal(folder / JOURNAL, "spectrum", lambda line, _: found.take(line)), found


Method = Literal["whitened", "plain"]
DEFAULT_RANKS = parse_ranks("1/8,1/4,1/2,3/4")


@dataclass(frozen=True)
class SpectrumRequest:
    """A command's request; made by `request`, which checks it.

    Attributes:
        ranks: to cut each matrix down to; none if no damage is measured.
        method: by which singular vectors.
    """

    layers: range
    weights: tuple[str, ...]
    ranks: tuple[TargetRank, ...]
    method: Method


def request(
    config: Any,
    *,
    layers: range | None = None,
    weights: Sequence[str] | None = None,
    ranks: Sequence[TargetRank] = DEFAULT_RANKS,
    method: Method = "whitened",
) -> SpectrumRequest:
    """Make a request to a model of this configuration; by default for all of it."""
    if method not in get_args(Method):
        raise ValueError(f"there is no method {method!r}; use whitened or plain")
    chosen = choose_weights(family_of(config), weights)
    everything = range(config.num_hidden_layers)
    if layers is None:
        layers = everything
    if not layers or layers.start < 0 or layers.stop > len(everything):
        raise ValueError(
            f"layers {show_range(layers)} are out of range: the model's layers are {show_range(everything)}"
        )
    return SpectrumRequest(layers, chosen, tuple(ranks), method)


def spectrum(
    subject: Subject, calibration: Windows, folder: Path, wanted: SpectrumRequest, after: int = 0
) -> Spectrum:
    """Find singular values and damage, and write `spectrum.csv`, `singular_values.csv`, `damage.csv`, `spectrum.json`.

    Computed values of the folder are used again. The tables have what is asked for now, the journal also what was asked
    for before. A model that runs a program of its own (native tracks, say) has the matrices of the layers that it is
    stored as, and is compared with itself.

    Args:
        subject: damage is measured on its text.
        calibration: text of the inputs, for whitening.
        after: how many tokens come before it in its data.
    """
    model = subject.model
    windows = subject.windows
    identity = subject.identity(
        calibration=calibration.digest,
        window=windows.ids.shape[1],
        dtype=str(model.dtype).removeprefix("torch."),
    )
    record = subject.provenance(
        **calibration.record("calibration"), calibration_tokens=calibration.ids.numel()
    )
    record["calibration_text"] = calibration_entry(calibration, after)
    with as_stored(model) as program:
        if program != program_of(model):
            record["program"] = str(program)
        # A folder of an earlier version has damage of late steps that ran as ordinary ones.
        if ">" in str(program):
            identity["late_steps"] = "late"
        work = _Work(model, program, wanted)
        with SpectrumJournal(folder / JOURNAL, "spectrum", identity) as journal:
            work.fill(journal, windows, calibration)
    spectra = {matrix: journal.spectra[matrix] for matrix in work.all}
    values = []
    for matrix, matrix_spectrum in spectra.items():
        for method in METHODS:
            columns = {"layer": matrix.layer, "weight": matrix.role, "method": method}
            places = range(len(matrix_spectrum.values[method]))
            values.append(
                pd.DataFrame(columns | {"index": places, "value": matrix_spectrum.values[method]})
            )
    measured = {one: journal.damage[one] for matrix in work.all for one in work.truncations[matrix]}
    damage = []
    for truncation, quality in measured.items():
        matrix = truncation.matrix
        size = spectra[matrix].size
        kept = kept_parameters(*size, truncation.rank)
        about = (matrix.layer, matrix.role, truncation.method, truncation.rank, min(size), kept)
        # NaN where there is no interval.
        numbers = estimate(quality["nll"], quality["divergence"]).estimates.values()
        damage.append((*about, *numbers, windows.predicted_tokens))
    base = journal.base_nll
    assert base is not None
    value = perplexity(base)
    record |= {
        "layers": show_range(wanted.layers),
        "weights": list(wanted.weights),
        "ranks": [str(rank) for rank in wanted.ranks],
        "method": wanted.method,
        "base_perplexity": value,
        "base_interval": perplexity_interval(base),
    }
    curves = curves_of(spectra, measured, wanted.method)
    found = Spectrum(
        spectrum_table(spectra),
        pd.DataFrame(damage, columns=DAMAGE_COLUMNS),
        pd.concat(values, ignore_index=True),
        value,
        curves,
        record=record,
    )
    return replace(found, files=(*found.write(folder), folder / found.RECORD))


@dataclass(eq=False)
class _Work:
    """The requested matrices, with their decompositions and truncations."""

    model: PreTrainedModel
    program: Program
    wanted: SpectrumRequest

    def __post_init__(self) -> None:
        program = self.program
        wanted = self.wanted
        self.matrices = Matrices(self.model)
        self.all = find_matrices(self.matrices.family, wanted.layers, wanted.weights)
        run = set(program.sublayers())
        for matrix in self.all:
            if matrix.sublayer not in run:
                raise ValueError(
                    f"the model's program does not run {matrix.sublayer} as it is stored, so that {matrix} has no "
                    f"inputs; leave out its layer or its role: {show_value(str(program), 200)}"
                )
        self.matrices.check(self.all)
        self.truncations: dict[Matrix, list[Truncation]] = {}
        for matrix in self.all:
            full_rank = min(self.matrices.read(matrix).shape)
            for rank in wanted.ranks:
                if rank.resolve(full_rank) > full_rank:
                    raise ValueError(
                        f"rank {rank} is above the full rank {full_rank} of {matrix}; give a smaller one, a share such "
                        "as 1/2, or leave out such matrices"
                    )
            ranks = dict.fromkeys(rank.resolve(full_rank) for rank in wanted.ranks)
            self.truncations[matrix] = [Truncation(matrix, wanted.method, rank) for rank in ranks]

    def fill(self, journal: SpectrumJournal, windows: Windows, calibration: Windows) -> None:
        undamaged = {
            matrix
            for matrix, some in self.truncations.items()
            if any(truncation not in journal.damage for truncation in some)
        }
        todo = [one for one in self.all if one not in journal.spectra or one in undamaged]
        if journal.base_nll is not None and not todo:
            return
        measured = ProgramRun(self.model, self.program, windows.ids)
        reference = self._reference(measured, windows)
        if journal.base_nll is None:
            journal.keep({"base": reference.nll().tolist()})
        if not todo:
            return
        nodes = [matrices_in(node, self.all) for node in self.program.nodes]
        last = max(place for place, here in enumerate(nodes) if any(matrix in todo for matrix in here))
        calibrating = ProgramRun(self.model, self.program, calibration.ids)
        with progress("spectrum", *self._amounts(nodes, journal)) as ran:
            for here in nodes[: last + 1]:
                missing = [matrix for matrix in here if matrix in todo]
                whitenings = _whitenings(calibrating, missing)
                for matrix in missing:
                    columns = {
                        "layer": matrix.layer,
                        "weight": matrix.role,
                        "kind": matrix.sublayer.kind,
                    }
                    values = self.matrices.read(matrix)
                    whitening = whitenings[matrix]
                    is_new = matrix not in journal.spectra
                    methods = get_args(Method) if is_new else (self.wanted.method,)
                    parts = {
                        name: decompose(values, whitening.factor if name == "whitened" else None)
                        for name in methods
                    }
                    if is_new:
                        about: dict[str, Any] = {"size": list(values.shape), "factor": whitening.how}
                        about["input_rank"] = whitening.rank
                        singular = {name: one.values.tolist() for name, one in parts.items()}
                        journal.keep(columns | about | singular)
                        ran(1)
                    found = parts[self.wanted.method]
                    for truncation in self.truncations[matrix]:
                        if truncation not in journal.damage:
                            values = truncate(self.matrices.read(matrix), found.left, truncation.rank)
                            with self.matrices.replace(matrix, values):
                                nll, divergence = reference.quality(measured)
                                numbers = {"nll": nll.tolist(), "divergence": divergence.tolist()}
                                asked = {"method": truncation.method, "rank": truncation.rank}
                                journal.keep(columns | asked | numbers)
                            ran(len(nodes) - measured.place)
                if undamaged:
                    measured.step()

    def _amounts(self, nodes: list[list[Matrix]], journal: SpectrumJournal) -> tuple[int, str, int]:
        """All work, its unit, and the finished part: a decomposition counts as one node of the program."""
        total = done = 0
        for left, here in zip(range(len(nodes), 0, -1), nodes, strict=True):
            for matrix in here:
                total += 1 + left * len(self.truncations[matrix])
                done += matrix in journal.spectra
                done += left * sum(
                    truncation in journal.damage for truncation in self.truncations[matrix]
                )
        return total, "steps", done

    def _reference(self, run: ProgramRun, windows: Windows) -> ReferenceText:
        reference = ReferenceText(self.model, run)
        if not np.isfinite(reference.nll()).all():
            again = ProgramRun(self.model, self.program, windows.ids)
            for node in self.program.nodes:
                # Raises with the name of the matrix whose inputs are not finite.
                _whitenings(again, matrices_in(node, self.all))
            raise ValueError(HEAD_NOT_FINITE)
        return reference


def _whitenings(run: ProgramRun, matrices: list[Matrix]) -> dict[Matrix, Whitening]:
    """Run the next node; a whitening for each of its matrices, one for all that read the same."""
    first: dict[tuple[Sublayer, bool], Matrix] = {}
    sources = {matrix: first.setdefault(matrix.inputs, matrix) for matrix in matrices}
    moments: dict[Matrix, SecondMoment] = {}
    run.sum_inputs(
        first.values(), moments, lambda _, inputs: SecondMoment(inputs.shape[-1], inputs.device)
    )
    factors = {source: whiten(moment) for source, moment in moments.items()}
    return {matrix: factors[source] for matrix, source in sources.items()}


def curves_of(
    spectra: Mapping[Matrix, SingularValues], damage: Mapping[Truncation, ByWindow], method: str
) -> tuple[Curve, ...]:
    """The curves of a spectrum's matrices, for truncations by one method."""
    measured: dict[Matrix, dict[int, float]] = {}
    for truncation, quality in damage.items():
        if truncation.method == method:
            measured.setdefault(truncation.matrix, {})[truncation.rank] = float(
                quality["divergence"].mean()
            )
    return tuple(
        Curve(matrix, found.size, found.values[method], measured.get(matrix, {}))
        for matrix, found in spectra.items()
    )


PERCENTAGES = (90, 95, 99)
DAMAGE_COLUMNS = ["layer", "weight", "method", "rank", "full_rank", "kept", *ESTIMATE_COLUMNS, "tokens"]


def spectrum_table(spectra: Mapping[Matrix, SingularValues]) -> pd.DataFrame:
    """One row per matrix, with the columns of `spectrum.csv`.

    `rank95` is the number of singular values with 95% of the sum of squares, `kept95` the parameters of two factors of
    that rank as a share of the matrix's; columns that end in `_whitened` are of W S. `factor` says how S was made,
    `input_rank` how many independent directions the inputs have.
    """
    rows = []
    for matrix, found in spectra.items():
        out_features, in_features = found.size
        row: dict[str, Any] = {"layer": matrix.layer, "weight": matrix.role}
        row |= {"out_features": out_features, "in_features": in_features, "full_rank": min(found.size)}
        for method, ending in METHODS.items():
            values = found.values[method]
            ranks = {percent: energy_rank(values, percent / 100) for percent in PERCENTAGES}
            row |= {f"rank{percent}{ending}": rank for percent, rank in ranks.items()}
            row |= {
                f"kept{percent}{ending}": kept_parameters(*found.size, rank)
                for percent, rank in ranks.items()
            }
            row[f"effective_rank{ending}"] = effective_rank(values)
        rows.append(row | {"factor": found.factor, "input_rank": found.input_rank})
    return pd.DataFrame(rows)


def notes_on(table: pd.DataFrame) -> tuple[str, ...]:
    """Notes on the calibration; `table` as `spectrum_table` makes it."""
    short = table[table["input_rank"] < table["in_features"]]
    if short.empty:
        return ()
    worst = short.assign(share=short["input_rank"] / short["in_features"]).sort_values("share").iloc[0]
    note = (
        f"the calibration text does not reach all inputs of {len(short)} of {len(table)} matrices (of "
        f"{worst['weight']} of layer {worst['layer']} {worst['input_rank']} directions of {worst['in_features']}): "
        "beyond these, their truncation is plain; more tokens to calibrate on help, unless inputs are always 0"
    )
    return (note,)
