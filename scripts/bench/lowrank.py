"""What ways to make factors, and to share out ranks, lose: one table for a model, on text that calibration did not see.

    python scripts/bench/lowrank.py -o FOLDER [--keep 0.9,0.8,0.6,0.4] [--tokens N] [--calibration-tokens N] [MODEL ...]

A MODEL is MODEL,DATA or MODEL,DATA,SEPARATOR, with the text to measure on as `surgeon spectrum --data` takes it; by
default it is demo,demo. Factors are calibrated on what follows the measured tokens. `keep` is the share of the
parameters of all the layers' matrices; every row of one keep has at most that many. "mean loss" is the error of the
matrices' outputs on the calibration text, as a share of their size, for the inputs they have in the unedited model: the
mean over the matrices that are cut. Killed, the same command goes on where it was.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other


from scripts.commands import add_defaults, make_parser
from scripts.markdown import print_table
from surgeon.analysis.factors.factor_plan import FactorPlan, Making
from surgeon.analysis.factors.make_factors import make_factors
from surgeon.analysis.factors.matrices import Matrices, Matrix
from surgeon.analysis.factors.program_run import ProgramRun, ReferenceText
from surgeon.analysis.factors.ranks import (
    Allocation,
    Curve,
    RankBudget,
    Ranks,
    corrected_ranks,
    factorise_program,
    parameters,
    total_cost,
)
from surgeon.analysis.spectrum import request, spectrum
from surgeon.analysis.subject import Subject, load_calibration, open_subject
from surgeon.findings.spectrum import parse_ranks
from surgeon.language.operations.lowrank import Calibration, Method
from surgeon.language.program import Program
from surgeon.language.sublayer import Sublayer
from surgeon.models.edit import program_of
from surgeon.models.weights import Factors, FactorSource
from surgeon.models.weights.decompose import SecondMoment, truncation_loss
from surgeon.processes.files import write_json, write_table
from surgeon.quality.data import Windows
from surgeon.quality.summary import estimate

DAMAGE_RANKS = "1/16,1/8,1/4,3/8,1/2,5/8"


@dataclass(frozen=True)
class Way:
    """A row for each keep: how factors are made, and how ranks are shared out."""

    method: Method
    allocation: Allocation = "uniform"
    sequential: bool = False
    update: bool = False
    corrected: bool = False  # the damage of a layer's matrices, for what they do together

    def __str__(self) -> str:
        steps = {"sequential": self.sequential, "updated": self.update}
        return ", ".join([self.method, *(step for step, taken in steps.items() if taken)])

    @property
    def shares(self) -> str:
        """How ranks are shared out."""
        if self.corrected:
            return f"{self.allocation}, corrected"
        return self.allocation


WAYS = (
    Way("plain"),
    Way("activation"),
    Way("whitened"),
    Way("whitened", sequential=True),
    Way("whitened", sequential=True, update=True),
    Way("whitened", "energy"),
    Way("whitened", "damage"),
    Way("whitened", "damage", corrected=True),
    Way("whitened", "damage", sequential=True),
    Way("whitened", "damage", sequential=True, update=True),
)


class Bench:
    """One model, its texts, and what is known of its matrices."""

    def __init__(
        self, model: str, data: str, separator: str | None, folder: Path, arguments: Any
    ) -> None:
        tokens = arguments.tokens
        wanted = arguments.calibration_tokens
        self.subject: Subject = open_subject(model, data, tokens, separator=separator)
        self.text = load_calibration(model, data, tokens, wanted, separator=separator)
        self.folder = folder / self.subject.opened.label
        self.model = self.subject.model
        self.windows = self.subject.windows
        self.dense = program_of(self.model)
        self.reference = ReferenceText(self.model, ProgramRun(self.model, self.dense, self.windows.ids))
        self.curves = self._curves(arguments.damage_tokens)
        self.weights = Matrices(self.model).weights
        self.moments = self._moments()

    def _curves(self, tokens: int) -> tuple[Curve, ...]:
        """Damage is measured on the calibration text's last windows: allocation does not see the other text, either."""
        size = self.text.ids.shape[1]
        last = max(1, tokens // size)
        said = f"the last {last} windows of {self.text.digest}"
        self.damaged = replace(self.subject, windows=Windows(self.text.ids[-last:], "calibration", said))
        rest = replace(self.text, ids=self.text.ids[:-last])
        wanted = request(self.model.config, ranks=parse_ranks(DAMAGE_RANKS))
        return spectrum(self.damaged, rest, self.folder / "spectrum", wanted).curves

    def measure(self, way: Way, keep: float) -> dict[str, Any]:
        """A row of the table."""
        ranks = self._ranks(way, keep)
        program = factorise_program(self.dense, ranks)
        calibration = Calibration(sequential=way.sequential, update=way.update)
        plan = replace(FactorPlan.all_by(Making(way.method), program), calibration=calibration)
        folder = self._folder(way, keep)
        known = self.subject.opened.hash
        source, notes = make_factors(self.model, plan, self.text, folder, model_hash=known)
        for note in notes:
            print(f"note: {way}, keep {keep:g}: {note}", file=sys.stderr)
        run = ProgramRun(self.model, program, self.windows.ids, factors=source)
        found = estimate(*self.reference.quality(run))
        losses = [self._loss(matrix, source) for matrix in plan.makings]
        whole = sum(parameters(curve, None) for curve in self.curves)
        return {
            "keep": keep,
            "method": str(way),
            "allocation": way.shares,
            "kept": total_cost(self.curves, ranks) / whole,
            **vars(found),
            "mean_loss": float(np.mean(losses)) if losses else 0.0,
        }

    def _moments(self) -> dict[tuple[Sublayer, bool], SecondMoment]:
        """Of what matrices read the stream get, and of what those behind them get, in the unedited model."""
        run = ProgramRun(self.model, self.dense, self.text.ids)
        roles = {"A": ("q", "o"), "F": ("up", "down")}
        sums: dict[Matrix, SecondMoment] = {}
        for node in self.dense.nodes:
            sublayers = Program((node,)).sublayers()
            read = [Matrix(one, role) for one in sublayers for role in roles[one.kind]]
            run.sum_inputs(read, sums, lambda _, inputs: SecondMoment(inputs.shape[-1]))
        return {matrix.inputs: moment for matrix, moment in sums.items()}

    def _loss(self, matrix: Matrix, source: FactorSource) -> float:
        whole = Matrix(replace(matrix.sublayer, ranks=()), matrix.role)
        stored = self.weights.matrix(whole.sublayer, whole.role)
        moment = self.moments[whole.inputs]
        values = stored.whole()
        factors = source.factors(matrix.sublayer, matrix.role, stored)
        nothing = Factors(torch.zeros_like(factors.first), factors.second)
        return truncation_loss(values, factors, moment) / truncation_loss(values, nothing, moment)

    def _folder(self, way: Way, keep: float) -> Path:
        name = f"{keep:g} {way.shares} {way}".replace(", ", " ").replace(" ", "-")
        return self.folder / name

    def _ranks(self, way: Way, keep: float) -> Ranks:
        share = RankBudget("params", keep, relative=True, allocation=way.allocation)
        if not way.corrected:
            return share.ranks(self.curves)
        own = self._folder(way, keep)
        folder = own.with_name(f"{own.name}-first")
        return corrected_ranks(self.damaged, self.curves, share, way.method, self.text, folder)


def show(table: pd.DataFrame, title: str) -> None:
    """Print a table for people."""
    columns = ["keep", "factors", "ranks", "perplexity", "divergence", "95% interval", "mean loss"]
    rows = []
    for row in table.itertuples():
        ends = f"{row.divergence_low:.4f} to {row.divergence_high:.4f}"
        numbers = [f"{row.perplexity:.2f}", f"{row.divergence:.4f}", ends, f"{row.mean_loss:.3f}"]
        rows.append([f"{row.keep:g}", row.method, row.allocation, *numbers])
    print_table(title, columns, rows, left=(1, 2))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("models", nargs="*", default=["demo,demo"], metavar="MODEL,DATA[,SEPARATOR]")
    parser.add_argument("-o", "--output", type=Path, required=True)
    add_defaults(
        parser, keep="0.9,0.8,0.6,0.4", tokens=16384, calibration_tokens=32768, damage_tokens=2048
    )
    arguments = parser.parse_args()
    keeps = [float(keep) for keep in arguments.keep.split(",")]
    for named in arguments.models:
        model, data, *separator = named.split(",")
        bench = Bench(model, data, separator[0] if separator else None, arguments.output, arguments)
        rows = []
        for keep, way in product(keeps, WAYS):
            rows.append(bench.measure(way, keep))
            table = pd.DataFrame(rows)
            write_table(bench.folder / "lowrank.csv", table)  # as far as it is known
        perplexity = float(np.exp(bench.reference.nll().mean()))
        record = bench.subject.provenance(
            calibration=bench.text.source,
            calibration_hash=bench.text.digest,
            calibration_tokens=bench.text.ids.numel(),
            base_perplexity=perplexity,
        )
        write_json(bench.folder / "lowrank.json", record)
        show(table, f"{bench.subject.opened.label}: base perplexity {perplexity:.2f}")


if __name__ == "__main__":
    main()
