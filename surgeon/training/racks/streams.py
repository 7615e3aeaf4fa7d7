"""Streams between racks: how they are asked for and offered, and a folder of them for a rack trained afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from surgeon.processes.files import check_space
from surgeon.training.racks.items import Item, ItemKey, ItemKind
from surgeon.training.racks.spool import Spool


class StreamSource(Protocol):
    """Where a rack's streams come from: what the rack before has offered."""

    def ask(self, key: ItemKey) -> Tensor:
        """The stream of a window, (tokens, width).

        A rack that comes back from its checkpoint asks again for those behind it, and so does one that was short of
        memory and goes on with fewer windows at a time.
        """


class StreamSink(Protocol):
    """Where they go: to the rack behind."""

    def offer(self, *items: tuple[ItemKey, Tensor]) -> None:
        """Hand on streams of windows, (tokens, width) each, that belong together; maybe not for the first time."""


@dataclass(frozen=True)
class RackStreams:
    """What a rack takes, and what it hands on: a micro-batch at a time.

    Places count windows in the run's order; step s, from 1, has those from (s - 1) * batch on.

    Attributes:
        batch: windows of a step.
        source: None for the first rack.
        sink: None for the last one.
    """

    batch: int
    source: StreamSource | None = None
    sink: StreamSink | None = None

    def take(self, places: Tensor) -> Tensor | None:
        """The streams of a micro-batch, (windows, tokens, width); None where they begin in this rack."""
        if self.source is None:
            return None
        return torch.stack([self.source.ask(key) for key in self._keys(places)])

    def give(self, places: Tensor, stream: Tensor) -> None:
        """Hand on the streams of a micro-batch."""
        if self.sink is not None:
            self.sink.offer(*zip(self._keys(places), stream, strict=True))

    def take_held_out(self, step: int, window: int) -> Tensor | None:
        """The stream of a window of the held-out text, (1, tokens, width), after so many steps of the rack before."""
        if self.source is None:
            return None
        return self.source.ask(ItemKey(step, ItemKind.HELD_OUT, window))[None]

    def give_held_out(self, step: int, window: int, stream: Tensor) -> None:
        """Hand on the stream of a window of the held-out text after so many steps."""
        if self.sink is not None:
            self.sink.offer((ItemKey(step, ItemKind.HELD_OUT, window), stream[0]))

    def _keys(self, places: Tensor) -> list[ItemKey]:
        return [ItemKey(one // self.batch + 1, ItemKind.TRAINING, one % self.batch) for one in places.tolist()]


class KeptStreams:
    """A `StreamSource` and a `StreamSink`: what is offered by one process may be asked for by another, later.

    What is offered again stays as it was offered first.

    Args:
        folder: in the folder of the rack that they come from; it is made.
    """

    def __init__(self, folder: Path) -> None:
        self.spool = Spool(folder)

    def require_room(self, needed: int) -> None:
        """Refuse to begin where the disk has no room for the streams of a run, of so many bytes.

        Raises:
            OSError: with the folder, what is needed, and what is there.
        """
        folder = self.spool.folder
        check_space(folder, max(1, needed - sum(path.stat().st_size for path in folder.iterdir())))

    def offer(self, *items: tuple[ItemKey, Tensor]) -> None:
        """As `StreamSink` has it; they are on the disk before a checkpoint says that they were offered."""
        step = items[0][0].step
        folder = self.spool.folder
        before = self.spool.since(ItemKey(step - 1, ItemKind.TRAINING), 1)
        if step > 1 and not (before and before[0].step == step - 1):
            raise OSError(
                f"{folder} has nothing of step {step - 1}: what was handed on earlier is gone; remove {folder.parent}, "
                "and the same command trains that rack again"
            )
        for key, stream in items:
            self.spool.add(Item.of(key, stream))
        self.spool.sync()

    def ask(self, key: ItemKey) -> Tensor:
        """As `StreamSource` has it."""
        try:
            return self.spool.get(key).tensor()
        except (KeyError, EOFError) as error:
            folder = self.spool.folder
            raise OSError(f"{folder} does not have {key}; remove {folder.parents[1]} to begin the run again") from error
