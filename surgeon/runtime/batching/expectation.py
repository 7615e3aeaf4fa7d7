"""How long texts are going to be, as far as the newest ones tell: what admission reserves blocks for."""

from __future__ import annotations

import math

from surgeon.runtime.batching.sequence import Sequence


class Expectation:
    """What share of the tokens that they may add texts do add, by the newest of them.

    Attributes:
        share: what it is at first, until texts have ended; more again whenever one had to give way.
    """

    _WEIGHT = 1 / 8  # of the newest text

    def __init__(self, share: float) -> None:
        self.share = share

    def ended(self, sequence: Sequence) -> None:
        """Note how far a text has come."""
        if limit := sequence.request.sampling.max_new_tokens:
            added = (len(sequence.tokens) - len(sequence.request.prompt)) / limit
            self.share += (added - self.share) * self._WEIGHT

    def failed(self) -> None:
        """Note that texts have become longer than expected."""
        self.share += (1 - self.share) / 2

    def length(self, sequence: Sequence) -> int:
        """How many tokens of a text there will be in the cache."""
        prompt, limit = len(sequence.request.prompt), sequence.request.sampling.max_new_tokens
        return min(prompt + math.ceil(limit * self.share), sequence.last - 1)
