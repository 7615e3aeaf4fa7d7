"""The ranks that a rank exchanges tensors with, and what its forward passes have cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from surgeon.runtime.comm.collectives import Collectives, Counts
from surgeon.runtime.kernels.recording import Recording
from surgeon.runtime.plan.placement import Group

Sent = tuple[Counts, Counts]


@dataclass
class Phase:
    """The cost of forward passes of one kind, as one rank measured it.

    Attributes:
        tokens: that went through them; new: that they brought, on rank 0.
        halved: passes that were computed in two halves.
        layers, vocabulary: collectives of the program's steps and forks, and of the embedding and the output head.
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
        """Count the collectives of layers and vocabulary inside apart."""
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


class Peers:
    """One rank's connections to groups of ranks, itself among them, and the place where their use is counted.

    Attributes:
        everybody: all ranks of the program.
        groups: the connection to each group, another one while a pass is recorded.
        counts: of the passes computed now; may be replaced.
    """

    def __init__(self, collectives: Collectives) -> None:
        self.rank = collectives.rank
        self.everybody = collectives.group
        self.groups: dict[Group, Collectives] = {collectives.group: collectives}
        self.counts = Phase()

    def connect(self, groups: Iterable[Group]) -> None:
        """Connect further groups; every rank asks for the same ones in the same order."""
        for group in groups:
            self.groups[group] = self.collectives.subgroup(group)

    @property
    def collectives(self) -> Collectives:
        """The connection to all ranks."""
        return self.groups[self.everybody]

    @property
    def are_recordable(self) -> bool:
        return all(one.recordable for one in self.groups.values())

    @contextmanager
    def recorded(self, recording: Recording) -> Iterator[None]:
        """Have what is sent noted in a recording."""
        groups = self.groups
        self.groups = {group: one.recorded(recording) for group, one in groups.items()}
        try:
            yield
        finally:
            self.groups = groups
