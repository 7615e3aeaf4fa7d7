"""Neurons and experts of ranks: neurons that make up for unequal heads, and mixtures that ranks share.

Of a mixture each rank has some whole experts, or some neurons of every expert. Either way a step is one reduction. The
router is whole on every rank, and shared experts are always sliced. Slices are even whatever the router says; where
experts are divided, the rank with most of a token's experts is waited for, which on two ranks reads 1.4 times as much
for two experts of eight. So they are divided only where slices do not come out even, and where matrices are two
factors, of which every rank would have one whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from surgeon.language.sublayer import FEED_FORWARD, Sublayer
from surgeon.models.families import Family
from surgeon.models.families.specs import Units, unit_bounds


class WholeExperts(NamedTuple):
    """A rank's part of a mixture whose experts are divided.

    Attributes:
        of: the mixture, or the slice of one, that ranks share.
        own: places of its experts in it.
    """

    of: Sublayer
    own: range


class MixtureSize(NamedTuple):
    """A layer's experts, and the neurons of each."""

    experts: int
    neurons: int


@dataclass(frozen=True)
class Mixtures:
    """A model's mixtures, and their division among ranks.

    Attributes:
        sizes: by layer, None where it is no mixture; nothing if none is.
    """

    sizes: tuple[MixtureSize | None, ...] = ()

    @classmethod
    def of(cls, size: Callable[[int], MixtureSize | None], layers: int) -> Mixtures:
        sizes = tuple(map(size, range(layers)))
        return cls(sizes if any(sizes) else ())

    def size(self, sublayer: Sublayer) -> MixtureSize | None:
        """The size of a sublayer before it is sliced; None where it is no mixture."""
        if sublayer.kind != FEED_FORWARD or not self.sizes:
            return None
        size = self.sizes[sublayer.layers[0]]
        if size is None or sublayer.experts is None:
            return size
        return size._replace(experts=len(sublayer.experts))

    def whole_experts(self, part: Sublayer, members: int) -> WholeExperts | None:
        """The experts of one of so many ranks, if they divide a mixture's experts and not its neurons."""
        size = self.size(part)
        if size is None or part.piece is None or members == 1:
            return None
        index, count = part.piece
        member = index % members
        experts = size.experts
        of = replace(part, piece=None if count == members else (index // members, count // members))
        own = range(experts * member // members, experts * (member + 1) // members)
        uneven = size.neurons % part.piece[1] != 0
        if experts >= members and (part.ranks or uneven):
            return WholeExperts(of, own)
        return None


NO_MIXTURES = Mixtures()

GRAIN = 64  # neurons that the kernels multiply side by side


@dataclass(frozen=True)
class Balance:
    """The sizes of a model's layers, by which ranks that have fewer heads than others get more neurons.

    Only where attention and MLP are one sum, or where nobody waits for a sublayer's own: else equal parts are fastest.

    Attributes:
        heads, kv_heads: of an attention.
        neurons: of a feed-forward.
        head, kv_head, neuron: numbers in the matrices of one of each.
    """

    heads: int
    kv_heads: int
    neurons: int
    head: int
    kv_head: int
    neuron: int


@lru_cache(maxsize=1024)
def cut_neurons(
    balance: Balance, attentions: int, feed_forwards: int, members: int
) -> tuple[int, ...] | None:
    """Cut the neurons of each of some feed-forwards beside some attentions, all shared by as many members.

    Returns:
        Where each member's neurons end; None where equal parts do.
    """
    grain = GRAIN if balance.neurons >= GRAIN * members else 1
    units: Units = {"heads": balance.heads, "kv_heads": balance.kv_heads}
    busy = []  # numbers of each member's attentions
    for member in range(members):
        first, end = unit_bounds(units, "heads", (member, members))
        first_key, end_key = unit_bounds(units, "kv_heads", (member, members))
        numbers = (end - first) * balance.head + (end_key - first_key) * balance.kv_head
        busy.append(attentions * numbers)
    if len(set(busy)) == 1 or balance.neurons < grain * members:
        return None
    each = feed_forwards * balance.neuron
    level = (sum(busy) + balance.neurons * each) / members
    wanted = [max(0.0, level - own) for own in busy]
    ends = list[int]()
    for member, up_to in enumerate(accumulate(wanted), start=1):
        rounded = round(up_to / sum(wanted) * balance.neurons / grain) * grain
        before = ends[-1] if ends else 0
        # Everybody has some: the first of the slices adds the bias.
        ends.append(min(max(rounded, before + grain), balance.neurons - (members - member) * grain))
    return (*ends[:-1], balance.neurons)


def balance_of(
    family: Family, hidden: int, head_dim: int, attention: Units, feed_forward: Units
) -> Balance | None:
    """Return the balance of layers with such sublayers; None where ranks divide them alike or otherwise."""
    heads = attention.get("heads", 0)
    if not heads or "neurons" not in feed_forward:
        return None
    numbers = Counter[str]()
    for spec in (family.attention, family.mlp):
        for projection in spec.projections:
            numbers[projection.unit] += hidden * (1 if spec is family.mlp else head_dim)
    return Balance(
        heads,
        attention.get("kv_heads", heads),
        feed_forward["neurons"],
        numbers["heads"],
        numbers["kv_heads"],
        numbers["neurons"],
    )
