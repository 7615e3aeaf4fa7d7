"""What racks send each other, in the order in which they need it."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class ItemKind(IntEnum):
    """What an item is, in the order in which a rack makes them after the same number of steps."""

    TRAINING = 0
    HELD_OUT = 1
    CODA = 2


class ItemKey(NamedTuple):
    """Which item; keys are ordered as a rack makes the items.

    Attributes:
        step: of training, from 1: the step that it is an input of; of others, how many steps had been made.
        place: of training, which window of the step's batch; of held-out text, which window.
    """

    step: int
    kind: ItemKind
    place: int = 0

    def __str__(self) -> str:
        what = {
            ItemKind.TRAINING: f"window {self.place} of",
            ItemKind.HELD_OUT: f"held-out window {self.place} after",
            ItemKind.CODA: "the coda after",
        }[self.kind]
        return f"{what} step {self.step}"
