"""The heatmaps: quality of the model after each operation on each contiguous stretch of layers (paper, section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from transformers import PreTrainedModel

from surgeon.analysis.cells import SCANNED, SEEDED, Cell, scan_cells, stretches
from surgeon.analysis.journal import Journal
from surgeon.analysis.measure import measure, windows_at_once
from surgeon.analysis.sharing import Plan, plain_sublayers, share, simplify
from surgeon.families import family_of
from surgeon.memory import stay_below
from surgeon.model import require_unedited
from surgeon.operations import permutation
from surgeon.program import Program
from surgeon.progress import progress
from surgeon.provenance import write_json, write_text
from surgeon.quality.data import Windows
from surgeon.quality.summary import mean_divergence, perplexity

CELLS = "cells.csv"
RECORD = "scan.json"
COLUMNS = ["operation", "first", "last", "perplexity", "divergence", "tokens", "sublayers_run"]


@dataclass(frozen=True)
class Scan:
    """The result of a scan.

    Attributes:
        table: one row per cell, with the columns of `cells.csv`: first and last layer are both included, from 0;
            divergence is in nats per token; tokens are those predicted; sublayers_run counts what ran for this cell
            and not already for one before it.
        base_perplexity: of the unedited model.
        record: provenance and counts, as in `scan.json`.
    """

    table: pd.DataFrame
    base_perplexity: float
    num_layers: int
    record: dict[str, Any]


def scan(
    model: PreTrainedModel,
    windows: Windows,
    folder: Path,
    operations: list[str],
    *,
    weights_hash: str,
    seed: int = 0,
    memory: int | None = None,
    batch: int | None = None,
    record: dict[str, Any] | None = None,
) -> Scan:
    """Measure every cell of the heatmaps asked for, and write `cells.csv` and `scan.json`.

    Started again on the same folder it goes on where it was. Operations of an earlier scan in the folder stay in it.

    Args:
        operations: as `check_operations` returns them.
        memory: a limit in bytes on the memory of the whole process.
        batch: at most this many windows are run together.
        record: provenance to begin `scan.json` with.

    Raises:
        ValueError: if the folder holds a scan of another model, data or seed, the memory limit is too small, or the
            model is an edited one.
        OSError: if the folder cannot be written to.
    """
    require_unedited(model)
    identity = {
        "weights_hash": weights_hash,
        "data": windows.digest,
        "window": windows.ids.shape[1],
        "tokens": windows.ids.numel(),
        "seed": seed,
    }
    with Journal(folder, identity, len(windows.ids)) as journal:
        operations = [name for name in SCANNED if name in operations or name in journal.operations]
        work = _Work.of(model, operations, seed)
        at_once = windows_at_once(model, work.plan, windows.ids, memory, batch)
        if journal.at_once is not None and batch is None:
            at_once = min(at_once, journal.at_once)
        journal.start(operations, at_once)
        _measure_missing(model, windows, work, at_once, journal, memory)
        return _write(folder, work, windows, journal, seed, record or {})


@dataclass(frozen=True)
class _Work:
    """What a scan has to do: its cells, and the plan that covers them all."""

    cells: list[Cell]
    programs: dict[Program, Program]  # of each cell's program, the form that is run
    dense: Program
    plan: Plan
    num_layers: int

    @classmethod
    def of(cls, model: PreTrainedModel, operations: list[str], seed: int) -> _Work:
        num_layers, steps = model.config.num_hidden_layers, family_of(model.config).steps_per_layer
        dense = Program.dense(num_layers, steps)
        cells = scan_cells(operations, num_layers, seed, steps)
        programs = {cell.program: simplify(cell.program) for cell in cells}
        return cls(cells, programs, dense, share([dense, *programs.values()]), num_layers)


def _measure_missing(
    model: PreTrainedModel, windows: Windows, work: _Work, at_once: int, journal: Journal, memory: int | None
) -> None:
    """Run what the journal does not have yet."""
    everything = range(len(windows.ids))
    programs = list(dict.fromkeys(work.programs.values()))
    done = sum(work.plan.sublayers[p] for p in programs if p != work.dense and journal.is_done(p, everything))
    with progress("scan", work.plan.total_sublayers, "sublayers", done) as advance:

        def ran(amount: float) -> None:
            advance(amount)
            stay_below(memory)

        for measured in measure(model, windows.ids, work.dense, programs, at_once, journal.is_done, ran):
            if not journal.is_done(measured.program, range(measured.start, measured.start + len(measured.quality.nll))):
                journal.add(measured)


def _write(folder: Path, work: _Work, windows: Windows, journal: Journal, seed: int, record: dict[str, Any]) -> Scan:
    base = perplexity(journal.values(work.dense)[0])
    table = _table(work, windows, journal)
    record = record | {"base_perplexity": base} | _counts(work, table)
    if set(SEEDED) & set(table["operation"]):
        orders = {f"{s.start}:{s.stop}": " ".join(map(str, permutation(s, seed))) for s in stretches(work.num_layers)}
        record["permutations"] = orders
    write_text(folder / CELLS, table.to_csv(index=False, float_format="%.9g", na_rep="nan"))
    write_json(folder / RECORD, record)
    return Scan(table, base, work.num_layers, record)


def _table(work: _Work, windows: Windows, journal: Journal) -> pd.DataFrame:
    rows = []
    counted = {work.dense}  # the unedited model's own sublayers are nobody's; equal programs run once
    for cell in work.cells:
        program = work.programs[cell.program]
        nll, divergence = journal.values(program)
        new = 0 if program in counted else work.plan.sublayers[program]
        counted.add(program)
        numbers = (perplexity(nll), mean_divergence(divergence), windows.predicted, new)
        rows.append((cell.operation, cell.first, cell.last, *numbers))
    return pd.DataFrame(rows, columns=COLUMNS)


def _counts(work: _Work, table: pd.DataFrame) -> dict[str, Any]:
    """Sublayers run, and what a loop over cells would have run, by operation and in all."""
    names = list(dict.fromkeys(cell.operation for cell in work.cells))
    ran = table.groupby("operation")["sublayers_run"].sum()
    loop = {name: plain_sublayers(c.program for c in work.cells if c.operation == name) for name in names}
    base = work.plan.sublayers[work.dense]
    return {
        "operations": names,
        "cells": len(work.cells),
        "sublayers_run": {"base": base, **{name: int(ran[name]) for name in names}, "total": work.plan.total_sublayers},
        "sublayers_of_a_loop": {"base": base, **loop, "total": base + sum(loop.values())},
    }
