"""Linear maps of one input, as one matrix product each or by two factors, and how weights lie in memory for that.

On x86 processors in float32 a weight is packed once for this package's own kernel (runtime/kernels), which for few
tokens is faster than oneDNN's, a tenth slower for hundreds (scripts/bench/cpu_kernels.py). Other weights lie transposed
on CPUs, and as stored, (out_features, in_features), on GPUs, where a kernel multiplies one token or two (docs/gpus.md).

Two factors on several ranks: a sublayer's projections W = B A of the stream are cut by heads or neurons, so that each
rank needs some rows of every second factor B, but all that the first factors A give, their sum of ranks R. In DeInfer
each rank computes R / n of that in one product, and one all-gather gives it to all. Projections to the stream go the
other way: the sum over the ranks of what the first factor gives goes through the second one (program.py). Base has each
matrix W = B A by itself: a rank has some columns of B and rows of A, and every product is summed over the ranks, so
that all of them have all heads. A matrix's rank is called the columns that its first factor gives.

Shapes: T tokens of a pass, n ranks that share the sublayer.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from surgeon.models.weights import Tensors
from surgeon.runtime.comm.collectives import Peers
from surgeon.runtime.kernels.functions import FEW, Kernels, kernels_for, triton_kernels_for
from surgeon.runtime.plan.placement import Group

# Outputs that lie side by side, and of which there are a multiple
PANEL = 64
LEAST = 16


class Transposed:
    """A weight that lies as (in_features, out_features), or is seen so, on any device, in any dtype."""

    by_kernels = False

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self._kernels = None
        if weight.t().is_contiguous():
            self._kernels = triton_kernels_for(weight)

    def __call__(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Multiply inputs, (T, in_features), to (T, out_features), written to `out` if given."""
        if self._kernels is not None and 0 < len(x) <= FEW and x.stride(1) == 1:
            return self._kernels.product(x, self.weight.t(), bias, out)
        if bias is None:
            return torch.mm(x, self.weight, out=out)
        return torch.addmm(bias, x, self.weight, out=out)


