"""The tables of a spectrum: a row for each matrix, for each singular value, for each truncation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from surgeon.analysis.factors.allocation import effective_rank, energy_rank, kept_parameters
from surgeon.analysis.factors.matrices import Matrix
from surgeon.analysis.spectrum_journal import ByWindow, SingularValues, Truncation
from surgeon.findings.spectrum import METHODS
from surgeon.quality.summary import ESTIMATE_COLUMNS, estimate

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
            values = found.plain if method == "plain" else found.whitened
            ranks = {percent: energy_rank(values, percent / 100) for percent in PERCENTAGES}
            row |= {f"rank{percent}{ending}": rank for percent, rank in ranks.items()}
            row |= {f"kept{percent}{ending}": kept_parameters(*found.size, rank) for percent, rank in ranks.items()}
            row[f"effective_rank{ending}"] = effective_rank(values)
        rows.append(row | {"factor": found.factor, "input_rank": found.input_rank})
    return pd.DataFrame(rows)


def notes_on(table: pd.DataFrame) -> tuple[str, ...]:
    """What a user should know about the calibration, one line each; `table` as `spectrum_table` makes it."""
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


def values_table(spectra: Mapping[Matrix, SingularValues]) -> pd.DataFrame:
    """One row per singular value, with the columns of `singular_values.csv`; `index` counts from 0."""
    tables = []
    for matrix, found in spectra.items():
        for method in METHODS:
            values = found.plain if method == "plain" else found.whitened
            about = {"layer": matrix.layer, "weight": matrix.role, "method": method, "index": range(len(values))}
            tables.append(pd.DataFrame(about | {"value": values}))
    return pd.concat(tables, ignore_index=True)


def damage_table(
    damage: Mapping[Truncation, ByWindow], spectra: Mapping[Matrix, SingularValues], predicted: int
) -> pd.DataFrame:
    """One row per truncation, with the columns of `damage.csv`; NaN where there is no interval.

    Args:
        predicted: how many tokens of the text are predicted in all.
    """
    rows = []
    for truncation, quality in damage.items():
        matrix = truncation.matrix
        size = spectra[truncation.matrix].size
        kept = kept_parameters(*size, truncation.rank)
        about = (matrix.layer, matrix.role, truncation.method, truncation.rank, min(size), kept)
        numbers = estimate(quality["nll"], quality["divergence"]).estimates.values()
        rows.append((*about, *numbers, predicted))
    return pd.DataFrame(rows, columns=DAMAGE_COLUMNS)
