"""The tables of a scan: a row for each cell, a row for each random permutation, and counts of what ran."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from surgeon.analysis.cells import Cell
from surgeon.language.operations.declare import HEATMAPS
from surgeon.language.program import Program
from surgeon.language.sublayer import ATTENTION
from surgeon.quality.head import SAMPLED
from surgeon.quality.summary import ACCEPTANCES, ESTIMATE_COLUMNS, Values, estimate

COLUMNS = ["operation", "first", "last", *ESTIMATE_COLUMNS, *ACCEPTANCES, "tokens", "sublayers_run"]
PERMUTATION_COLUMNS = ["operation", "first", "last", "seed", "order", "perplexity", "divergence", "tokens"]

Lookup = Callable[[Program, Sequence[int]], tuple[Values, Values]]  # nll and divergence of a program on some windows


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