class Panels:
    """A weight, (out_features, in_features), packed for the kernel.

    Attributes:
        weight: panels of 64 outputs, (in_features, 64), one after the other; the last of those that are left, filled up
            with zeros to a multiple of 16.
    """

    by_kernels = True

    def __init__(self, weight: Tensor, kernels: Kernels) -> None:
        self._kernels = kernels
        outputs, inputs = weight.shape
        self._shape = (outputs, inputs)
        whole = outputs // PANEL * PANEL
        filled = whole + -(-(outputs - whole) // LEAST) * LEAST
        self.weight = weight.new_empty(filled * inputs)
        panels, last = self.weight.split([whole * inputs, (filled - whole) * inputs])
        panels = panels.view(whole // PANEL, inputs, PANEL)
        panels.copy_(weight[:whole].reshape(whole // PANEL, PANEL, inputs).transpose(1, 2))
        last.view(inputs, filled - whole).copy_(F.pad(weight[whole:].t(), (0, filled - outputs)))

    def __call__(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Multiply inputs, (T, in_features), to (T, out_features)."""
        assert out is None, "products with packed weights make their own memory"
        if x.stride(1) != 1:
            x = x.contiguous()
        return self._kernels.product(x, self.weight, self._shape[0], bias)

    def rows(self, numbers: Tensor, first: int) -> Tensor:
        """Take rows by number, (numbers, in_features); zeros for numbers that none has."""
        return self._kernels.packed_rows(self.weight, self._shape, numbers, first)


Product = Transposed | Panels


def laid_out(weight: Tensor, packs: bool = True) -> Product:
    """Lay out a weight, (out_features, in_features), as products with it are fastest.

    Args:
        packs: False where products are to be written to memory that there is already, which packed weights cannot.
    """
    if weight.device.type != "cpu":
        return Transposed(weight.contiguous().t())
    kernels = kernels_for(weight)
    if packs and kernels is not None and platform.machine() in ("x86_64", "AMD64"):
        return Panels(weight, kernels)
    return Transposed(weight.t().contiguous())


class Linear:
    """One or more projections of the same input as one matrix product.

    Args:
        weights: (out_features, in_features) each.
        biases: (out_features,) each, or None.
        scale: of the output, if any.
        packs: as of `laid_out`.

    Attributes:
        by_kernels: whether all of its products are computed by the kernels (runtime/kernels).
    """

    def __init__(
        self,
        weights: list[Tensor],
        biases: list[Tensor | None],
        scale: float | None = None,
        packs: bool = True,
    ) -> None:
        self.scale = scale
        self.product = laid_out(torch.cat(weights), packs)
        self.by_kernels: bool = self.product.by_kernels
        self.bias: Tensor | None = None
        if any(bias is not None for bias in biases):
            filled = [
                w.new_zeros(w.shape[0]) if b is None else b for w, b in zip(weights, biases, strict=True)
            ]
            self.bias = torch.cat(filled)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """(T, in_features) to (T, all out_features)."""
        y = self.product(x, self.bias, out)
        if self.scale is None:
            return y
        return y.mul_(self.scale)


def whole_map(tensors: Tensors, roles: list[str], scale: float | None = None) -> Linear:
    """Projections that are whole matrices, as one product."""
    return Linear(
        [tensors[f"{role}.weight"] for role in roles],
        [tensors.get(f"{role}.bias") for role in roles],
        scale,
    )


def second_factor(tensors: Tensors, role: str, packs: bool = True) -> Linear:
    """The second factor of a projection, with its bias."""
    return Linear([tensors[f"{role}.second.weight"]], [tensors.get(f"{role}.bias")], packs=packs)


def is_factored(role: str, tensors: Tensors) -> bool:
    """Tell whether a projection is two factors."""
    return f"{role}.first.weight" in tensors


def count_outputs(tensors: Tensors, role: str) -> int:
    """Count the features that a projection gives."""
    last = f"{role}.second.weight"
    return tensors[last if last in tensors else f"{role}.weight"].shape[0]


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
        parts = self.peers.collectives.subgroup(self.group).all_gather(part, self.peers.counts.layers)
        return torch.cat(parts.unbind(), -1)

    def sum(self, part: Tensor, exactly: bool = False) -> Tensor:
        """Sum over all ranks; exactly, whatever the wire."""
        group = self.peers.collectives.subgroup(self.group)
        if exactly:
            group = group.exact
        return group.all_reduce(part, self.peers.counts.layers, at_once=True)()

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


LinearMap = Linear | LowRank | SummedApart  # one, or several of one input side by side


@dataclass(frozen=True)
class Maps:
    """The linear maps of a slice of a sublayer.

    Attributes:
        tensors: of the slice, by role; in Base of the whole sublayer.
        scale: of what is written to the stream, if any.
        later: the roles whose second factors are left out: of what is summed before them, and of keys and values that
            are kept in rank space.
        shared: the ranks that first factors are shared out among, if any.
        base: the ranks that sum every product of two factors by itself; numbers kept in rank space are gathered
            instead.
    """

    tensors: Tensors
    scale: float | None
    later: frozenset[str] = frozenset()
    shared: Sharing | None = None
    base: Sharing | None = None

    def in_projections(self, roles: list[str]) -> LinearMap:
        """The projections with these roles, of the normed stream: (T, h) to (T, all out_features)."""
        if self.base is not None:
            each = [
                LowRank(self.tensors, [role], later=self.later, sharing=self.base)
                if role in self.later
                else LowRank(self._own(role, self.base), [role])
                for role in roles
            ]
            return SummedApart(each, self.base)
        if not any(is_factored(role, self.tensors) for role in roles):
            return whole_map(self.tensors, roles)
        return LowRank(self.tensors, roles, later=self.later, sharing=self.shared)

    def out_projection(self, role: str) -> LinearMap:
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
