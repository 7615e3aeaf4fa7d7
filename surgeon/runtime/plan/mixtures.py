"""How ranks share a mixture of experts: each some whole experts, or each some neurons of every expert.

Either way a step is one reduction: a rank adds what its experts, or its neurons of them, make of the tokens that the
router sends there. The router is whole on every rank, and shared experts are always sliced.

Slices are even whatever the router says, and read a little of every expert of a token. Where experts are divided, the
rank with most of a token's experts is waited for, which on two ranks reads 1.4 times as much for two experts of eight,
in fewer and wider matrices. They are divided where slices do not come out even, and where matrices are two factors, of
which every rank would have one whole. Otherwise both ways are open, and the one is taken that is faster for a token:
ranks measure it as they load a model, predictions predict it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from surgeon.language.sublayer import FEED_FORWARD, Sublayer
from surgeon.words import three_digits

ExpertsMode = Literal["auto", "divided", "sliced"]


A_MIXTURE = "a mixture"  # what ranks measure


class WholeExperts(NamedTuple):
    """What a rank has of a mixture whose experts are divided.

    Attributes:
        of: the mixture, or the slice of one, that ranks share.
        own: which of its experts, by their places in it.
    """

    of: Sublayer
    own: range


class MixtureSize(NamedTuple):
    """How many experts a layer has, and how many neurons each of them."""

    experts: int
    neurons: int


class ExpertTimes(NamedTuple):
    """Seconds that a token takes on the busiest rank, by how ranks share the experts."""

    sliced: float
    divided: float

    @property
    def dividing(self) -> bool:
        """Whether experts are to be divided."""
        return self.divided < self.sliced

    def line(self, what: str) -> str:
        """What to tell the user of a mixture, or of a pass, which takes so long."""
        one, other = ("divided", "sliced") if self.dividing else ("sliced", "divided")
        times = [f"{three_digits(1e3 * getattr(self, way))} ms" for way in (one, other)]
        return f"experts {one}: for a token {what} takes {times[0]} so, {times[1]} {other}"


@dataclass(frozen=True)
class Mixtures:
    """A model's mixtures, and how ranks share one.

    Attributes:
        sizes: by layer, None where it is no mixture; nothing if none is.
        mode: whether experts are divided or sliced; auto is as this module's first lines say.
        dividing: whether auto divides them where both ways are open.
    """

    sizes: tuple[MixtureSize | None, ...] = ()
    mode: ExpertsMode = "auto"
    dividing: bool = False

    @classmethod
    def of(cls, size: Callable[[int], MixtureSize | None], layers: int, mode: ExpertsMode = "auto") -> Mixtures:
        sizes = tuple(map(size, range(layers)))
        return cls(sizes if any(sizes) else (), mode)

    def size(self, sublayer: Sublayer) -> MixtureSize | None:
        """Of a sublayer before it is sliced; None where it is no mixture."""
        if sublayer.kind != FEED_FORWARD or not self.sizes:
            return None
        size = self.sizes[sublayer.layers[0]]
        if size is None or sublayer.experts is None:
            return size
        return size._replace(experts=len(sublayer.experts))

    def whole_experts(self, part: Sublayer, members: int) -> WholeExperts | None:
        """The experts that one of some ranks has, if they divide a mixture's experts among them.

        Args:
            part: the slice of the mixture that is this rank's, if they slice it.
        """
        size = self.size(part)
        if size is None or part.piece is None or members == 1:
            return None
        index, count = part.piece
        member = index % members
        experts = size.experts
        of = replace(part, piece=None if count == members else (index // members, count // members))
        own = range(experts * member // members, experts * (member + 1) // members)
        if self._divides(size, part, members):
            return WholeExperts(of, own)
        return None

    def is_open(self, part: Sublayer, members: int) -> bool:
        """Whether ranks may as well divide the experts as slice each of them; arguments as of `whole_experts`."""
        one, other = (replace(self, dividing=way).whole_experts(part, members) for way in (False, True))
        return one != other

    def _divides(self, size: MixtureSize, part: Sublayer, members: int) -> bool:
        assert part.piece is not None
        if self.mode == "sliced" or size.experts < members:
            return False
        return self.mode == "divided" or bool(part.ranks) or bool(size.neurons % part.piece[1]) or self.dividing


NO_MIXTURES = Mixtures()
