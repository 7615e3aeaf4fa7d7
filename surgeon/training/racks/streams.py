"""Streams between racks: what hands them on, and a folder that keeps them for a rack that is trained afterwards."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from surgeon.errors import is_full_disk
from surgeon.processes.files import check_space


class StreamSource(Protocol):
    """Where a rack's streams come from: what the rack before handed on."""

    def take(self, places: range) -> Tensor:
        """The streams of a micro-batch, (windows, tokens, hidden).

        Args:
            places: in the run's order of windows; step s has those from s * batch on. A rack that comes back from its
                checkpoint asks again for those behind it; one that was short of memory asks for fewer at a time.
        """

    def take_held_out(self, step: int, window: int) -> Tensor:
        """The stream of a window of the held-out text, (1, tokens, hidden), after so many steps of the rack before."""


class StreamSink(Protocol):
    """Where they go: to the rack behind."""

    def give(self, places: range, stream: Tensor) -> None:
        """Hand on the streams of a micro-batch, (windows, tokens, hidden); they may have been handed on before."""

    def give_held_out(self, step: int, window: int, stream: Tensor) -> None:
        """Hand on the stream of a window of the held-out text, (1, tokens, hidden), after so many steps."""


def stretch_of(places: Tensor) -> range:
    """Places that follow each other, as a range."""
    first, count = int(places[0]), len(places)
    assert places.tolist() == list(range(first, first + count))
    return range(first, first + count)


class KeptStreams:
    """A `StreamSource` and a `StreamSink`: what was given by one process may be taken by another, later.

    Streams lie one after the other in a file, by their places, those of held-out text in a file for each step. What is
    given again takes the place of what was there.

    Args:
        folder: of the files, in the folder of the rack that they come from; it is made.
        tokens: of a window.
        width: of the stream.
        dtype: of its numbers.
        beside: how many streams a window of the training text has, the original's beside the rack's own, say.
    """

    def __init__(self, folder: Path, tokens: int, width: int, dtype: torch.dtype, beside: int = 1) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.dtype = folder, dtype
        self.shape, self.held_out_shape = (tokens, beside * width), (tokens, width)

    def require_room(self, training: int, held_out: int) -> None:
        """Refuse to begin where the disk has no room for the streams of so many windows.

        Raises:
            OSError: with the folder, what is needed, and what is there.
        """
        held = sum(path.stat().st_size for path in self.folder.iterdir())
        needed = training * self._bytes(self.shape) + held_out * self._bytes(self.held_out_shape)
        check_space(self.folder, max(1, needed - held))

    def _bytes(self, shape: tuple[int, int]) -> int:
        return math.prod(shape) * self.dtype.itemsize

    def give(self, places: range, stream: Tensor) -> None:
        """Keep the streams of a micro-batch, (windows, tokens, width)."""
        self._write("training.bin", places.start, stream, self.shape)

    def take(self, places: range) -> Tensor:
        """The streams at these places."""
        return self._read("training.bin", places.start, len(places), self.shape)

    def give_held_out(self, step: int, window: int, stream: Tensor) -> None:
        """Keep the stream of a window, (1, tokens, width), after so many steps."""
        self._write(f"held_out-{step}.bin", window, stream, self.held_out_shape)

    def take_held_out(self, step: int, window: int) -> Tensor:
        """The stream of a window after so many steps."""
        return self._read(f"held_out-{step}.bin", window, 1, self.held_out_shape)

    def _write(self, name: str, first: int, stream: Tensor, shape: tuple[int, int]) -> None:
        if stream.dtype != self.dtype or tuple(stream.shape[1:]) != shape:
            raise ValueError(
                f"a stream of {tuple(stream.shape)} in {stream.dtype} is handed on, where {shape} for each window "
                f"in {self.dtype} is expected"
            )
        handle = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            if first * self._bytes(shape) > os.fstat(handle).st_size:  # what is between would be zeros
                raise OSError(
                    f"{self.folder / name} ends before window {first}: what was handed on earlier is gone; remove "
                    f"{self.folder.parent}, and the same command trains that rack again"
                )
            left = memoryview(stream.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
            place = first * self._bytes(shape)
            while left:
                done = os.pwrite(handle, left, place)
                left, place = left[done:], place + done
            os.fsync(handle)  # before a checkpoint says that it was given
        except OSError as error:
            if not is_full_disk(error):
                raise
            raise OSError(
                f"the disk of {self.folder} filled up with the streams of the rack; make room, and run the same "
                "command again to go on"
            ) from error
        finally:
            os.close(handle)

    def _read(self, name: str, first: int, count: int, shape: tuple[int, int]) -> Tensor:
        path, found, size = self.folder / name, b"", self._bytes(shape)
        if path.is_file():
            with path.open("rb") as file:
                file.seek(first * size)
                found = file.read(count * size)
        if len(found) < count * size:
            raise OSError(
                f"{path} has no streams of windows {first} to {first + count - 1}; remove {self.folder.parents[1]} to "
                "begin the run again"
            )
        return torch.frombuffer(bytearray(found), dtype=self.dtype).reshape(count, *shape)
