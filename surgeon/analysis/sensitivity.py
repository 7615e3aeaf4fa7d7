"""Bounds and measurements of the error of LP pairs, by appendix A of the Layer Parallelism paper.

For every pair: the terms of equation 12 on a few windows, the factor by which the layers after the pair may enlarge an
error (equation 13, the product of the operator norms of I + J_f), and the damage to the model's predictions with just
this pair in parallel.

Jacobians are only ever multiplied with vectors. Norms are the Euclidean one of a window's whole stream (tokens x hidden
numbers), and the operator norm that goes with it, the largest singular value of the Jacobian.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.func import jvp, vjp
from torch.nn.attention import SDPBackend, sdpa_kernel

from surgeon.analysis.engine.machine import LayerPass, Walk, windows_at_once
from surgeon.analysis.engine.measure import MeasureOptions, ProgramJournal, measure_missing
from surgeon.analysis.engine.sharing import share
from surgeon.analysis.similarity import rank_correlation
from surgeon.analysis.subject import Subject
from surgeon.findings.sensitivity import DAMAGES, PREDICTORS, Sensitivity
from surgeon.language.operations.pair import pair
from surgeon.language.program import Program
from surgeon.models.edit import program_of, require_pairs
from surgeon.progress import progress
from surgeon.quality.summary import estimate, perplexity

_JACOBIANS = ("attention_jacobian", "mlp_jacobian", "next_mlp_jacobian")
TERMS = (
    "stream_norm",
    "update_norm",
    "attention_norm",
    "mlp_norm",
    *_JACOBIANS,
    "attention_shift",
    "mlp_shift",
    "next_mlp_shift",
    "bound",
    "first_order",
    "error",
)


def pair_terms(
    walk: Walk, passed: LayerPass, lanczos: Lanczos
) -> tuple[dict[str, float], list[OperatorNorm]]:
    """The terms of the error of an LP pair of layers (k, k + 1), equation 12; to be called within `differentiable`.

    Args:
        walk: over one window.
        passed: layer k's pass over the stream of the unedited model.

    Returns:
        By name as in TERMS: `stream_norm`, of the stream after the pair; `update_norm`, |D|; `attention_norm`,
        |A_{k+1}(x)|; `mlp_norm`, |F_k(u_k)|; the three operator norms; the three terms of the bound and their sum;
        `first_order`, the size of the error by the Jacobians' products with the actual changes; `error`, its size.
        And the operator norms, with their convergence.
    """
    following = passed.layer + 1
    x = passed.before
    update = passed.update
    in_sequence = walk.dense_layer(following, passed.after)
    attention_at_x = walk.attention(following, x)
    # The input of both feed-forwards of the LP pair.
    shared = x if walk.reads_same else passed.middle + attention_at_x

    attention = partial(walk.attention, following)
    mlp = partial(walk.mlp, passed.layer)
    next_mlp = partial(walk.mlp, following)
    norms = [
        lanczos.norm(attention, x),
        lanczos.norm(mlp, passed.middle, by_token=True),
        lanczos.norm(next_mlp, shared, by_token=True),
    ]
    # To first order; each difference is "in sequence" minus "in parallel".
    attention_change = push(attention, x, update)
    mlp_change = -push(mlp, passed.middle, shared - passed.middle)
    next_change = update if walk.reads_same else passed.mlp + attention_change
    first_order = attention_change + mlp_change + push(next_mlp, shared, next_change)
    # Added up from differences between outputs: a difference between streams would lose digits.
    error = (in_sequence.attention - attention_at_x) + (passed.mlp - mlp(shared))
    error = error + (in_sequence.mlp - next_mlp(shared))
    sizes = {
        "update_norm": _norm(update),
        "attention_norm": _norm(attention_at_x),
        "mlp_norm": _norm(passed.mlp),
    }
    jacobians = dict(zip(_JACOBIANS, (norm.value for norm in norms), strict=True))
    attention_shift = jacobians["attention_jacobian"] * sizes["update_norm"]
    if walk.reads_same:
        reach = sizes["update_norm"]
    else:
        reach = sizes["mlp_norm"] + attention_shift
    shifts = {  # the three terms of the bound in equation 12
        "attention_shift": attention_shift,
        "mlp_shift": 0.0 if walk.reads_same else jacobians["mlp_jacobian"] * sizes["attention_norm"],
        "next_mlp_shift": jacobians["next_mlp_jacobian"] * reach,
    }
    values = {"stream_norm": _norm(in_sequence.after), **sizes, **jacobians, **shifts}
    values |= {"bound": sum(shifts.values()), "first_order": _norm(first_order), "error": _norm(error)}
    return values, norms


def _norm(stream: Tensor) -> float:
    return float(torch.linalg.vector_norm(stream.double()))


JOURNAL = "sensitivity.jsonl"
DEFAULT_WINDOWS = 4


@dataclass(eq=False)
class SensitivityJournal(ProgramJournal):
    """A folder's sensitivity: damage of pairs, and terms of layers.

    Attributes:
        layers: by window and layer, as `_about_layer` has them.
    """

    layers: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict, init=False)

    def take(self, line: Any) -> None:
        if "layer" in line:
            self.layers[line["window"], line["layer"]] = line
        else:
            super().take(line)


def sensitivity(
    subject: Subject,
    folder: Path,
    *,
    lanczos: Lanczos | None = None,
    jacobian_windows: int = DEFAULT_WINDOWS,
) -> Sensitivity:
    """Measure all pairs of neighbouring layers, and write `sensitivity.csv` and `sensitivity.json`.

    Started again on the same folder it goes on where it was, by `sensitivity.jsonl`. Jacobians take one window,
    whatever the limit on memory; `jacobian_windows` of them are spread over the text.
    """
    model = subject.model
    windows = subject.windows
    require_pairs(model)
    num_layers = model.config.num_hidden_layers
    if jacobian_windows < 1:
        raise ValueError(
            f"the number of windows for Jacobians must be at least 1, not {jacobian_windows}"
        )
    lanczos = lanczos or Lanczos()
    chosen = spread(len(windows.ids), jacobian_windows)
    wanted = {"choice of windows for Jacobians": chosen, "number of iterations": lanczos.iterations}
    identity = subject.identity(**wanted, tolerance=lanczos.tolerance, seed=lanczos.seed)
    dense = program_of(model)
    pairs = [pair(dense, range(first, first + 2)) for first in range(num_layers - 1)]
    path = folder / JOURNAL
    with SensitivityJournal(path, "sensitivity", identity, windows=len(windows.ids)) as journal:
        plan = share([dense, *pairs])
        at_once = windows_at_once(model, plan, windows.ids, subject.memory)
        options = MeasureOptions(at_once, memory=subject.memory, folder=folder)
        measure_missing("damage", subject, journal, plan, range(journal.windows), options)
        _compute_terms(subject, chosen, lanczos, journal)
    base_perplexity = perplexity(journal.values(dense, range(len(windows.ids)))[0])
    table = _table(journal, chosen, pairs, base_perplexity)
    rows = []
    for predictor in PREDICTORS:
        for damage in DAMAGES:
            if predictor != damage:
                one = rank_correlation(table[predictor], table[damage])
                rows.append((predictor, damage, one.rho, one.p, one.n))
    correlations = pd.DataFrame(rows, columns=["predictor", "damage", "rho", "p", "n"])
    within = [
        one["terms"]["error"] <= one["terms"]["bound"] for one in journal.layers.values() if one["terms"]
    ]
    record = subject.provenance(seed=lanczos.seed) | {
        "jacobian_windows": chosen,
        "iterations": lanczos.iterations,
        "tolerance": lanczos.tolerance,
        "base_perplexity": base_perplexity,
        "errors_within_bound": sum(within),
        "errors": len(within),
        "correlations": correlations.replace({math.nan: None}).to_dict("records"),
    }
    found = Sensitivity(table, correlations, record=record)
    found.write(folder)
    return found


def spread(windows: int, wanted: int) -> list[int]:
    """Choose up to this many windows, spread evenly over all of them."""
    return sorted({int(place) for place in np.linspace(0, windows - 1, min(wanted, windows)).round()})


def _compute_terms(
    subject: Subject, chosen: list[int], lanczos: Lanczos, journal: SensitivityJournal
) -> None:
    num_layers: int = subject.model.config.num_hidden_layers
    with progress("jacobians", len(chosen) * num_layers, "layers", len(journal.layers)) as ran:
        for window in chosen:
            todo = [layer for layer in range(num_layers) if (window, layer) not in journal.layers]
            if not todo:
                continue
            with differentiable(subject.model):
                walk = Walk(subject.model, subject.windows.ids[window : window + 1])
                stream = walk.start
                for layer in range(todo[-1] + 1):
                    passed = walk.dense_layer(layer, stream)
                    if layer in todo:
                        about = _about_layer(walk, passed, num_layers, lanczos)
                        journal.keep({"window": window, "layer": layer} | about)
                        ran(1)
                    stream = passed.after


def _about_layer(walk: Walk, passed: LayerPass, num_layers: int, lanczos: Lanczos) -> dict[str, Any]:
    """The terms of equation 12 of the pair that a layer begins, and its factor in equation 13."""
    layer = passed.layer
    terms = None
    gain = None
    norms: list[OperatorNorm] = []
    if layer + 1 < num_layers:
        terms, norms = pair_terms(walk, passed, lanczos)
    if layer > 1:  # no pair has the first two layers after it
        norms.append(lanczos.norm(lambda at: walk.layer(layer, at).after, passed.before))
        gain = norms[-1].value
    return {
        "terms": terms,
        "gain": gain,
        "iterations": max((norm.iterations for norm in norms), default=0),
        "converged": all(norm.converged for norm in norms),
    }


def _table(
    journal: SensitivityJournal, chosen: list[int], pairs: list[Program], base_perplexity: float
) -> pd.DataFrame:
    rows = []
    for first, program in enumerate(pairs):
        lines = [journal.layers[window, first] for window in chosen]
        by_window = pd.DataFrame([line["terms"] for line in lines], columns=list(TERMS))
        row: dict[str, Any] = {"first": first, "last": first + 1, **by_window.mean()}
        for name in ("bound", "first_order", "error"):
            row[f"relative_{name}"] = (by_window[name] / by_window["stream_norm"]).mean()
        after = range(first + 2, len(pairs) + 1)
        gains = [[journal.layers[window, layer]["gain"] for layer in after] for window in chosen]
        with np.errstate(divide="ignore"):
            amplification = np.log10(np.array(gains, dtype=np.float64)).sum(1)  # equation 13's product
            output_bound = amplification + np.log10(by_window["bound"].to_numpy())
        row |= {"log10_amplification": amplification.mean(), "log10_output_bound": output_bound.mean()}
        found = estimate(*journal.values(program, range(journal.windows)))
        row |= {
            name: getattr(found, name)
            for name in ("perplexity", "divergence", "divergence_low", "divergence_high")
        }
        row["log_perplexity_ratio"] = float(np.log(found.perplexity / base_perplexity))
        row["iterations"] = max(line["iterations"] for line in lines)
        rows.append(row | {"converged": all(line["converged"] for line in lines)})
    return pd.DataFrame(rows)


Function = Callable[[Tensor], Tensor]

_SMALLEST = torch.finfo(torch.float32).tiny
_RISK = 1e-4  # that a norm is above the bound given for it


@dataclass(frozen=True)
class OperatorNorm:
    """A bound of the largest singular value of a Jacobian.

    Attributes:
        value: not below the largest singular value, but for a probability of 1e-4, if `converged`.
        converged: whether that holds, and it is above it by no more than the tolerance.
    """

    value: float
    iterations: int
    converged: bool


@dataclass(frozen=True)
class Lanczos:
    """Bounds operator norms by the Lanczos iteration on J^T J from a random vector.

    The largest Ritz value t of k iterations is not above the largest eigenvalue of J^T J, and below it by a share e of
    it with a probability of at most 1.648 sqrt(N) exp(-(2k - 1) sqrt(e)), where N numbers are in a stream, however
    close its singular values are (Kuczynski and Wozniakowski 1992, theorem 4.2). So the iterations for a tolerance are
    known before, and the norm is at most sqrt(t / (1 - e)).

    Attributes:
        iterations: at most; each takes one product with the Jacobian and one with its transpose.
        tolerance: how far the bound may be above the norm, relative to it.
        seed: of the random vector.
    """

    iterations: int = 100
    tolerance: float = 0.01
    seed: int = 0

    def norm(self, function: Function, point: Tensor, by_token: bool = False) -> OperatorNorm:
        """Bound the operator norm of a function's Jacobian at a point.

        Args:
            function: of a stream, (windows, tokens, hidden), to one of the same shape.
            by_token: the function treats every token by itself. Its Jacobian consists of one block for each then, its
                norm is the largest of theirs, and all of them are iterated at once.
        """
        dims = (-1,) if by_token else tuple(range(point.dim()))
        size = point.shape[-1] if by_token else point.numel()
        # All blocks share one risk.
        exponent = math.log(1.648 * math.sqrt(size) * (point.numel() // size) / _RISK)
        enough = math.ceil((exponent / math.sqrt(1 - (1 + self.tolerance) ** -2) + 1) / 2)
        iterations = min(enough, self.iterations)
        # The largest eigenvalue of J^T J, from below, as the largest one of the tridiagonal matrices of all blocks.
        pull = vjp(function, point)[1]
        start = torch.randn(point.shape, generator=torch.Generator().manual_seed(self.seed))
        start = start.to(point.device, torch.promote_types(point.dtype, torch.float32))
        vector = start / _norms(start, dims).clamp_min(_SMALLEST)
        before = torch.zeros_like(vector)
        beside = vector.new_zeros(())
        diagonal: list[Tensor] = []  # (blocks,) each
        off_diagonal: list[Tensor] = []
        for _ in range(iterations):
            image = push(function, point, vector.to(point.dtype))
            length = _norms(image, dims).square()
            (product,) = pull(image)
            rest = product.to(vector.dtype) - length * vector - beside * before
            beside = _norms(rest, dims)
            diagonal.append(length.flatten())
            off_diagonal.append(beside.flatten())
            before = vector
            vector = rest / beside.clamp_min(_SMALLEST)  # of the norm 1, or zeros
        matrix = torch.diag_embed(torch.stack(diagonal, dim=-1))
        sides = torch.stack(off_diagonal, dim=-1)[:, :-1]
        matrix = matrix + torch.diag_embed(sides, offset=1) + torch.diag_embed(sides, offset=-1)
        square = max(0.0, float(torch.linalg.eigvalsh(matrix.double().cpu()).max()))
        share = (exponent / (2 * iterations - 1)) ** 2
        if iterations == enough:
            square /= 1 - share
        return OperatorNorm(math.sqrt(square), iterations, iterations == enough)


def _norms(vector: Tensor, dims: tuple[int, ...]) -> Tensor:
    # In 16 bits they would have three digits.
    dtype = torch.promote_types(vector.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(vector, dim=dims, keepdim=True, dtype=dtype)
    return norms


def push(function: Function, point: Tensor, vector: Tensor) -> Tensor:
    """Multiply a vector by a function's Jacobian at a point."""
    image: Tensor = jvp(function, (point,), (vector,))[1]
    return image


@contextmanager
def differentiable(model: nn.Module) -> Iterator[None]:
    """Make sublayers of a model differentiable forwards, as fused kernels and grouped products are not.

    Outputs stay the same up to rounding. Parameters get no gradients.
    """
    config: Any = model.config
    before = config._experts_implementation
    config._experts_implementation = "eager"
    try:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        config._experts_implementation = before
