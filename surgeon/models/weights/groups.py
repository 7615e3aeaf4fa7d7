"""Layers to be stored for a program: one attention and one feed-forward of the same layers each.

Sublayers may have weights that no layer of the original has: averages, some of its heads or neurons, factors in place
of matrices. Those of the same layers share a stored one where they can: slices of one matrix always, other widths or
ranks of it never.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from surgeon.language.sublayer import KINDS, Sublayer


@dataclass(frozen=True)
class Group:
    """One layer to be stored.

    Attributes:
        layers: those it has the weights of; more than one for their average.
        count: slices it is cut into, where slices of other numbers are stored apart.
        sublayers: its attention and its feed-forward, by kind, unsliced; one that the program does not use is whole.
        used: the kinds that the program uses.
    """

    layers: tuple[int, ...]
    count: int | None
    sublayers: dict[str, Sublayer]
    used: frozenset[str]

    def sublayer(self, kind: str, piece: tuple[int, int] | None = None) -> Sublayer:
        return replace(self.sublayers[kind], piece=piece)


class Groups:
    """The layers to be stored for some sublayers.

    Args:
        by_count: whether slices of other numbers are stored apart, because each number has weights of its own.
    """

    def __init__(self, sublayers: Iterable[Sublayer], by_count: bool) -> None:
        self.by_count = by_count
        variants: dict[tuple[tuple[int, ...], int | None], dict[str, list[Sublayer]]] = {}
        for sublayer in sublayers:
            of_kind = variants.setdefault(self._key(sublayer), {kind: [] for kind in KINDS})[sublayer.kind]
            if (unsliced := replace(sublayer, piece=None)) not in of_kind:
                of_kind.append(unsliced)
        self.groups: list[Group] = []
        self._places: dict[tuple[Sublayer, int | None], int] = {}
        for (layers, count), by_kind in variants.items():
            for index in range(max(map(len, by_kind.values()))):
                used = frozenset(kind for kind in KINDS if index < len(by_kind[kind]))
                held = {kind: by_kind[kind][index] if kind in used else Sublayer(kind, layers) for kind in KINDS}
                for kind in used:
                    self._places[held[kind], count] = len(self.groups)
                self.groups.append(Group(layers, count, held, used))

    def place(self, sublayer: Sublayer) -> int:
        """Return the number of the layer that holds a sublayer."""
        return self._places[replace(sublayer, piece=None), self._key(sublayer)[1]]

    def _key(self, sublayer: Sublayer) -> tuple[tuple[int, ...], int | None]:
        return sublayer.layers, sublayer.piece[1] if self.by_count and sublayer.piece is not None else None
