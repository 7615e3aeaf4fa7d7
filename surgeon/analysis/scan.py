"""The heatmaps: quality of the model after each operation on each contiguous stretch of layers (paper, section 3)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor
from transformers import PreTrainedModel

from surgeon.analysis import screen
from surgeon.analysis.cells import Cell, Selection, selected_cells
from surgeon.analysis.engine.measure import MeasuredWindows, MeasureOptions, measure
from surgeon.analysis.engine.memory import windows_at_once
from surgeon.analysis.engine.sharing import SharedPlan, plain_sublayers, share, simplify
from surgeon.analysis.engine.workers import Job, Workers, measure_in_workers
from surgeon.analysis.scan_journal import ScanJournal
from surgeon.analysis.tables import Base, Outcome, cell_values, cells_table, permutations_table
from surgeon.checkpoint.read import read_json
from surgeon.language.operations.base import show_range
from surgeon.language.program import Program
from surgeon.memory import stay_below
from surgeon.models.edit import as_stored
from surgeon.models.families import family_of
from surgeon.progress import Advance, progress
from surgeon.quality.data import Windows
from surgeon.quality.summary import Values, perplexity
from surgeon.results.scan import Scan

IsDone = Callable[[Program, range], bool]


def scan(
    model: PreTrainedModel,
    windows: Windows,
    folder: Path,
    selection: Selection,
    *,
    model_hash: str,
    seed: int = 0,
    screened: bool = False,
    memory: int | None = None,
    batch: int | None = None,
    workers: Workers | None = None,
    record: dict[str, Any] | None = None,
) -> Scan:
    """Measure every cell asked for, and write `cells.csv`, `permutations.csv` (if any are random) and `scan.json`.

    Started again on the same folder it goes on where it was. Cells of earlier scans of the folder that came to their
    end stay in the tables.

    A model that runs a program of its own (native tracks, say) is compared with itself, and has cells where it runs
    the layers of a stretch whole and in order.

    Args:
        selection: as `select` returns it for this model.
        seed: of the random orders of `shuffle`.
        screened: let cells go that are settled on a part of the windows (see `surgeon.analysis.screen`).
        memory: a limit in bytes on the memory of the whole process.
        batch: at most this many windows are run together.
        workers: processes to share the work out to, instead of doing it in this one.
        record: provenance to begin `scan.json` with.

    Raises:
        ValueError: if the folder holds a scan of another model, data or seed, the memory limit is too small, or the
            model runs a program whose weights are those of no layer, or which has none of these layers whole.
        OSError: if the folder cannot be written to.
    """
    identity = {
        "model_hash": model_hash,
        "data": windows.digest,
        "window": windows.ids.shape[1],
        "tokens": windows.ids.numel(),
        "seed": seed,
    }
    with as_stored(model) as program, ScanJournal(folder, identity, len(windows.ids)) as journal:
        _recover(journal, folder, identity, selection)
        work = _Work.of(model, program, [*journal.finished, selection], seed)
        at_once = windows_at_once(model, work.plan, windows.ids, memory, batch)
        if journal.at_once is not None and batch is None:
            at_once = min(at_once, journal.at_once)
        journal.start(at_once, screened)
        run = _Run(model, windows, work, at_once, journal, memory, workers)
        measured = list(run.measured(screened))
        journal.finish(selection)
        more = selection.to_json() | {"asked": selection.to_json(), "screen": screen.settings() if screened else None}
        if work.is_edited:
            more["program"] = str(program)
        earlier = [other.to_json() for other in journal.finished if other != selection]
        return _write(folder, run, measured, (record or {}) | more | ({"earlier": earlier} if earlier else {}))


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
class _Work:
    """What a scan has to do: its cells, and the plan that covers them all."""

    cells: list[Cell]
    programs: dict[Program, Program]  # of each cell's program, the form that is run
    dense: Program  # what all others are compared with: the model's own
    is_edited: bool  # whether that is another one than its layers one after the other
    plan: SharedPlan  # of that one and them

    @classmethod
    def of(cls, model: PreTrainedModel, own: Program, selections: list[Selection], seed: int) -> _Work:
        num_layers, family = model.config.num_hidden_layers, family_of(model.config)
        steps = family.steps_per_layer
        is_edited = own != Program.dense(num_layers, steps)
        shapes = family.layer_shapes(model.config)
        cells = selected_cells(selections, num_layers, seed, steps, shapes, own if is_edited else None)
        programs = {program: simplify(program) for cell in cells for program in cell.programs}
        return cls(cells, programs, own, is_edited, share([own, *programs.values()]))

    def plan_for(self, cells: Sequence[Cell]) -> SharedPlan:
        """The part of the plan that some of the cells need."""
        if cells is self.cells:
            return self.plan
        return self.plan.only({self.dense, *(self.programs[program] for cell in cells for program in cell.programs)})


@dataclass(frozen=True)
class _Run:
    """A scan under way: measures what the journal does not have yet."""

    model: PreTrainedModel
    windows: Windows
    work: _Work
    at_once: int
    journal: ScanJournal
    memory: int | None
    workers: Workers | None

    @property
    def base(self) -> Base:
        """The unedited model on all windows."""
        windows, tokens = self.windows.ids.shape
        return Base(self.journal.values(self.work.dense, range(windows))[0], tokens - 1)

    def values(self, program: Program, windows: Sequence[int]) -> tuple[Values, Values]:
        """Negative log-likelihood and divergence of a cell's program, (windows,) each."""
        return self.journal.values(self.work.programs[program], windows)

    def measured(self, screened: bool) -> Iterator[Outcome]:
        """Every cell, with the windows that its numbers rest on, once all of them are measured."""
        everything = range(len(self.windows.ids))
        rounds = screen.rounds(len(everything)) if self.journal.spread else [list(everything)]
        cells, taken = self.work.cells, list[int]()
        settled_on: dict[Cell, list[int]] = {}
        cost = dict.fromkeys(self.work.plan.programs, 0.0)
        for number, added in enumerate(rounds, start=1):
            plan = self.work.plan_for(cells)
            self._measure(f"scan, round {number} of {len(rounds)}" if len(rounds) > 1 else "scan", plan, added)
            taken += added
            for program, sublayers in plan.sublayers.items():
                cost[program] += sublayers * len(added) / len(everything)
            if screened and number < len(rounds):
                settled_on |= {cell: list(taken) for cell in cells if self._is_settled(cell, taken)}
                cells = [cell for cell in cells if cell not in settled_on]
        del cost[self.work.dense]
        for cell in self.work.cells:
            programs = [self.work.programs[program] for program in cell.programs]
            whole = all(self.journal.is_done(program, everything) for program in programs)
            new = sum(cost.pop(program, 0.0) for program in programs)
            yield Outcome(cell, everything if whole else settled_on[cell], new)

    def _is_settled(self, cell: Cell, windows: Sequence[int]) -> bool:
        nll, _ = cell_values(cell, windows, self.values)
        return screen.is_settled(nll - self.journal.values(self.work.dense, windows)[0])

    def _measure(self, name: str, plan: SharedPlan, windows: list[int]) -> None:
        """Run a plan's programs on these windows, where the journal does not have them yet."""
        journal, share_of_all = self.journal, len(windows) / len(self.windows.ids)
        missing = [program for program in plan.programs if not journal.is_done(program, windows)]
        if not missing:
            return
        left = plan.only({self.work.dense, *missing})
        total = plan.total_sublayers
        done = total - left.total_sublayers
        with progress(name, total * share_of_all, "sublayers", done * share_of_all) as advance:

            def ran(amount: float) -> None:
                advance(amount * share_of_all)
                stay_below(self.memory)

            def is_done(program: Program, part: range) -> bool:
                return journal.is_done(program, windows[part.start : part.stop])

            journal.add_new(self._numbers(self.windows.ids[windows], left, is_done, ran), windows)

    def _numbers(self, ids: Tensor, plan: SharedPlan, is_done: IsDone, ran: Advance) -> Iterator[MeasuredWindows]:
        folder, (dense, *others) = self.journal.folder, plan.programs
        if self.workers is None or not others:  # workers measure the unedited model beside others only
            options = MeasureOptions(self.at_once, is_done, ran, memory=self.memory, folder=folder)
            return measure(self.model, ids, plan, options)
        job = Job(self.workers.checkpoint, ids, str(dense), tuple(map(str, others)), memory=self.memory)
        return measure_in_workers(replace(job, batch=self.workers.batch, folder=folder), self.workers.count, ran)


