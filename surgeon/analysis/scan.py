"""Heatmaps: the model's quality after each operation on each contiguous stretch of layers (paper, section 3).

Each is a cell. Maps over a parameter's values have a cell for every single layer and every value.

Screened, a cell gets only as many windows of text as it takes to place it. Windows are taken in rounds, each about as
many as all rounds before it. A cell is settled after a round, and gets no more windows, by its damage, the mean over
windows of its negative log-likelihood minus the unedited model's on the same window:

- it is hopeless: the lower end of the damage's 95% interval lies beyond ten times the base perplexity;
- it is known well: the interval reaches no further to either side than 40% of the damage itself, which keeps cells in
  their order, and no further than 0.2, about 20% of the perplexity.

Both depend on the cell's own numbers alone, so that an interrupted scan settles the same cells.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from surgeon.analysis.engine.machine import windows_at_once
from surgeon.analysis.engine.measure import MeasureOptions, ProgramJournal, measure, measure_missing
from surgeon.analysis.engine.sharing import SharedPlan, plain_sublayers, share, simplify
from surgeon.analysis.importance import expert_use, use_table
from surgeon.analysis.subject import Subject, most_important
from surgeon.checkpoint.tensor_file import read_json
from surgeon.findings.scan import Scan
from surgeon.language.operations import OPERATIONS
from surgeon.language.operations.applied import changed_within
from surgeon.language.operations.base import HEATMAPS, Heatmap, show_range
from surgeon.language.program import Program
from surgeon.language.sublayer import ATTENTION, LayerShapes
from surgeon.models.edit import as_stored
from surgeon.models.families import family_of
from surgeon.progress import TimeOver
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
from surgeon.words import did_you_mean, show_value

# The maps of a scan that names none.
SCANNED = tuple(name for name, heatmap in HEATMAPS.items() if heatmap.paper)
ALL = "all"


@dataclass(frozen=True)
class Cell:
    """One entry of a heatmap.

    Attributes:
        first, last: the ends of the stretch of layers, both included, from 0.
        programs: of the changed model; several for a cell that is the mean over random permutations.
        seeds: of the permutations, one for each program; empty where nothing is random.
        value: of the parameter that the map varies, if it varies one.
    """

    operation: str
    first: int
    last: int
    programs: tuple[Program, ...]
    seeds: tuple[int, ...] = ()
    value: float | None = None

    @property
    def layers(self) -> range:
        return range(self.first, self.last + 1)

    @cached_property
    def equivalents(self) -> tuple[Program, ...]:
        """Programs that compute the same as these, and are run in their place."""
        return tuple(map(simplify, self.programs))

    @property
    def program(self) -> Program:
        """The changed model's program, of several permutations the first one."""
        return self.programs[0]


@dataclass(frozen=True)
class Selection:
    """The cells that one command asks for; made by `select`, which checks it.

    Attributes:
        operations: names of heatmaps, in their order.
        layers: only stretches inside this range.
        every: stretches begin at multiples of this from the range's start, and their lengths are multiples of it.
        max_length: the longest stretch, in layers.
        permutations: how many seeds a cell of what is random (`shuffle`) is the mean over.
    """

    operations: tuple[str, ...]
    layers: range
    every: int
    max_length: int
    permutations: int

    def stretches(self) -> Iterator[range]:
        """The stretches of layers, by first and then by last layer."""
        for first in self.layers[:: self.every]:
            longest = min(self.max_length, self.layers.stop - first)
            yield from (
                range(first, first + length) for length in range(self.every, longest + 1, self.every)
            )

    def places(
        self, heatmap: Heatmap, shapes: LayerShapes | None
    ) -> Iterator[tuple[range, float | None]]:
        """A map's places: every stretch, or each layer at which one begins with every value of the parameter."""
        if heatmap.varied is None:
            yield from ((stretch, None) for stretch in self.stretches())
        else:
            firsts = dict.fromkeys(stretch.start for stretch in self.stretches())
            for first in firsts:
                yield from ((range(first, first + 1), value) for value in heatmap.columns(first, shapes))

    def to_json(self) -> dict[str, Any]:
        """Write it as in `scan.json` and the journal."""
        layers = show_range(self.layers)
        return vars(self) | {"operations": list(self.operations), "layers": layers}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Selection:
        first, _, end = values["layers"].partition(":")
        layers = range(int(first), int(end))
        return cls(**values | {"operations": tuple(values["operations"]), "layers": layers})


