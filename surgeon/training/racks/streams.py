"""Streams between racks: how they are asked for and offered, and a folder of them for a rack trained afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from surgeon.processes.files import check_space, whole_file


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


_STREAMS = "streams"  # of a file: (windows, tokens, width)


class StreamSource(Protocol):
    """Where a rack's streams come from: what the rack before has offered."""

    def ask(self, key: ItemKey) -> Tensor:
        """The stream of a window, (tokens, width)."""


class StreamSink(Protocol):
    """Where they go: to the rack behind."""

    def offer(self, *items: tuple[ItemKey, Tensor]) -> None:
        """Hand on streams of windows, (tokens, width) each, that belong together."""


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

    What is offered again stays as it was offered first. Each offer is a file of its own, of windows that follow each
    other.

    Args:
        folder: in the folder of the rack that they come from; it is made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._places: dict[ItemKey, tuple[Path, int]] = {}  # file, and which window in it
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("*.safetensors"):
            step, kind, first, count = map(int, path.stem.split("-"))
            self._note(path, ItemKey(step, ItemKind(kind), first), count)

    def _note(self, path: Path, first: ItemKey, count: int) -> None:
        for place in range(count):
            self._places[first._replace(place=first.place + place)] = path, place

    def require_room(self, needed: int) -> None:
        """Refuse to begin where the disk has no room for the streams of a run, of so many bytes.

        Raises:
            OSError: with the folder, what is needed, and what is there.
        """
        check_space(self.folder, max(1, needed - sum(path.stat().st_size for path in self.folder.iterdir())))

    def offer(self, *items: tuple[ItemKey, Tensor]) -> None:
        """As `StreamSink` has it; they are on the disk before a checkpoint says that they were offered."""
        step = items[0][0].step
        if step > 1 and ItemKey(step - 1, ItemKind.TRAINING) not in self._places:
            raise OSError(
                f"{self.folder} has nothing of step {step - 1}: what was handed on earlier is gone; remove "
                f"{self.folder.parent}, and the same command trains that rack again"
            )
        new = [(key, stream) for key, stream in items if key not in self._places]
        if new:
            first = new[0][0]
            path = self.folder / f"{first.step:09}-{first.kind:d}-{first.place:06}-{len(new)}.safetensors"
            with whole_file(path, durable=True) as beside:
                save_file({_STREAMS: torch.stack([stream.detach().cpu() for _, stream in new])}, beside)
            self._note(path, first, len(new))

    def ask(self, key: ItemKey) -> Tensor:
        """As `StreamSource` has it."""
        try:
            path, place = self._places[key]
            with safe_open(path, framework="pt") as file:
                stream: Tensor = file.get_slice(_STREAMS)[place]
        except (KeyError, OSError, SafetensorError) as error:
            raise OSError(
                f"{self.folder} does not have {key}; remove {self.folder.parents[1]} to begin the run again"
            ) from error
        return stream
