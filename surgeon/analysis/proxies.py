"""Cheap predictors of a scan's heatmaps: rank correlation of each with measured damage, by operation.

Every proxy rises with the damage that it predicts. A stretch of layers first..last gets

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
from itertools import permutations
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy import stats

from surgeon.analysis.similarity import CKA_COLUMNS
from surgeon.findings.scan import Scan
from surgeon.findings.similarity import Similarity
from surgeon.language.operations.base import HEATMAPS
from surgeon.quality.summary import Values

DAMAGES = ("divergence", "log_perplexity_ratio")
# Columns of sensitivity.csv.
PAIR_COLUMNS = ("bound", "relative_bound", "relative_first_order", "relative_error")
LAYER_SUMS = ("block_influence", "attention_size", "mlp_size")


def read_scan(folder: Path, model_hash: str) -> Scan:
    """Read a scan of a model."""
    found = Scan.read(folder, model_hash)
    # Only cells of stretches can be told by what lies between layers.
    if all(HEATMAPS[str(name)].varied is not None for name in found.cells["operation"]):
        raise ValueError(
            f"{folder / 'cells.csv'} has no map over stretches of layers; scan one, such as prune"
        )
    return found


def damages(scan: Scan) -> pd.DataFrame:
    """Select the cells of stretches that measure something of their own, with `log_perplexity_ratio` beside."""
    cells = scan.changes.reset_index(drop=True)
    with np.errstate(divide="ignore"):
        return cells.assign(log_perplexity_ratio=np.log(cells["ratio"].to_numpy(np.float64)))


def readers(operation: str, first: int, last: int, num_layers: int) -> list[int]:
    """The layers that no longer read, or read late, what the layer before them adds, after an operation on first..last.

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

    Returns:
        Arrays of (cells,); NaN where a stretch has no reader.
    """
    spans = list(zip(cells["first"], cells["last"], strict=True))
    # A program of its own may run some layers twice, and others not whole.
    layers = found.layers.drop_duplicates("layer").set_index("layer")
    layers = layers.reindex(range(int(layers.index.max()) + 1))
    values: dict[tuple[str, str], Values] = {
        ("length", ""): (cells["last"] - cells["first"] + 1).to_numpy(np.float64)
    }
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
        by_last = pairs.set_index("last").reindex(range(len(layers)))
        by_reader |= {name: by_last[name].to_numpy(np.float64) for name in PAIR_COLUMNS}
    for name, column in by_reader.items():
        for how, combine in (("sum", np.sum), ("mean", np.mean), ("max", np.max)):
            values[name, how] = np.array(
                [combine(column[rows]) if rows else math.nan for rows in changed]
            )
    return values


def correlate(
    damaged: pd.DataFrame, found: Similarity, pairs: pd.DataFrame | None = None
) -> pd.DataFrame:
    """Correlate the ranks of every proxy with both measured damages, for every operation of a scan.

    Returns:
        Rows of `proxies.csv`: `operation`, `damage`, `proxy`, `aggregate`, Spearman's `rho`, its `p`, the number of
        stretches `n`, and `rho_at_equal_length`, the partial rank correlation given the stretch's length. The stretches
        overlap, so that p, which takes them for independent, is too small.
    """
    rows = []
    for operation in damaged["operation"].unique():
        cells = damaged[damaged["operation"] == operation]
        values = proxy_values(cells, found, pairs)
        for damage in DAMAGES:
            measured = cells[damage].to_numpy(np.float64)
            for (proxy, aggregate), column in values.items():
                one = rank_correlation(column, measured, values["length", ""])
                rows.append((operation, damage, proxy, aggregate, one.rho, one.p, one.n, one.rho_given))
    columns = ["operation", "damage", "proxy", "aggregate", "rho", "p", "n", "rho_at_equal_length"]
    return pd.DataFrame(rows, columns=columns)


LEAST_PAIRS = 3
MOST_EXACT = 8


@dataclass(frozen=True)
class Correlation:
    """Spearman's rank correlation.

    Attributes:
        rho: NaN where there are fewer than 3 pairs of values, or one side does not vary.
        p: two-sided, of the null hypothesis of no correlation, for independent pairs; exact for up to 8 of them.
        n: pairs of values, those with a NaN left out.
        rho_given: the partial rank correlation at equal values of a third quantity; NaN where none was given, or the
            third quantity leaves nothing to vary.
    """

    rho: float
    p: float
    n: int
    rho_given: float = math.nan


def rank_correlation(x: ArrayLike, y: ArrayLike, given: ArrayLike | None = None) -> Correlation:
    """Correlate the ranks of x and y; infinite values are the largest."""
    columns = [
        np.asarray(values, dtype=np.float64) for values in ((x, y) if given is None else (x, y, given))
    ]
    kept = ~np.isnan(columns).any(0)
    ranks = [stats.rankdata(column[kept]) for column in columns]
    n = int(kept.sum())
    if n < LEAST_PAIRS or min(np.ptp(side) for side in ranks[:2]) == 0:
        return Correlation(math.nan, math.nan, n)
    rho, p = (float(value) for value in stats.spearmanr(ranks[0], ranks[1]))
    if n <= MOST_EXACT:  # the share of all orders of y whose correlation with x is as far from 0
        a, b = (side - side.mean() for side in ranks[:2])
        products = np.array(list(permutations(b))) @ a / (np.linalg.norm(a) * np.linalg.norm(b))
        p = float((np.abs(products) >= abs(rho) - 1e-9).mean())
    else:
        p = max(p, 2 / math.factorial(n))
    if given is None:
        return Correlation(rho, p, n)
    if np.ptp(ranks[2]) == 0:
        return Correlation(rho, p, n, rho)
    # The first-order partial correlation, from the three correlations of ranks.
    x_given, y_given = (float(np.corrcoef(side, ranks[2])[0, 1]) for side in ranks[:2])
    rest = (1 - x_given**2) * (1 - y_given**2)
    # Rounding alone can leave 1e-16 where nothing is left to vary.
    if rest > 1e-12:
        return Correlation(rho, p, n, (rho - x_given * y_given) / math.sqrt(rest))
    return Correlation(rho, p, n)
