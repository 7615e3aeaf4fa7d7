"""Factors of a sublayer on several ranks: DeInfer's way, and the way it is compared with.

A sublayer's projections W = B A of the stream are cut by heads or neurons, so that each rank needs some rows of every
second factor B, but all that the first factors A give, their sum of ranks R. In DeInfer each rank computes R / n of
that in one product, and one all-gather gives it to all. Projections to the stream go the other way: the sum over the
ranks of what the first factor gives goes through the second one (outputs.py).

Base has each matrix W = B A by itself: a rank has some columns of B and rows of A, and every product is summed over the
ranks, so that all of them have all heads.

A matrix's rank is called the columns that its first factor gives. Shapes: T tokens of a pass, n ranks that share the
sublayer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from surgeon.models.weights import Tensors
from surgeon.runtime.model.linear import Linear, LinearMap, is_factored, second_factor, whole_map
from surgeon.runtime.model.peers import Peers
from surgeon.runtime.plan.placement import Group

# Of measuring which way is faster
ROUNDS = 5
WARM_UPS = 2


@dataclass(frozen=True)
class Sharing:
    """The ranks that share a sublayer, as one of them sees it."""

    peers: Peers
    group: Group

    @property
    def member(self) -> int:
        return self.group.index(self.peers.rank)

    @property
    def members(self) -> int:
        return len(self.group)

    def gather(self, part: Tensor) -> Tensor:
        """The parts of all ranks, (T, c) each, side by side: (T, n * c)."""
        parts = self.peers.groups[self.group].all_gather(part, self.peers.counts.layers)
        return torch.cat(parts.unbind(), -1)

    def sum(self, part: Tensor) -> Tensor:
        return self.peers.groups[self.group].all_reduce(part, self.peers.counts.layers, at_once=True)()

    def sum_exactly(self, part: Tensor) -> Tensor:
        """Sum over all ranks, on whatever wire."""
        exact = self.peers.groups[self.group].exact
        return exact.all_reduce(part, self.peers.counts.layers, at_once=True)()

    def share(self, columns: int) -> slice:
        """This rank's part of the first factors' columns; the last ranks may have fewer."""
        each = -(-columns // self.members)
        return slice(min(columns, self.member * each), min(columns, (self.member + 1) * each))


class LowRank:
    """Projections of the same input, some of which are products of two factors.

    Whole matrices and first factors are one product. Where ranks share first factors out, each computes its part of
    their output and gathers the others.

    Args:
        tensors: of a slice of a sublayer, by role.
        roles: of the projections, in the order of the output; at least one of them is two factors.
        scale: of the output, if any.
        later: the roles whose second factors are left out.
        sharing: the ranks that first factors are shared out among, if any.
    """

    def __init__(
        self,
        tensors: Tensors,
        roles: list[str],
        scale: float | None = None,
        later: frozenset[str] = frozenset(),
        sharing: Sharing | None = None,
    ) -> None:
        self.scale = scale
        self.sharing = sharing
        factored = [role for role in roles if is_factored(role, tensors)]
        whole = [role for role in roles if role not in factored]
        self.order = [[*factored, *whole].index(role) for role in roles]
        firsts = [tensors[f"{role}.first.weight"] for role in factored]
        self.columns = [len(first) for first in firsts]
        if sharing is not None:
            own = torch.cat(firsts)[sharing.share(sum(self.columns))]
            width = -(-sum(self.columns) // sharing.members)
            firsts = [own, own.new_zeros(width - len(own), own.shape[1])]  # parts must be of one size
        others = [tensors[f"{role}.weight"] for role in whole]
        self.widths = [sum(map(len, firsts)), *map(len, others)]
        biases = [None for _ in firsts] + [tensors.get(f"{role}.bias") for role in whole]
        self.first = Linear([*firsts, *others], biases)
        self.seconds = [None if role in later else second_factor(tensors, role) for role in factored]
        self.by_kernels = all(one is None or one.by_kernels for one in (self.first, *self.seconds))

    def __call__(self, x: Tensor) -> Tensor:
        """(T, in_features) to (T, all out_features)."""
        factors, *outputs = self.first(x).split(self.widths, -1)
        if self.sharing is not None:
            factors = self.sharing.gather(factors.contiguous())[:, : sum(self.columns)]
        parts = factors.split(self.columns, -1)
        made = [
            part if second is None else second(part)
            for second, part in zip(self.seconds, parts, strict=True)
        ]
        outputs = [*made, *outputs]
        y: Tensor = outputs[0]
        if len(outputs) > 1:
            y = torch.cat([outputs[place] for place in self.order], -1)
        if self.scale is None:
            return y
        return y.mul_(self.scale)


class SummedApart:
    """Projections of the same input whose factors' columns and rows ranks divide, summed each by itself.

    Args:
        maps: this rank's part of each; what is gathered is no part.
    """

    def __init__(self, maps: list[LowRank], sharing: Sharing) -> None:
        self.maps = maps
        self.sharing = sharing
        self.by_kernels = all(one.by_kernels for one in maps)

    def __call__(self, x: Tensor) -> Tensor:
        """(T, in_features) to (T, all out_features)."""
        parts = ((one, one(x)) for one in self.maps)
        return torch.cat(
            [self.sharing.sum(part) if one.sharing is None else part for one, part in parts], -1
        )


class Maps:
    """The linear maps of a slice of a sublayer.

    Args:
        tensors: of the slice, by role; in Base of the whole sublayer.
        scale: of what is written to the stream, if any.
        later: the roles whose second factors are left out: of what is summed before them, and of keys and values that
            are kept in rank space.
        shared: the ranks that first factors are shared out among, if any.
        base: the ranks that sum every product of two factors by itself; numbers kept in rank space are gathered
            instead.
    """

    def __init__(
        self,
        tensors: Tensors,
        scale: float | None,
        later: frozenset[str] = frozenset(),
        shared: Sharing | None = None,
        base: Sharing | None = None,
    ) -> None:
        self.tensors = tensors
        self.scale = scale
        self.later = later
        self.shared = shared
        self.base = base

    def reading(self, roles: list[str]) -> LinearMap:
        """The projections with these roles, of the normed stream: (T, h) to (T, all out_features)."""
        tensors = self.tensors
        later = self.later
        base = self.base
        if base is not None:
            each = [
                LowRank(tensors, [role], later=later, sharing=base)
                if role in later
                else LowRank(self._own(role, base), [role])
                for role in roles
            ]
            return SummedApart(each, base)
        if not any(is_factored(role, tensors) for role in roles):
            return whole_map(tensors, roles)
        return LowRank(tensors, roles, later=later, sharing=self.shared)

    def writing(self, role: str) -> LinearMap:
        """The projection to the stream: (T, in_features) to (T, h), or to (T, rank) in rank space."""
        if self.base is not None:
            return LowRank(self._own(role, self.base), [role], self.scale)
        if role in self.later:
            return Linear([self.tensors[f"{role}.first.weight"]], [None])
        if is_factored(role, self.tensors):
            return LowRank(self.tensors, [role], self.scale)
        return whole_map(self.tensors, [role], self.scale)

    def _own(self, role: str, base: Sharing) -> Tensors:
        """This rank's part of a matrix's factors, and the bias on one rank."""
        first, second = (self.tensors[f"{role}.{which}.weight"] for which in ("first", "second"))
        share = base.share(len(first))
        own = {f"{role}.first.weight": first[share], f"{role}.second.weight": second[:, share]}
        if f"{role}.bias" in self.tensors and base.member == 0:
            own[f"{role}.bias"] = self.tensors[f"{role}.bias"]
        return own


def time_of(compute: Callable[[], object], device: torch.device) -> float:
    """Time a computation in seconds, the best of a few times."""
    best = float("inf")
    for turn in range(WARM_UPS + ROUNDS):
        began = time.perf_counter()
        compute()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if turn >= WARM_UPS:
            best = min(best, time.perf_counter() - began)
    return best
