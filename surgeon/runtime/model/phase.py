"""What forward passes of one kind have cost: tokens, seconds, collectives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from surgeon.runtime.comm.collectives import Counts

Sent = tuple[Counts, Counts]


@dataclass
class Phase:
    """What forward passes of one kind have cost, as one rank measured it.

    Attributes:
        tokens: that went through them.
        new: tokens that they brought, on rank 0.
        halved: passes that were computed in two halves.
        layers: collectives of the program's steps and forks.
        vocabulary: collectives of the embedding and the output head.
    """

    seconds: float = 0.0
    passes: int = 0
    tokens: int = 0
    new: int = 0
    halved: int = 0
    layers: Counts = field(default_factory=Counts)
    vocabulary: Counts = field(default_factory=Counts)

    @contextmanager
    def apart(self) -> Iterator[Sent]:
        """Count what is sent inside apart: the collectives of the layers and of the vocabulary."""
        before = (self.layers, self.vocabulary)
        sent = (Counts(), Counts())
        self.layers, self.vocabulary = sent
        try:
            yield sent
        finally:
            self.layers, self.vocabulary = before

    def add(self, sent: Sent) -> None:
        """Count what was sent apart."""
        self.layers = self.layers + sent[0]
        self.vocabulary = self.vocabulary + sent[1]
