"""Sublayers of a healed draft: the model's own matrices, which stay as they are, with other norms and LoRA beside them.

W x + B A x (Hu et al. 2021, arXiv 2106.09685), of which W is the verifying model's and in memory once. Adding B A to W
would save two small products and cost the memory of every matrix that has an adapter. Of slices every rank has A of
what reads the stream whole, with its own rows of B, and its own columns of A of what writes to it, with B whole: what
is summed over the ranks is as without.

Shapes: T tokens of a pass.
"""

from __future__ import annotations

from copy import copy
from itertools import accumulate

import torch
from torch import Tensor

from surgeon.models.families import SublayerSpec
from surgeon.models.weights import Factors, Tensors
from surgeon.runtime.model.layers import Attention, FeedForward, norm_before
from surgeon.runtime.model.linear import Linear, LinearMap
from surgeon.runtime.model.mixture import MixtureOfExperts
from surgeon.runtime.plan.specification import Plan


class Adapted:
    """A linear map, or several of one input, with what adapters add.

    Args:
        whole: without them; it may be somebody else's, too.
        factors: A and B by the first output that they add to.
        outputs: how many there are.
        scale: what the output is multiplied by, if anything.
    """

    def __init__(self, whole: LinearMap, factors: dict[int, Factors], outputs: int, scale: float | None = None) -> None:
        self.whole = whole
        firsts = torch.cat([first for first, _ in factors.values()])
        seconds, column = firsts.new_zeros(outputs, len(firsts)), 0
        for place, (first, second) in factors.items():
            seconds[place : place + len(second), column : column + len(first)] = second
            column += len(first)
        self.first, self.second = Linear([firsts], [None]), Linear([seconds], [None], scale)
        self.by_kernels = all(one.by_kernels for one in (whole, self.first, self.second))

    def __call__(self, x: Tensor) -> Tensor:
        """(T, in_features) to (T, all out_features)."""
        return self.whole(x) + self.second(self.first(x))


def adapted(
    made: Attention | FeedForward | MixtureOfExperts,
    norms: Tensors,
    factors: dict[str, Factors],
    widths: dict[str, int],
    spec: SublayerSpec,
    plan: Plan,
) -> Attention | FeedForward | MixtureOfExperts:
    """What computes a slice of a draft's sublayer; what computes the model's stays as it is.

    Args:
        made: computes the model's, or the draft's without adapters.
        norms: by what they are for, those too that are the model's own.
        factors: by role.
        widths: how many outputs each role has that reads the stream.
    """
    again = copy(made)

    def reading(whole: LinearMap, roles: list[str]) -> LinearMap:
        places = dict(zip(roles, accumulate((widths[role] for role in roles), initial=0), strict=False))
        own = {places[role]: factors[role] for role in roles if role in factors}
        return Adapted(whole, own, sum(widths[role] for role in roles)) if own else whole

    def writing(whole: LinearMap, role: str) -> LinearMap:
        own = factors.get(role)
        return whole if own is None else Adapted(whole, {0: own}, plan.hidden, plan.output_scale)

    if isinstance(again, Attention):
        if norms:  # those of OLMo have no parameters
            again.take_norms(norms, spec, plan)
        again.qkv, again.o = reading(again.qkv, ["q", "k", "v"]), writing(again.o, "o")
        return again
    if norms:
        again.norm = norm_before(norms, plan)
    if isinstance(again, FeedForward):
        again.up = reading(again.up, ["gate", "up"] if again.gated else ["up"])
        again.down = writing(again.down, "down")
    return again
