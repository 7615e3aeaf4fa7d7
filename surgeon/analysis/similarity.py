"""Similarity of layers, counterfactual CKA, block influence, angular distance, and what these predict of a scan.

The CKA compares a sublayer's output in the unedited model with its output when the contribution of the layer before is
taken out of the stream (Layer Parallelism, section 3, figure 5). With h_k the stream after layer k and x the one before
it, the counterfactual stream h_k - A_k - F_k is x itself: the next layer is run on it.

Block influence is 1 minus the cosine between the stream before and after a layer (ShortGPT, Men et al. 2024, equation
1), angular distance the angle between the streams before and after a stretch of layers, as a share of a half turn
(Gromov et al. 2024, "The Unreasonable Ineffectiveness of the Deeper Layers", equation 6).

Native tracks are compared each with itself: streams and stretches are those of one track between two meetings, and at a
meeting the contribution of the track's own last layer is taken out.

All are cheap predictors, proxies, of a scan's heatmaps. Every proxy rises with the damage that it predicts. A stretch
of layers first..last gets

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike
from scipy import stats
from torch import Tensor

from surgeon.analysis.engine.machine import layers_run, walks, windows_in_a_walk
from surgeon.analysis.subject import Subject
from surgeon.findings.scan import Scan
from surgeon.findings.similarity import Similarity
from surgeon.language.operations.applied import whole_runs
from surgeon.language.operations.base import HEATMAPS
from surgeon.language.program import Fork, Program
from surgeon.models.edit import as_stored, program_of
from surgeon.models.families import family_of
from surgeon.processes.files import make_folder
from surgeon.progress import Advance, progress
from surgeon.quality.summary import Values
from surgeon.words import show_value

LEAST_SAMPLES = 4  # the unbiased estimate divides by n - 3


@dataclass
class LinearCKA:
    """Compares two sets of features of the same samples, given in batches.

    Attributes:
        samples: given so far.
    """

    samples: int = 0
    _origin: tuple[Tensor, Tensor] | None = None
    # Of both, and of each with itself: sums of products of the features, their squared norm and 1.
    _sums: dict[str, Tensor] = field(default_factory=dict)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Take in a batch: (samples, features of x) and (samples, features of y); sums are kept in float64."""
        x = x.double()
        y = y.double()
        if self._origin is None:
            self._origin = x.mean(0), y.mean(0)
        x = _with_norms(x - self._origin[0])
        y = _with_norms(y - self._origin[1])
        self.samples += len(x)
        for name, one, other in (("xy", x, y), ("xx", x, x), ("yy", y, y)):
            if name in self._sums:
                self._sums[name].addmm_(one.T, other)
            else:
                self._sums[name] = one.T @ other

    def biased(self) -> float:
        """CKA as it is usually given, between 0 and 1; NaN where features do not vary.

        With few samples for their number, unrelated features come out similar.
        """
        return self._ratio(_biased_hsic)

    def debiased(self) -> float:
        """CKA from unbiased estimates of HSIC: around 0 for unrelated features, however few samples there are.

        NaN where features do not vary, or too little to be told from noise.
        """
        if self.samples < LEAST_SAMPLES:
            raise ValueError(f"debiased CKA needs at least {LEAST_SAMPLES} samples, not {self.samples}")
        return self._ratio(_unbiased_hsic)

    def _ratio(self, estimate: Callable[[Tensor, int], float]) -> float:
        hsic = {name: estimate(sums, self.samples) for name, sums in self._sums.items()}
        if hsic["xx"] <= 0 or hsic["yy"] <= 0:
            return math.nan
        return hsic["xy"] / math.sqrt(hsic["xx"]) / math.sqrt(hsic["yy"])


def _with_norms(features: Tensor) -> Tensor:
    """(samples, features + 2): behind the features their squared norm, and 1."""
    norms = features.square().sum(1, keepdim=True)
    return torch.cat([features, norms, torch.ones_like(norms)], dim=1)


def _biased_hsic(sums: Tensor, samples: int) -> float:
    """HSIC without its constant factor: the squared size of the cross-covariance, summed over samples."""
    centred = sums[:-2, :-2] - torch.outer(sums[:-2, -1], sums[-1, :-2] / samples)
    return float(centred.square().sum())


