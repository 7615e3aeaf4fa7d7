"""The error of running two neighbouring layers as an LP pair: the first-order bound of it, and what it really is.

Layer Parallelism, appendix A, with x the stream before layer k:

    u_k = x + A_k(x)     h_k = u_k + F_k(u_k)     u~ = x + A_k(x) + A_{k+1}(x)     D = h_k - x

    |E| <~ |J_A| |D|  +  |J_F| |A_{k+1}(x)|  +  |J_F'| (|F_k(u_k)| + |J_A| |D|)                       (equation 12)

with J_A the Jacobian of A_{k+1} at x, J_F of F_k at u_k, J_F' of F_{k+1} at u~, and E the pair's output in sequence
minus that in parallel. Where attention and MLP of a layer read the same stream (GPT-NeoX), all four sublayers of an LP
pair read x: F_k gives what it gives in sequence, and the error is that of A_{k+1} and F_{k+1} evaluated at x instead of
x + D, so that the second term is 0 and the third one |J_F'| |D| with J_F' at x.

Norms are Euclidean, of a window's whole stream, and operator norms those that go with it: then the bound holds for
every window as far as first order does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from surgeon.analysis.engine.walk import LayerPass, Walk
from surgeon.analysis.jacobian import Lanczos, OperatorNorm, push

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


@dataclass(frozen=True)
class PairTerms:
    """What equation 12 is made of, for one pair of layers (k, k + 1) on one window.

    Attributes:
        values: by name as in TERMS: `stream_norm`, of the stream after the pair; `update_norm`, |D|;
            `attention_norm`, |A_{k+1}(x)|; `mlp_norm`, |F_k(u_k)|; the three operator norms; the three terms of the
            bound and their sum; `first_order`, the size of the error by the Jacobians' products with the actual
            changes; `error`, the size of the error itself.
        norms: how the operator norms were found.
    """

    values: dict[str, float]
    norms: list[OperatorNorm]


def pair_terms(walk: Walk, first: int, passed: LayerPass, lanczos: Lanczos) -> PairTerms:
    """The terms of the error of an LP pair; to be called within `differentiable`.

    Args:
        walk: over one window.
        first: layer k.
        passed: its pass over the stream of the unedited model.
    """
    following = first + 1
    x = passed.before
    update = passed.update
    in_sequence = walk.dense_layer(following, passed.after)
    attention_at_x = walk.attention(following, x)
    shared = x if walk.reads_same else passed.middle + attention_at_x  # what the feed-forwards of the LP pair read

    attention = partial(walk.attention, following)
    mlp = partial(walk.mlp, first)
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
    sizes = {"update_norm": _norm(update), "attention_norm": _norm(attention_at_x), "mlp_norm": _norm(passed.mlp)}
    jacobians = dict(zip(_JACOBIANS, (norm.value for norm in norms), strict=True))
    attention_shift = jacobians["attention_jacobian"] * sizes["update_norm"]
    reach = sizes["update_norm"] if walk.reads_same else sizes["mlp_norm"] + attention_shift
    shifts = {  # the three terms of the bound in equation 12
        "attention_shift": attention_shift,
        "mlp_shift": 0.0 if walk.reads_same else jacobians["mlp_jacobian"] * sizes["attention_norm"],
        "next_mlp_shift": jacobians["next_mlp_jacobian"] * reach,
    }
    values = {"stream_norm": _norm(in_sequence.after), **sizes, **jacobians, **shifts}
    values |= {"bound": sum(shifts.values()), "first_order": _norm(first_order), "error": _norm(error)}
    return PairTerms(values, norms)


def layer_norm(walk: Walk, layer: int, stream: Tensor, lanczos: Lanczos) -> OperatorNorm:
    """The operator norm of I + J_f, the Jacobian of a whole layer's map (equation 13); within `differentiable`."""
    return lanczos.norm(lambda at: walk.layer(layer, at).after, stream)


def _norm(stream: Tensor) -> float:
    return float(torch.linalg.vector_norm(stream.double()))
