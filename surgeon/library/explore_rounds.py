"""The rounds of an exploration: fixed sizes, from little text to more."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Of a round: tokens of the text, in how many places stretches begin at least, trials for each layer.
SIZES = ((256, 3, 1), (1024, 6, 2), (2048, 12, 4), (4096, 24, 8), (8192, math.inf, 8))
WINDOWS, SHORTEST = 16, 64  # that a text is cut into; tokens of the shortest window


@dataclass(frozen=True)
class ExploreRound:
    """What a round measures on.

    Attributes:
        tokens: of the text, in windows of `window`; a search holds out as many.
        every: stretches of layers begin at its multiples, and their lengths are such.
        trials: of the search, at most.
    """

    number: int
    tokens: int
    window: int
    every: int
    trials: int

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"round-{self.number}"


def plan_rounds(layers: int, window: int, text: int) -> list[ExploreRound]:
    """The rounds for a model of so many layers, the smallest first.

    Args:
        window: the longest that the model may get.
        text: tokens that there are.
    """
    rounds = []
    for count, (tokens, places, trials) in enumerate(SIZES, start=1):
        most = min(tokens, text // 2)
        longest = min(window, max(SHORTEST, most // WINDOWS))
        every = 1 << int(math.log2(max(1.0, layers / places)))  # a power of 2, so that finer grids hold coarser ones
        rounds.append(ExploreRound(count, most // longest * longest, longest, every, trials * layers))
    return rounds