def _unbiased_hsic(sums: Tensor, samples: int) -> float:
    product = sums[:-2, :-2]  # X' Y
    x = sums[:-2, -1]
    y = sums[-1, :-2]
    both_norms = sums[-2, -2]
    trace = product.square().sum() - both_norms
    whole = (x.square().sum() - sums[-2, -1]) * (y.square().sum() - sums[-1, -2])
    rows = x @ product @ y - x @ sums[:-2, -2] - y @ sums[-2, :-2] + both_norms
    n = samples
    return float(trace + whole / ((n - 1) * (n - 2)) - 2 * rows / (n - 2)) / (n * (n - 3))


CKA_COLUMNS = ("cka_attention", "cka_attention_debiased", "cka_mlp", "cka_mlp_debiased")
DISTANCE_COLUMNS = [
    "first",
    "last",
    "angular_distance",
    "angular_distance_last_token",
    "cosine_distance",
]
_BLOCK_BYTES = 64 << 20
# Two passes over a layer, and two outputs in float64 as they are and around their mean.
_STREAMS_COMPARED = 16


@dataclass(frozen=True)
class Streams:
    """Means over tokens, of one run of layers; depth i is the stream before its layer i, the last one that after it.

    Attributes:
        cosine, angle: between the streams at two depths, (layers + 1, layers + 1); angles as a share of a half turn.
        last_angle: over the last token of each window only.
        sizes: by layer, the size of the attention's and of the feed-forward's output relative to the stream that each
            reads, (layers, 2).
    """

    run: range
    cosine: Tensor
    angle: Tensor
    last_angle: Tensor
    sizes: Tensor


def similarity(subject: Subject, folder: Path, inputs: dict[str, Any] | None = None) -> Similarity:
    """Measure CKA, block influence and angular distances, and write `similarity.csv`, `distances.csv` and the record.

    A model that runs a program of its own (native tracks, say) has rows for the layers that it runs whole, and for
    stretches of them that one track runs in order.

    Runs the model's layers three times over: once for the distances between all depths, then, layer by layer, on their
    own and on the counterfactual stream. Besides the model it holds two streams of all tokens, and the features' 6
    covariance matrices of one layer.
    """
    model = subject.model
    ids = subject.windows.ids
    if ids.numel() < LEAST_SAMPLES:
        raise ValueError(
            f"CKA needs at least {LEAST_SAMPLES} tokens, not {ids.numel()}; measure more of them"
        )
    record = subject.provenance(**inputs or {})
    with as_stored(model) as program:
        if program != program_of(model):
            record["program"] = str(program)
        found = whole_runs(program.nodes, family_of(model.config).steps_per_layer)
        runs = [run for run, _ in found]
        if not runs:
            raise ValueError(
                f"the model runs no layer whole: its program is {show_value(str(program), 200)}"
            )
        layers = sum(map(len, runs))
        make_folder(folder)
        with progress("similarity", 6 * layers * len(ids), "sublayers x windows") as ran:
            streams = _compare_streams(subject, program, runs, ran)
            cka = _counterfactual_cka(subject, program, layers, ran)
    record |= {"samples": ids.numel(), "features": model.config.hidden_size}
    layers_table = []
    distances = []
    columns = iter(cka)
    for one in streams:
        for place, layer in enumerate(one.run):
            row = {
                "layer": layer,
                **next(columns),
                "block_influence": 1 - float(one.cosine[place, place + 1]),
                "attention_size": float(one.sizes[place, 0]),
                "mlp_size": float(one.sizes[place, 1]),
            }
            layers_table.append(row)
            for end in range(place + 1, len(one.run) + 1):
                values = (one.angle[place, end], one.last_angle[place, end], 1 - one.cosine[place, end])
                distances.append((layer, one.run[end - 1], *map(float, values)))
    measured = Similarity(
        pd.DataFrame(layers_table).sort_values("layer", kind="stable", ignore_index=True),
        pd.DataFrame(sorted(distances), columns=DISTANCE_COLUMNS),
        record=record,
    )
    measured.write(folder)
    return measured


