"""Mixtures of experts on ranks: each has some whole experts, or some neurons of every expert.

Either way a step is one reduction. The router is whole on every rank, and shared experts are always sliced. Slices are
even whatever the router says; where experts are divided, the rank with most of a token's experts is waited for, which
on two ranks reads 1.4 times as much for two experts of eight. So they are divided only where slices do not come out
even, and where matrices are two factors, of which every rank would have one whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from surgeon.language.sublayer import FEED_FORWARD, Sublayer


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