def select(
    operations: Sequence[str],
    num_layers: int,
    *,
    layers: range | None = None,
    every: int = 1,
    max_length: int | None = None,
    permutations: int = 1,
) -> Selection:
    """Select cells of these heatmaps; arguments as in `Selection`, without them every stretch of layers.

    Raises:
        ValueError: if there is no such operation, the range leaves the model's layers, a number is below 1, or no
            stretch is left.
    """
    names = check_operations(operations)
    if layers is None:
        layers = range(num_layers)
    shown = show_range(layers)
    if not layers:
        raise ValueError(
            f"layers {shown} are empty: the end comes after the first, as in 4:30 for 4 to 29"
        )
    if layers.start < 0 or layers.stop > num_layers:
        raise ValueError(f"layers {shown} are out of range: the model's layers are 0:{num_layers}")
    for option, number in (("every", every), ("max_length", max_length), ("permutations", permutations)):
        if number is not None and number < 1:
            raise ValueError(f"{option} must be at least 1, not {number}")
    if every > len(layers):
        raise ValueError(
            f"every {every} is more than the {len(layers)} layers of {shown}; no stretch is that long"
        )
    longest = min(max_length or len(layers), len(layers))
    if longest < every:
        raise ValueError(
            f"max_length {longest} is less than every {every}: stretches have that length at least"
        )
    return Selection(tuple(names), layers, every, longest, permutations)


def check_operations(names: Sequence[str]) -> list[str]:
    """List the maps asked for, each once, in the order of `HEATMAPS`; "all" stands for every one.

    An operation without a map of its own (width) stands for all maps that it has.
    """
    several = {
        name: one.heatmaps for name, one in OPERATIONS.items() if one.heatmaps and name not in HEATMAPS
    }
    choices = {name: (name,) for name in HEATMAPS} | several | {ALL: (*HEATMAPS,)}
    for name in names:
        if name not in choices:
            raise ValueError(f"unknown operation {name!r} to scan; {did_you_mean(name, choices)}")
    asked = {one for name in names for one in choices[name]}
    return [name for name in HEATMAPS if name in asked]


def permutation_seeds(seed: int, count: int) -> tuple[int, ...]:
    """The seeds of a cell's permutations: the scan's own, then others drawn from it. More begin with fewer."""
    return seed, *(random.Random(f"{seed}:{number}").getrandbits(31) for number in range(1, count))


def selected_cells(
    selections: Sequence[Selection],
    num_layers: int,
    seed: int,
    steps_per_layer: int = 2,
    shapes: LayerShapes | None = None,
    program: Program | None = None,
) -> list[Cell]:
    """The cells that any of these selections asks for, each once, in the order of the table.

    Cells of `shuffle` are means over as many permutations as the selection that asks for the most. A program of the
    model's own has cells where it runs a stretch of layers whole and in order, in a branch of a fork if it has forks.
    """
    seeds = permutation_seeds(seed, max(selection.permutations for selection in selections))
    cells = []
    names = dict.fromkeys(name for selection in selections for name in selection.operations)
    if not names:
        raise ValueError("operations is empty; name what to scan, such as lp, or leave it out")
    for name, heatmap in HEATMAPS.items():
        asked = (
            selection.places(heatmap, shapes) for selection in selections if name in selection.operations
        )
        # The sort is stable, so that values stay in the order of the columns.
        wanted = dict.fromkeys(place for places in asked for place in places)
        for layers, value in sorted(wanted, key=lambda place: (place[0].start, place[0].stop)):
            varied: dict[str, Any] = {} if heatmap.varied is None else {heatmap.varied: value}
            apply = partial(heatmap, layers=layers, shapes=shapes, **varied)
            if heatmap.is_seeded:
                changes = [partial(apply, seed=one) for one in seeds]
            else:
                changes = [apply]
            start = program or Program.dense(num_layers, steps_per_layer)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                if program is None:
                    programs = [change(start) for change in changes]
                else:
                    found = (
                        changed_within(program, layers, steps_per_layer, change) for change in changes
                    )
                    programs = [one for one in found if one is not None]
            if programs and (value is None or programs[0] != start):  # a value may come to what there is
                for warning in said:
                    warnings.warn(warning.message, stacklevel=2)
                cell = Cell(name, layers.start, layers.stop - 1, tuple(programs), value=value)
                cells.append(replace(cell, seeds=seeds) if heatmap.is_seeded else cell)
    if not cells and program is not None and not all(callable(HEATMAPS[name].values) for name in names):
        raise ValueError(
            f"the model runs none of these layers whole and in order: its program is {show_value(str(program), 200)}"
        )
    if not cells:
        raise ValueError(f"the model has nothing that {' or '.join(names)} could change in these layers")
    return cells