def _write(folder: Path, run: _Run, measured: list[Outcome], record: dict[str, Any]) -> Scan:
    base = run.base
    table = cells_table(measured, base, run.values)
    permutations = permutations_table(measured, base, run.values)
    value = perplexity(base.nll)
    record = record | {"base_perplexity": value, "base_interval": base.interval} | _counts(run.work, table)
    found = Scan(table, value, permutations, record=record)
    found.write(folder)
    return found


def _counts(work: _Work, table: pd.DataFrame) -> dict[str, Any]:
    """Sublayers run, and what a loop over cells would have run, by operation and in all."""
    names = list(dict.fromkeys(cell.operation for cell in work.cells))
    ran = table.groupby("operation")["sublayers_run"].sum()
    loop = {
        name: plain_sublayers(p for cell in work.cells if cell.operation == name for p in cell.programs)
        for name in names
    }
    base = work.plan.sublayers[work.dense]
    run = {"base": base, **{name: round(float(ran[name])) for name in names}}
    return {
        "operations": names,
        "permutations": max((len(cell.seeds) for cell in work.cells), default=0),
        "cells": len(work.cells),
        "sublayers_run": {**run, "total": round(base + float(ran.sum()))},
        "sublayers_of_a_loop": {"base": base, **loop, "total": base + sum(loop.values())},
    }
