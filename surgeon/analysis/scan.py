"""The heatmaps: quality of the model after each operation on each contiguous stretch of layers (paper, section 3).

Screened, a cell gets only as many windows of text as it takes to place it. Windows are taken in rounds, each about as
many as all rounds before it. After a round a cell is settled, and gets no more windows, if one of two things is known
of its damage, the mean over windows of its negative log-likelihood minus the unedited model's on the same window (the
logarithm of the ratio of their perplexities):

- it is hopeless: the lower end of the damage's 95% interval lies beyond ten times the base perplexity;
- it is known well: the interval reaches no further to either side than 40% of the damage itself, which keeps cells in
  their order whether they do little damage or much, and no further than 0.2, about 20% of the perplexity.

Both are functions of the cell's own numbers alone, so that a scan that was interrupted settles the same cells.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from transformers import PreTrainedModel

from surgeon.analysis.cells import Cell, Selection, selected_cells
from surgeon.analysis.engine.measure import MeasureOptions, ProgramJournal, measure
from surgeon.analysis.engine.memory import windows_at_once
from surgeon.analysis.engine.sharing import SharedPlan, plain_sublayers, share, simplify
from surgeon.analysis.engine.workers import Job, measure_in_workers
from surgeon.analysis.importance import expert_use, most_important, use_table
from surgeon.analysis.subject import Subject
from surgeon.checkpoint.read import read_json
from surgeon.findings.scan import Scan
from surgeon.language.operations.base import show_range
from surgeon.language.operations.declare import HEATMAPS
from surgeon.language.program import Program
from surgeon.language.sublayer import ATTENTION
from surgeon.memory import stay_below
from surgeon.models.edit import as_stored
from surgeon.models.families import family_of
from surgeon.models.weights import FactorSource
from surgeon.progress import TimeOver, progress
from surgeon.provenance import FORMAT
from surgeon.quality.head import SAMPLED
from surgeon.quality.summary import (
    ACCEPTANCES,
    ESTIMATE_COLUMNS,
    Values,
    estimate,
    interval,
    perplexity,
    perplexity_interval,
)

COLUMNS = ["operation", "first", "last", *ESTIMATE_COLUMNS, *ACCEPTANCES, "tokens", "sublayers_run"]
PERMUTATION_COLUMNS = ["operation", "first", "last", "seed", "order", "perplexity", "divergence", "tokens"]

Lookup = Callable[[Program, Sequence[int]], tuple[Values, Values]]  # nll and divergence of a program on some windows
# Of screening.
HOPELESS = 10.0  # times the base perplexity
SHARE_OF_DAMAGE = 0.4
LARGEST_ERROR = 0.2  # of the logarithm of the perplexity
FIRST_ROUND = 1 / 16  # of the windows
LEAST_WINDOWS = 4  # that an interval is told from
_LEAST_GROWTH = 1.5  # of the last round: with less to come, it comes at once
SCREENING = {
    "hopeless_beyond": HOPELESS,
    "share_of_damage": SHARE_OF_DAMAGE,
    "largest_error": LARGEST_ERROR,
    "first_round": FIRST_ROUND,
    "least_windows": LEAST_WINDOWS,
}  # what settles a cell, for the record of a scan


@dataclass(frozen=True)
class Outcome:
    """A cell with the windows its numbers rest on, and the sublayers that ran for it and not for one before it."""

    cell: Cell
    windows: Sequence[int]
    sublayers_run: float


def cell_values(cell: Cell, windows: Sequence[int], lookup: Lookup) -> tuple[Values, Values]:
    """Negative log-likelihood and divergence of a cell, (windows,) each: the means over its permutations."""
    nll, divergence = zip(*(lookup(program, windows) for program in cell.programs), strict=True)
    return np.mean(nll, axis=0), np.mean(divergence, axis=0)


def cells_table(
    outcomes: Iterable[Outcome],
    base: Values,
    predicted: int,
    lookup: Lookup,
    acceptances: Callable[[Program, Sequence[int]], Values],
) -> pd.DataFrame:
    """One row per cell, with the columns of `cells.csv`; a parameter that maps vary has a column behind the layers.

    Sampled acceptance has one where it was measured of some cell.

    Args:
        base: the unedited model's negative log-likelihood on every window.
        predicted: how many tokens of a window are predicted.
        acceptances: of a program on some windows, (kinds, windows): what shares of its drafts are accepted.
    """
    rows = []
    values = []
    for one in outcomes:
        cell = one.cell
        windows = one.windows
        nll, divergence = cell_values(cell, windows, lookup)
        numbers = estimate(nll, divergence, base, windows).estimates.values()
        accepted = np.mean([acceptances(program, windows) for program in cell.programs], axis=(0, 2)).tolist()
        known = len(windows) * predicted, one.sublayers_run
        rows.append((cell.operation, cell.first, cell.last, *numbers, *accepted, *known))
        values.append((HEATMAPS[cell.operation].varied, cell.value))
    table = pd.DataFrame(rows, columns=COLUMNS)
    if table[SAMPLED].isna().all():
        del table[SAMPLED]
    for place, name in enumerate(sorted({varied for varied, _ in values if varied is not None}), start=3):
        table.insert(place, name, [value if varied == name else np.nan for varied, value in values])
    return table


def permutations_table(outcomes: Iterable[Outcome], base: Values, predicted: int, lookup: Lookup) -> pd.DataFrame:
    """One row per random permutation of a cell, with the columns of `permutations.csv`; arguments as `cells_table`."""
    rows = []
    for one in outcomes:
        cell = one.cell
        windows = one.windows
        for seed, program in zip(cell.seeds, cell.programs, strict=False):
            found = estimate(*lookup(program, windows), base, windows)
            numbers = (found.perplexity, found.divergence, len(windows) * predicted)
            rows.append((cell.operation, cell.first, cell.last, seed, order_of(program, cell.layers), *numbers))
    return pd.DataFrame(rows, columns=PERMUTATION_COLUMNS)


def order_of(program: Program, layers: range) -> str:
    """The order in which a program runs these layers, by their attentions."""
    run = (sublayer.layers[0] for sublayer in program.sublayers() if sublayer.kind == ATTENTION)
    return " ".join(str(layer) for layer in run if layer in layers)


JOURNAL = "journal.jsonl"
EXPERTS_MAP = "experts"  # which comes with tables of what the experts get


class ScanJournal(ProgramJournal):
    """What a folder's scans have measured, in the order in which they did.

    Attributes:
        finished: what earlier runs that came to their end were asked for.
        at_once: how many windows the first run took together, which the next ones keep to get the same digits.
        spread: whether a run took the windows in the rounds of a screening, so that the next ones find them whole.
    """

    def __init__(self, folder: Path, identity: dict[str, Any], windows: int, sampled: bool = False) -> None:
        self.finished: list[Selection] = []
        self.at_once: int | None = None
        self.spread = False
        super().__init__(folder, JOURNAL, "scan", {"format": FORMAT} | identity, windows, sampled)

    def start(self, at_once: int, spread: bool) -> None:
        spread = spread or self.spread
        if (at_once, spread) != (self.at_once, self.spread):
            self.keep({"at_once": at_once, "spread": spread})

    def finish(self, selection: Selection) -> None:
        if selection not in self.finished:
            self.keep({"finished": selection.to_json()})

    def take(self, line: Any) -> None:
        if "finished" in line:
            self.finished.append(Selection.from_json(line["finished"]))
        elif "at_once" in line:
            self.at_once = line["at_once"]
            self.spread = line["spread"]
        else:
            super().take(line)


def scan(
    subject: Subject,
    folder: Path,
    selection: Selection,
    *,
    seed: int = 0,
    screened: bool = False,
    sampled: bool = False,
    batch: int | None = None,
    workers: int = 1,
) -> Scan:
    """Measure every cell asked for, and write `cells.csv`, `permutations.csv` (if any are random) and `scan.json`.

    Started again on the same folder it goes on where it was. Cells of earlier scans of the folder that came to their
    end stay in the tables. Where a time limit ends it, the tables have what was measured by then, and the record says
    how many cells were not.

    A model that runs a program of its own (native tracks, say) is compared with itself, and has cells where it runs
    the layers of a stretch whole and in order.

    Args:
        selection: as `select` returns it for this model.
        seed: of the random orders of `shuffle`.
        screened: let cells go that are settled on a part of the windows (see above).
        sampled: measure sampled acceptance, too, also of cells that are there without.
        batch: at most this many windows are run together.
        workers: processes to share the work out to; 1 to do it in this one.

    Raises:
        ValueError: if the folder holds a scan of another model, data or seed, the memory limit is too small, or the
            model runs a program whose weights are those of no layer, or which has none of these layers whole.
        OSError: if the folder cannot be written to.
        TimeOver: if a time limit ended it before the first cell.
    """
    model = subject.model
    windows = subject.windows
    identity = {
        "model_hash": subject.opened.hash,
        "data": windows.digest,
        "window": windows.ids.shape[1],
        "tokens": windows.ids.numel(),
        "seed": seed,
    }
    with as_stored(model) as program, ScanJournal(folder, identity, len(windows.ids), sampled) as journal:
        _recover(journal, folder, identity, selection)
        work = ScanWork.of(model, program, [*journal.finished, selection], seed)
        at_once = windows_at_once(model, work.plan, windows.ids, subject.memory, batch)
        if journal.at_once is not None and batch is None:
            at_once = min(at_once, journal.at_once)
        journal.start(at_once, screened)
        programs = work.plan.programs
        known = identity["model_hash"]
        units = most_important(model, programs, windows, folder, model_hash=known, memory=subject.memory)
        run = _Run(subject, work, at_once, journal, workers, batch, units, sampled)
        outcomes = list(run.outcomes(screened))
        missing = len(work.cells) - len(outcomes)
        if missing and all(work.programs[one.cell.program] == program for one in outcomes):
            raise TimeOver("the time was over before the first cell")
        if not missing:
            journal.finish(selection)
        asked = selection.to_json()
        record = subject.provenance(seed=seed) | asked
        if missing:
            record["cells_missing"] = missing
        record |= {"asked": asked, "screen": SCREENING if screened else None}
        if work.is_edited:
            record["program"] = str(program)
        earlier = [other.to_json() for other in journal.finished if other != selection]
        if earlier:
            record["earlier"] = earlier
        base = journal.values(program, range(len(windows.ids)))[0]
        predicted = windows.ids.shape[1] - 1
        table = cells_table(outcomes, base, predicted, run.values, run.acceptances)
        record |= {"base_perplexity": perplexity(base), "base_interval": perplexity_interval(base)}
        record |= work.counts(table)
        permutations = permutations_table(outcomes, base, predicted, run.values)
        experts = pd.DataFrame()
        if any(EXPERTS_MAP in one["operations"] for one in (asked, *earlier)):
            experts = use_table(expert_use(model, windows, memory=subject.memory))
        found = Scan(table, perplexity(base), permutations, experts, record=record)
        found.write(folder)
        return found


def _recover(journal: ScanJournal, folder: Path, identity: dict[str, Any], selection: Selection) -> None:
    """Have what earlier scans were asked for in the journal, where that has lost it: the tables go by it."""
    try:
        record = read_json(folder / Scan.RECORD)
        said = {"model_hash": "model_hash", "data": "data_hash", "window": "window", "tokens": "tokens", "seed": "seed"}
        if any(record.get(name, identity[key]) != identity[key] for key, name in said.items()):
            return  # of something else, in a folder whose journal was removed to begin again
        asked = [Selection.from_json(one) for one in [*record.get("earlier", []), *filter(None, [record.get("asked")])]]
    except (AttributeError, FileNotFoundError, KeyError, TypeError, ValueError):
        return  # it is written again
    for lost in (one for one in asked if one not in (*journal.finished, selection)):
        warnings.warn(
            f"{journal.path} has lost a scan of {', '.join(lost.operations)} on layers {show_range(lost.layers)} that "
            f"{Scan.RECORD} tells of; what it lacks of it is measured again",
            stacklevel=3,
        )
        journal.finish(lost)


@dataclass(frozen=True)
class ScanWork:
    """What a scan has to do.

    Attributes:
        programs: of each cell's program, the form that is run.
        dense: what all others are compared with: the model's own.
        is_edited: whether that is another one than its layers one after the other.
        plan: of that one and all cells' programs.
    """

    cells: list[Cell]
    programs: dict[Program, Program]
    dense: Program
    is_edited: bool
    plan: SharedPlan

    @classmethod
    def of(cls, model: PreTrainedModel, own: Program, selections: list[Selection], seed: int) -> ScanWork:
        """The work of these selections on a model that runs a program of its own; errors as `selected_cells`."""
        num_layers = model.config.num_hidden_layers
        family = family_of(model.config)
        steps = family.steps_per_layer
        is_edited = own != Program.dense(num_layers, steps)
        shapes = family.layer_shapes(model.config)
        cells = selected_cells(selections, num_layers, seed, steps, shapes, own if is_edited else None)
        programs = {program: simplify(program) for cell in cells for program in cell.programs}
        return cls(cells, programs, own, is_edited, share([own, *programs.values()]))

    def counts(self, table: pd.DataFrame) -> dict[str, Any]:
        """Sublayers run, and what a loop over cells would have run, by operation and in all."""
        names = list(dict.fromkeys(cell.operation for cell in self.cells))
        ran = table.groupby("operation")["sublayers_run"].sum()
        loop = {
            name: plain_sublayers(p for cell in self.cells if cell.operation == name for p in cell.programs)
            for name in names
        }
        base = self.plan.sublayers[self.dense]
        run = {"base": base, **{name: round(float(ran.get(name, 0.0))) for name in names}}
        return {
            "operations": names,
            "permutations": max((len(cell.seeds) for cell in self.cells), default=0),
            "cells": len(table),
            "sublayers_run": {**run, "total": round(base + float(ran.sum()))},
            "sublayers_of_a_loop": {"base": base, **loop, "total": base + sum(loop.values())},
        }


@dataclass(frozen=True)
class _Run:
    subject: Subject
    work: ScanWork
    at_once: int
    journal: ScanJournal
    workers: int
    batch: int | None
    units: FactorSource | None
    sampled: bool

    def values(self, program: Program, windows: Sequence[int]) -> tuple[Values, Values]:
        """Negative log-likelihood and divergence of a cell's program, (windows,) each."""
        return self.journal.values(self.work.programs[program], windows)

    def acceptances(self, program: Program, windows: Sequence[int]) -> Values:
        return self.journal.acceptances(self.work.programs[program], windows)

    def outcomes(self, screened: bool) -> Iterator[Outcome]:
        """Every cell that was measured, with the windows that its numbers rest on; all, unless time is over before."""
        everything = range(len(self.subject.windows.ids))
        parts = rounds(len(everything)) if self.journal.spread else [list(everything)]
        cells = self.work.cells
        taken = list[int]()
        settled_on: dict[Cell, list[int]] = {}
        cost = dict.fromkeys(self.work.plan.programs, 0.0)
        for number, added in enumerate(parts, start=1):
            needed = {self.work.dense, *(self.work.programs[program] for cell in cells for program in cell.programs)}
            plan = self.work.plan.only(needed)
            try:
                self._measure(f"scan, round {number} of {len(parts)}" if len(parts) > 1 else "scan", plan, added)
            except TimeOver:
                self._measure_base(everything)
                break
            taken += added
            for program, sublayers in plan.sublayers.items():
                cost[program] += sublayers * len(added) / len(everything)
            if screened and number < len(parts):
                base = self.journal.values(self.work.dense, taken)[0]
                for cell in cells:
                    if is_settled(cell_values(cell, taken, self.values)[0] - base):
                        settled_on[cell] = list(taken)
                cells = [cell for cell in cells if cell not in settled_on]
        del cost[self.work.dense]
        for cell in self.work.cells:
            programs = [self.work.programs[program] for program in cell.programs]
            measured: Sequence[int] = everything
            if not all(self.journal.is_done(program, everything) for program in programs):
                measured = settled_on.get(cell) or self._windows_of(programs)
            new = sum(cost.pop(program, 0.0) for program in programs)
            if measured:
                yield Outcome(cell, measured, new)

    def _windows_of(self, programs: Sequence[Program]) -> list[int]:
        windows = range(len(self.subject.windows.ids))
        return [one for one in windows if all(self.journal.is_done(program, [one]) for program in programs)]

    def _measure_base(self, windows: Sequence[int]) -> None:
        """Measure the model's own program where it was not yet, with no limit of time; all cells are told beside it."""
        options = MeasureOptions(self.at_once, self.journal.is_done, memory=self.subject.memory)
        plan = self.work.plan.only({self.work.dense})
        self.journal.add_new(measure(self.subject.model, self.subject.windows.ids, plan, options), windows)

    def _measure(self, name: str, plan: SharedPlan, windows: list[int]) -> None:
        """Run a plan's programs on these windows, where the journal does not have them yet."""
        journal = self.journal
        subject = self.subject
        share_of_all = len(windows) / len(self.subject.windows.ids)
        missing = [program for program in plan.programs if not journal.is_done(program, windows)]
        if not missing:
            return
        left = plan.only({self.work.dense, *missing})
        total = plan.total_sublayers
        done = total - left.total_sublayers
        ids = subject.windows.ids[windows]
        dense, *others = left.programs
        with progress(name, total * share_of_all, "sublayers", done * share_of_all) as advance:

            def ran(amount: float) -> None:
                advance(amount * share_of_all)
                stay_below(subject.memory)

            def is_done(program: Program, part: range) -> bool:
                return journal.is_done(program, windows[part.start : part.stop])

            if self.workers > 1 and others:  # workers measure the unedited model beside others only
                job = Job(subject.opened.folder, ids, str(dense), tuple(map(str, others)), batch=self.batch)
                job = replace(
                    job, memory=subject.memory, folder=journal.folder, factors=self.units, sampled=self.sampled
                )
                measured = measure_in_workers(job, self.workers, ran)
            else:
                options = MeasureOptions(self.at_once, is_done, ran, memory=subject.memory, folder=journal.folder)
                options = replace(options, factors=self.units, sampled=self.sampled)
                measured = measure(subject.model, ids, left, options)
            journal.add_new(measured, windows)


def rounds(count: int) -> list[list[int]]:
    """The numbers of the windows that each round adds; together all of them, once each."""
    order = spread(count)
    ends = []
    end = max(LEAST_WINDOWS, round(FIRST_ROUND * count))
    while end * _LEAST_GROWTH < count:
        ends.append(end)
        end *= 2
    ends.append(count)
    return [order[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def spread(count: int) -> list[int]:
    """The numbers 0 to count - 1 in an order whose every beginning is spread over all of them (bits reversed).

    Neighbouring windows come from the same document; the first few alone would stand for one kind of text.
    """
    bits = max(1, (count - 1).bit_length())
    return sorted(range(count), key=lambda number: int(f"{number:0{bits}b}"[::-1], 2))


def is_settled(damage: NDArray[np.float64]) -> bool:
    """Whether a cell needs no more windows.

    Args:
        damage: negative log-likelihood minus the unedited model's, (windows,), nats.
    """
    mean = float(np.mean(damage))
    if not math.isfinite(mean):
        return True  # it is infinite on all the windows together too
    low, high = interval(damage)
    return low > math.log(HOPELESS) or (high - low) / 2 <= min(LARGEST_ERROR, SHARE_OF_DAMAGE * abs(mean))