COLUMNS = ["operation", "first", "last", *ESTIMATE_COLUMNS, *ACCEPTANCES, "tokens", "sublayers_run"]
PERMUTATION_COLUMNS = [
    "operation",
    "first",
    "last",
    "seed",
    "order",
    "perplexity",
    "divergence",
    "tokens",
]

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


JOURNAL = "journal.jsonl"
EXPERTS_MAP = "experts"  # which comes with tables of what the experts get


@dataclass(eq=False)
class ScanJournal(ProgramJournal):
    """Measurements of a folder's scans, in order.

    Attributes:
        finished: selections of earlier runs that came to their end.
        at_once: how many windows the first run took together, which later runs keep to get the same digits.
        spread: whether a run took the windows in the rounds of a screening, so that later ones find them whole.
    """

    finished: list[Selection] = field(default_factory=list, init=False)
    at_once: int | None = field(default=None, init=False)
    spread: bool = field(default=False, init=False)

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

    Started again on the same folder it goes on where it was. Cells of its earlier, finished scans stay in the tables.
    Where a time limit ends it, the tables have what was measured by then, and the record counts the missing cells.

    A model that runs a program of its own (native tracks, say) is compared with itself, and has cells where it runs the
    layers of a stretch whole and in order.

    Args:
        seed: of the random orders of `shuffle`.
        screened: let cells go that are settled on a part of the windows (see above).
        sampled: measure sampled acceptance, too, also of cells that are there without.
        batch: at most this many windows are run together.
        workers: processes to share the work out to.
    """
    model = subject.model
    windows = subject.windows
    identity = subject.identity(window=windows.ids.shape[1], tokens=windows.ids.numel(), seed=seed)
    everything = range(len(windows.ids))
    path = folder / JOURNAL
    count = len(everything)
    with (
        as_stored(model) as program,
        ScanJournal(path, "scan", identity, windows=count, sampled=sampled) as journal,
    ):
        _recover(journal, folder, identity, selection)
        family = family_of(model.config)
        steps = family.steps_per_layer
        num_layers = model.config.num_hidden_layers
        is_edited = program != Program.dense(num_layers, steps)
        asked = [*journal.finished, selection]
        own = program if is_edited else None
        cells = selected_cells(asked, num_layers, seed, steps, family.layer_shapes(model.config), own)
        plan = share([program, *(one for cell in cells for one in cell.equivalents)])
        at_once = windows_at_once(model, plan, windows.ids, subject.memory, batch)
        if journal.at_once is not None and batch is None:
            at_once = min(at_once, journal.at_once)
        begun = {"at_once": at_once, "spread": screened or journal.spread}
        if begun != {"at_once": journal.at_once, "spread": journal.spread}:
            journal.keep(begun)
        model_hash = subject.opened.hash
        units = most_important(
            model, plan.programs, windows, folder, model_hash=model_hash, memory=subject.memory
        )
        options = MeasureOptions(
            at_once, memory=subject.memory, folder=folder, factors=units, sampled=sampled
        )
        outcomes = list(_outcomes(subject, journal, cells, plan, options, screened, workers, batch))
        missing = len(cells) - len(outcomes)
        if missing and all(cell.equivalents[0] == program for cell, *_ in outcomes):
            raise TimeOver("the time was over before the first cell")
        if not missing:
            journal.finish(selection)
        record = subject.provenance(seed=seed) | selection.to_json()
        if missing:
            record["cells_missing"] = missing
        record |= {"asked": selection.to_json(), "screen": SCREENING if screened else None}
        if is_edited:
            record["program"] = str(program)
        earlier = [other for other in journal.finished if other != selection]
        if earlier:
            record["earlier"] = [other.to_json() for other in earlier]
        base = journal.values(program, everything)[0]
        predicted = windows.ids.shape[1] - 1
        table = _cells_table(journal, outcomes, base, predicted)
        record |= {"base_perplexity": perplexity(base), "base_interval": perplexity_interval(base)}
        record |= _counts(cells, plan, table)
        experts = pd.DataFrame()
        if any(EXPERTS_MAP in one.operations for one in (selection, *earlier)):
            experts = use_table(expert_use(model, windows, memory=subject.memory))
        permutations = _permutations_table(journal, outcomes, base, predicted)
        found = Scan(table, perplexity(base), permutations, experts, record=record)
        found.write(folder)
        return found


def _recover(journal: ScanJournal, folder: Path, identity: dict[str, Any], selection: Selection) -> None:
    """Restore selections of earlier scans that the journal has lost, by the record: the tables go by them."""
    try:
        record = read_json(folder / Scan.RECORD)
        said = {
            "model_hash": "model_hash",
            "data": "data_hash",
            "window": "window",
            "tokens": "tokens",
            "seed": "seed",
        }
        if any(record.get(name, identity[key]) != identity[key] for key, name in said.items()):
            return  # of something else, in a folder whose journal was removed to begin again
        asked = [
            Selection.from_json(one)
            for one in [*record.get("earlier", []), *filter(None, [record.get("asked")])]
        ]
    except (AttributeError, FileNotFoundError, KeyError, TypeError, ValueError):
        return  # it is written again
    for lost in (one for one in asked if one not in (*journal.finished, selection)):
        warnings.warn(
            f"{journal.path} has lost a scan of {', '.join(lost.operations)} on layers {show_range(lost.layers)} that "
            f"{Scan.RECORD} tells of; what it lacks of it is measured again",
            stacklevel=3,
        )
        journal.finish(lost)


# A cell with the windows its numbers rest on, and the sublayers that ran for it and not for one before it.
Outcome = tuple[Cell, Sequence[int], float]


def _values(journal: ScanJournal, cell: Cell, windows: Sequence[int]) -> tuple[Values, Values]:
    """Negative log-likelihood and divergence of a cell, (windows,) each: the means over its permutations."""
    found = [journal.values(program, windows) for program in cell.equivalents]
    nll, divergence = zip(*found, strict=True)
    return np.mean(nll, axis=0), np.mean(divergence, axis=0)


def _cells_table(
    journal: ScanJournal, outcomes: Iterable[Outcome], base: Values, predicted: int
) -> pd.DataFrame:
    """One row per cell, with the columns of `cells.csv`.

    A parameter that maps vary has a column behind the layers, sampled acceptance if it was measured of some cell.

    Args:
        predicted: tokens of each window.
    """
    rows = []
    values = []
    for cell, windows, ran in outcomes:
        numbers = estimate(*_values(journal, cell, windows), base, windows).estimates.values()
        every = [journal.acceptances(program, windows) for program in cell.equivalents]
        accepted = np.mean(every, axis=(0, 2)).tolist()
        counts = len(windows) * predicted, ran
        rows.append((cell.operation, cell.first, cell.last, *numbers, *accepted, *counts))
        values.append((HEATMAPS[cell.operation].varied, cell.value))
    table = pd.DataFrame(rows, columns=COLUMNS)
    if table[SAMPLED].isna().all():
        del table[SAMPLED]
    for place, name in enumerate(
        sorted({varied for varied, _ in values if varied is not None}), start=3
    ):
        table.insert(place, name, [value if varied == name else np.nan for varied, value in values])
    return table


def _permutations_table(
    journal: ScanJournal, outcomes: Iterable[Outcome], base: Values, predicted: int
) -> pd.DataFrame:
    """One row per random permutation of a cell, with the columns of `permutations.csv`."""
    rows = []
    for cell, windows, _ in outcomes:
        for seed, program, run in zip(cell.seeds, cell.programs, cell.equivalents, strict=False):
            found = estimate(*journal.values(run, windows), base, windows)
            numbers = (found.perplexity, found.divergence, len(windows) * predicted)
            # The program's order of these layers, by their attentions.
            layers = (one.layers[0] for one in program.sublayers() if one.kind == ATTENTION)
            order = " ".join(str(layer) for layer in layers if layer in cell.layers)
            rows.append((cell.operation, cell.first, cell.last, seed, order, *numbers))
    return pd.DataFrame(rows, columns=PERMUTATION_COLUMNS)


def _counts(cells: Sequence[Cell], plan: SharedPlan, table: pd.DataFrame) -> dict[str, Any]:
    """Sublayers run, and those of a loop over cells, by operation and in all."""
    names = list(dict.fromkeys(cell.operation for cell in cells))
    ran = table.groupby("operation")["sublayers_run"].sum()
    loop = {
        name: plain_sublayers(p for cell in cells if cell.operation == name for p in cell.programs)
        for name in names
    }
    base = plan.sublayers[plan.programs[0]]
    run = {"base": base, **{name: round(float(ran.get(name, 0.0))) for name in names}}
    return {
        "operations": names,
        "permutations": max((len(cell.seeds) for cell in cells), default=0),
        "cells": len(table),
        "sublayers_run": {**run, "total": round(base + float(ran.sum()))},
        "sublayers_of_a_loop": {"base": base, **loop, "total": base + sum(loop.values())},
    }


def _outcomes(
    subject: Subject,
    journal: ScanJournal,
    cells: list[Cell],
    plan: SharedPlan,
    options: MeasureOptions,
    screened: bool,
    workers: int,
    batch: int | None,
) -> Iterator[Outcome]:
    """Every cell that was measured, with the windows that its numbers rest on; all, unless time is over before.

    Args:
        plan: of all cells' programs, behind the model's own one, with which they are compared.
    """
    dense = plan.programs[0]
    everything = range(journal.windows)
    parts = rounds(len(everything)) if journal.spread else [list(everything)]
    left = cells
    taken = list[int]()
    settled_on: dict[Cell, list[int]] = {}
    cost = dict.fromkeys(plan.programs, 0.0)
    for number, added in enumerate(parts, start=1):
        now = plan.only({dense, *(one for cell in left for one in cell.equivalents)})
        name = f"scan, round {number} of {len(parts)}" if len(parts) > 1 else "scan"
        try:
            measure_missing(name, subject, journal, now, added, options, workers, batch)
        except TimeOver:
            # The model's own program has no limit of time: all cells are told beside it.
            alone = replace(options, is_done=journal.is_done, references={})
            ids = subject.windows.ids
            journal.add_new(measure(subject.model, ids, plan.only({dense}), alone), everything)
            break
        taken += added
        for program, sublayers in now.sublayers.items():
            cost[program] += sublayers * len(added) / len(everything)
        if screened and number < len(parts):
            base = journal.values(dense, taken)[0]
            for cell in left:
                if is_settled(_values(journal, cell, taken)[0] - base):
                    settled_on[cell] = list(taken)
            left = [cell for cell in left if cell not in settled_on]
    del cost[dense]
    for cell in cells:
        measured: Sequence[int] = everything
        if not all(journal.is_done(program, everything) for program in cell.equivalents):
            measured = settled_on.get(cell) or [
                one
                for one in everything
                if all(journal.is_done(program, [one]) for program in cell.equivalents)
            ]
        new = sum(cost.pop(program, 0.0) for program in cell.equivalents)
        if measured:
            yield cell, measured, new


def rounds(count: int) -> list[list[int]]:
    """The windows that each round adds; together all of them, once each."""
    order = spread(count)
    ends = []
    end = max(LEAST_WINDOWS, round(FIRST_ROUND * count))
    while end * _LEAST_GROWTH < count:
        ends.append(end)
        end *= 2
    ends.append(count)
    return [order[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def spread(count: int) -> list[int]:
    """Order 0 to count - 1 so that every beginning is spread over all of them (bits reversed).

    Neighbouring windows come from the same document; the first few alone would stand for one kind of text.
    """
    bits = max(1, (count - 1).bit_length())
    return sorted(range(count), key=lambda number: int(f"{number:0{bits}b}"[::-1], 2))


def is_settled(damage: Values) -> bool:
    """Tell whether a cell needs no more windows.

    Args:
        damage: negative log-likelihood minus the unedited model's, (windows,), nats.
    """
    mean = float(np.mean(damage))
    if not math.isfinite(mean):
        return True  # it is infinite on all the windows together too
    low, high = interval(damage)
    return low > math.log(HOPELESS) or (high - low) / 2 <= min(
        LARGEST_ERROR, SHARE_OF_DAMAGE * abs(mean)
    )
