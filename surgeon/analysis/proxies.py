"""Which cheap measure predicts a scan's heatmaps: rank correlation of each with measured damage, by operation.

Every proxy is so made that more of it should mean more damage. A stretch of layers first..last gets

    length            the number of its layers, which any other proxy has to beat
    block_influence, attention_size, mlp_size
                      the sum over its layers
    angular_distance, angular_distance_last_token, cosine_distance
                      between the streams before and after it (they need no sum)
    cka_*             1 - CKA of each layer that no longer reads what the layer before it adds (see `readers`), summed,
                      averaged, and the largest
    bound, ...        of the pairs (k - 1, k) with the same layers k, from `surgeon sensitivity`, likewise
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from surgeon.analysis.correlation import rank_correlation
from surgeon.analysis.scan import CELLS
from surgeon.analysis.scan import RECORD as SCAN_RECORD
from surgeon.analysis.sensitivity import RECORD as SENSITIVITY_RECORD
from surgeon.analysis.sensitivity import TABLE as PAIRS
from surgeon.analysis.similarity import CKA_COLUMNS, Similarity
from surgeon.checkpoint.read import read_json
from surgeon.errors import did_you_mean
from surgeon.language.operations.declare import HEATMAPS
from surgeon.processes.files import write_table

PROXIES_TABLE = "proxies.csv"
DAMAGES = ("divergence", "log_perplexity_ratio")
PAIR_COLUMNS = ("bound", "relative_bound", "relative_first_order", "relative_error")  # of sensitivity.csv
LAYER_SUMS = ("block_influence", "attention_size", "mlp_size")
_NEEDED = ("operation", "first", "last", "perplexity", "divergence")

Values = NDArray[np.float64]


@dataclass(frozen=True)
class MeasuredScan:
    """A finished scan.

    Attributes:
        cells: `operation`, `first`, `last` and the two damages, `divergence` and `log_perplexity_ratio` (the log of
            perplexity over that of the unedited model). Left out are stretches on which an operation changes
            nothing, or the same as on the stretch that is one layer shorter.
        source: where it is, and the text it was measured on, for a record.
    """

    cells: pd.DataFrame
    source: dict[str, Any]


def read_scan(folder: Path, model_hash: str) -> MeasuredScan:
    """Read the results of `surgeon scan`.

    Raises:
        FileNotFoundError: if the folder holds none.
        ValueError: if the scan is of another model, or a file of it is damaged.
    """
    record = read_json(_existing(folder, SCAN_RECORD, "scan"))
    _check_model(folder, "scan", record, model_hash)
    cells = _read_table(_existing(folder, CELLS, "scan"), _NEEDED)
    for name in cells["operation"].unique():
        if name not in HEATMAPS:
            raise ValueError(f"{folder / CELLS} has an unknown operation {name!r}; {did_you_mean(str(name), HEATMAPS)}")
    # Only cells of stretches can be told by what lies between layers.
    cells = cells[[HEATMAPS[str(name)].varied is None for name in cells["operation"]]].reset_index(drop=True)
    if cells.empty:
        raise ValueError(f"{folder / CELLS} has no map over stretches of layers; scan one, such as --operation prune")
    base = record.get("base_perplexity")
    if not isinstance(base, int | float) or not base > 0:
        raise ValueError(f"{folder / SCAN_RECORD} has no base_perplexity above 0; run surgeon scan again")
    with np.errstate(divide="ignore"):
        cells["log_perplexity_ratio"] = np.log(cells["perplexity"].to_numpy(np.float64) / base)
    text = {name: record.get(name) for name in ("data", "data_hash", "window", "tokens")}
    return MeasuredScan(_changing(cells, base), {"folder": str(folder)} | text)


def read_pairs(folder: Path, model_hash: str) -> pd.DataFrame:
    """Read the results of `surgeon sensitivity`, one row per pair of neighbouring layers.

    Raises:
        FileNotFoundError: if the folder holds none.
        ValueError: if they are of another model, or a file is damaged.
    """
    record = read_json(_existing(folder, SENSITIVITY_RECORD, "sensitivity"))
    _check_model(folder, "sensitivity", record, model_hash)
    return _read_table(_existing(folder, PAIRS, "sensitivity"), ("first", "last", *PAIR_COLUMNS))


def readers(operation: str, first: int, last: int, num_layers: int) -> list[int]:
    """The layers that an operation on first..last takes the contribution of the layer before them from, or delays it.

    In parallel or merged these are all layers but the first; where layers are taken together in groups, all but the
    first of each whole group. Layers that are left out are lost to the next one after the stretch too. Where layers
    read late, the first one does as well.
    """
    heatmap = HEATMAPS[operation]
    if heatmap.group > 1:
        whole = (last - first + 1) // heatmap.group * heatmap.group
        return [first + place for place in range(whole) if place % heatmap.group]
    start = max(1, first) if heatmap.late else first + 1
    end = last + 1 if heatmap.removes else last
    return list(range(start, min(end, num_layers - 1) + 1))


def proxy_values(
    cells: pd.DataFrame, found: Similarity, pairs: pd.DataFrame | None = None
) -> dict[tuple[str, str], Values]:
    """Every proxy of every cell, by name and aggregate ("sum", "mean", "max", or "" where there is nothing to combine).

    Args:
        cells: with `operation`, `first`, `last`.
        pairs: as `read_pairs` returns them.

    Returns:
        Arrays of (cells,); NaN where a stretch has no reader.
    """
    spans = list(zip(cells["first"], cells["last"], strict=True))
    # A program of its own may run some layers twice, and others not whole.
    layers = found.layers.drop_duplicates("layer").set_index("layer")
    layers = layers.reindex(range(int(layers.index.max()) + 1))
    values: dict[tuple[str, str], Values] = {("length", ""): (cells["last"] - cells["first"] + 1).to_numpy(np.float64)}
    for name in LAYER_SUMS:
        column = layers[name].to_numpy(np.float64)
        values[name, "sum"] = np.array([column[first : last + 1].sum() for first, last in spans])
    distances = found.distances.set_index(["first", "last"])
    for name in ("angular_distance", "angular_distance_last_token", "cosine_distance"):
        values[name, ""] = distances[name].reindex(spans).to_numpy(np.float64)
    changed = [
        # Where tracks meet, or a track ends, the layer before is another one than its number says.
        [layer for layer in readers(name, *span, len(layers)) if (layer - 1, layer) in distances.index]
        for name, span in zip(cells["operation"], spans, strict=True)
    ]
    by_reader = {name: 1 - layers[name].to_numpy(np.float64) for name in CKA_COLUMNS}
    if pairs is not None:
        by_reader |= {name: _by_last(pairs, name, len(layers)) for name in PAIR_COLUMNS}
    for name, column in by_reader.items():
        for how, combine in (("sum", np.sum), ("mean", np.mean), ("max", np.max)):
            values[name, how] = np.array([combine(column[rows]) if rows else math.nan for rows in changed])
    return values


def correlate(scan: MeasuredScan, found: Similarity, pairs: pd.DataFrame | None = None) -> pd.DataFrame:
    """Rank correlation of every proxy with both measured damages, for every operation of a scan.

    Returns:
        Rows of `proxies.csv`: `operation`, `damage`, `proxy`, `aggregate`, Spearman's `rho`, its `p` and the number
        of stretches `n`, and `rho_at_equal_length`, the partial rank correlation given the stretch's length. The
        stretches overlap, so that p, which takes them for independent, is too small.
    """
    rows = []
    for operation in scan.cells["operation"].unique():
        cells = scan.cells[scan.cells["operation"] == operation]
        values = proxy_values(cells, found, pairs)
        for damage in DAMAGES:
            measured = cells[damage].to_numpy(np.float64)
            for (proxy, aggregate), column in values.items():
                one = rank_correlation(column, measured, values["length", ""])
                rows.append((operation, damage, proxy, aggregate, one.rho, one.p, one.n, one.rho_given))
    columns = ["operation", "damage", "proxy", "aggregate", "rho", "p", "n", "rho_at_equal_length"]
    return pd.DataFrame(rows, columns=columns)


def write_proxies(table: pd.DataFrame, folder: Path) -> Path:
    """Write `proxies.csv`; returns its path."""
    path = folder / PROXIES_TABLE
    write_table(path, table, digits=6)
    return path


def _changing(cells: pd.DataFrame, base: float) -> pd.DataFrame:
    """The cells that measure something of their own."""
    unchanged = (cells["divergence"] == 0) & np.isclose(cells["perplexity"], base, rtol=1e-6)
    shorter = cells[["operation", "first", "last", *_NEEDED[3:]]].assign(last=cells["last"] + 1)
    again = cells.merge(shorter, how="left", on=["operation", "first", "last"], suffixes=("", "_shorter"))
    repeated = np.ones(len(cells), dtype=bool)
    for name in _NEEDED[3:]:
        repeated &= (again[name] == again[f"{name}_shorter"]).to_numpy()
    return cells[~unchanged.to_numpy() & ~repeated].reset_index(drop=True)


def _by_last(pairs: pd.DataFrame, name: str, num_layers: int) -> Values:
    column = np.full(num_layers, math.nan)
    column[pairs["last"].to_numpy(int)] = pairs[name].to_numpy(np.float64)
    return column


def _existing(folder: Path, name: str, command: str) -> Path:
    path = folder / name
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no {name}; give the output folder of a finished surgeon {command}")
    return path


def _check_model(folder: Path, command: str, record: dict[str, Any], model_hash: str) -> None:
    held = record.get("model_hash")
    if held != model_hash:
        raise ValueError(
            f"{folder} holds a {command} of another model: {record.get('model')} with the hash {str(held)[:12]}, "
            f"while this model has {model_hash[:12]}; give a folder made with the same model"
        )


def _read_table(path: Path, needed: tuple[str, ...]) -> pd.DataFrame:
    try:
        table = pd.read_csv(path)
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no table of comma-separated values ({error}); make it again") from error
    missing = [name for name in needed if name not in table.columns]
    if missing:
        raise ValueError(f"{path} has no column {missing[0]}; make it again with this version of surgeon")
    return table
