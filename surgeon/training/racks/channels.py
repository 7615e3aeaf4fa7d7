"""The streams between racks in processes of their own: what a rack's loss and its measurements take and hand on."""

from __future__ import annotations

import torch
from torch import Tensor

from surgeon.training.racks.inbox import Inbox
from surgeon.training.racks.items import ItemKey, ItemKind
from surgeon.training.racks.outbox import Outbox


def training_keys(places: range, batch: int) -> list[ItemKey]:
    """The items of windows by their places in the run's order: step s (from 0) has those from s * batch on."""
    return [ItemKey(place // batch + 1, ItemKind.TRAINING, place % batch) for place in places]


class ChannelSource:
    """A `StreamSource` that asks the rack before; single windows, so that micro-batches need not be of one size.

    Args:
        batch: windows of a step.
    """

    def __init__(self, inbox: Inbox, batch: int) -> None:
        self.inbox, self.batch = inbox, batch

    def take(self, places: range) -> Tensor:
        """As `StreamSource` has it.

        Raises:
            ConnectionError, ValueError: as `Inbox.ask`.
        """
        return torch.stack([self.inbox.ask(key) for key in training_keys(places, self.batch)])

    def take_held_out(self, step: int, window: int) -> Tensor:
        """As `StreamSource` has it."""
        return self.inbox.ask(ItemKey(step, ItemKind.HELD_OUT, window))


class ChannelSink:
    """A `StreamSink` that lets the rack behind ask, and waits where that one does not come along.

    Args:
        batch: windows of a step.
    """

    def __init__(self, outbox: Outbox, batch: int) -> None:
        self.outbox, self.batch = outbox, batch

    def give(self, places: range, stream: Tensor) -> None:
        """As `StreamSink` has it.

        Raises:
            OSError: as `Outbox.offer_all`.
        """
        self.outbox.offer_all(list(zip(training_keys(places, self.batch), stream, strict=True)))

    def give_held_out(self, step: int, window: int, stream: Tensor) -> None:
        """As `StreamSink` has it."""
        self.outbox.offer(ItemKey(step, ItemKind.HELD_OUT, window), stream)