@torch.inference_mode()
def _compare_streams(
    subject: Subject, program: Program, runs: Sequence[range], ran: Advance
) -> list[Streams]:
    """Compare the streams of a model's own program at all depths of each run of whole layers."""
    model = subject.model
    ids = subject.windows.ids
    at_once = windows_in_a_walk(model, ids, max(map(len, runs)) + 1, 2 * _BLOCK_BYTES, subject.memory)
    sums = []
    for run in runs:
        cosine, angle, last_angle = torch.zeros(3, len(run) + 1, len(run) + 1, dtype=torch.float64)
        sums.append(
            Streams(run, cosine, angle, last_angle, torch.zeros(len(run), 2, dtype=torch.float64))
        )
    for walk in walks(model, ids, at_once):
        places = iter(sums)
        for run, passed, _ in layers_run(walk, program.nodes):
            if passed.layer == run.start:
                sum_ = next(places)
                streams = [passed.before]
            streams.append(passed.after)
            pairs = ((passed.attention, passed.before), (passed.mlp, passed.middle))
            sizes = torch.stack([(_norm(output) / _norm(stream)).sum() for output, stream in pairs])
            sum_.sizes[passed.layer - run.start] += sizes.cpu()
            ran(2 * len(walk.ids))
            if passed.layer == run[-1]:
                _add(sum_, streams)
    for sum_ in sums:
        for total in (sum_.cosine, sum_.angle, sum_.sizes):
            total.div_(ids.numel())
        sum_.last_angle.div_(len(ids))
    return sums


def _norm(stream: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(stream.double(), dim=-1)
    # A stream of zeros has no direction, and no NaN either.
    return norm.clamp_min(torch.finfo(torch.float64).tiny)


def _add(sum_: Streams, streams: list[Tensor]) -> None:
    """Add the cosines and angles between depths, some tokens at a time.

    In float64: next to 1, where streams of neighbouring layers are, single precision turns an angle of 0 into 3e-4.
    """
    tokens = streams[0].shape[1]
    flat = [stream.flatten(0, 1) for stream in streams]
    rows = max(1, _BLOCK_BYTES // (8 * len(flat) * flat[0].shape[1]))
    for start in range(0, len(flat[0]), rows):
        block = torch.stack([stream[start : start + rows].double() for stream in flat], dim=1)
        block /= _norm(block)[..., None]
        cosines = (block @ block.mT).clamp(-1, 1)
        # A stream's angle with itself is 0 whatever rounding makes of its cosine.
        cosines.diagonal(dim1=1, dim2=2).fill_(1)
        angles = cosines.acos() / math.pi
        ends_window = torch.arange(start, start + len(block), device=block.device) % tokens == tokens - 1
        sum_.cosine.add_(cosines.sum(0).cpu())
        sum_.angle.add_(angles.sum(0).cpu())
        sum_.last_angle.add_(angles[ends_window].sum(0).cpu())


@torch.inference_mode()
def _counterfactual_cka(
    subject: Subject, program: Program, layers: int, ran: Advance
) -> list[dict[str, float]]:
    """CKA of each whole layer's outputs with those without the layer before; NaN where there is none."""
    model = subject.model
    ids = subject.windows.ids
    hidden = model.config.hidden_size
    itemsize = model.dtype.itemsize
    most = max((len(node.branches) for node in program.nodes if isinstance(node, Fork)), default=0)
    # Streams of all, sums over features.
    held = (4 + 2 * most) * ids.numel() * hidden * itemsize + 6 * 8 * hidden**2
    parts = list(
        walks(model, ids, windows_in_a_walk(model, ids, _STREAMS_COMPARED, held, subject.memory))
    )
    ways = [layers_run(walk, program.nodes) for walk in parts]
    compared = []
    # All windows go through the program together, so that there are sums for one layer at a time.
    for _ in range(layers):
        attention = LinearCKA()
        mlp = LinearCKA()
        for walk, way in zip(parts, ways, strict=True):
            _, passed, without = next(way)
            if without is not None:
                alone = walk.layer(passed.layer, without)
                attention.add(passed.attention.flatten(0, 1), alone.attention.flatten(0, 1))
                mlp.add(passed.mlp.flatten(0, 1), alone.mlp.flatten(0, 1))
            del passed, without
            ran(4 * len(walk.ids))
        values = [math.nan] * 4
        if attention.samples:
            values = [x for cka in (attention, mlp) for x in (cka.biased(), cka.debiased())]
        compared.append(dict(zip(CKA_COLUMNS, values, strict=True)))
    return compared


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
