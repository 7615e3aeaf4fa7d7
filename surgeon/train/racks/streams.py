"""The streams that a rack has handed on, kept in a folder for a rack that is trained after it."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from surgeon.checkpoint.staging import check_space
from surgeon.errors import is_full_disk


class KeptStreams:
    """A `StreamSource` and a `StreamSink`: what was given by one process may be taken by another, later.

    Streams lie one after the other in a file, by their places, those of held-out text in a file for each step. What is
    given again takes the place of what was there.

    Args:
        folder: of the files; it is made.
        tokens: of a window.
        width: of the stream.
        dtype: of its numbers.
    """

    def __init__(self, folder: Path, tokens: int, width: int, dtype: torch.dtype) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.shape, self.dtype = folder, (tokens, width), dtype
        self._bytes = tokens * width * dtype.itemsize

    def require_room(self, windows: int) -> None:
        """Refuse to begin where the disk has no room for the streams of so many windows.

        Raises:
            OSError: with the folder, what is needed, and what is there.
        """
        held = sum(path.stat().st_size for path in self.folder.iterdir())
        check_space(self.folder, max(1, windows * self._bytes - held))

    def give(self, places: range, stream: Tensor) -> None:
        """Keep the streams of a micro-batch, (windows, tokens, width)."""
        self._write("training.bin", places.start, stream)

    def take(self, places: range) -> Tensor:
        """The streams at these places."""
        return self._read("training.bin", places.start, len(places))

    def give_held_out(self, step: int, window: int, stream: Tensor) -> None:
        """Keep the stream of a window, (1, tokens, width), after so many steps."""
        self._write(f"held_out-{step}.bin", window, stream)

    def take_held_out(self, step: int, window: int) -> Tensor:
        """The stream of a window after so many steps."""
        return self._read(f"held_out-{step}.bin", window, 1)

    def _write(self, name: str, first: int, stream: Tensor) -> None:
        if stream.dtype != self.dtype or tuple(stream.shape[1:]) != self.shape:
            raise ValueError(
                f"a stream of {tuple(stream.shape)} in {stream.dtype} is handed on, where {self.shape} for each window "
                f"in {self.dtype} is expected"
            )
        handle = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            left = memoryview(stream.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
            place = first * self._bytes
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

    def _read(self, name: str, first: int, count: int) -> Tensor:
        path, found = self.folder / name, b""
        if path.is_file():
            with path.open("rb") as file:
                file.seek(first * self._bytes)
                found = file.read(count * self._bytes)
        if len(found) < count * self._bytes:
            raise OSError(f"{path} has no streams of windows {first} to {first + count - 1}; begin the run again")
        return torch.frombuffer(bytearray(found), dtype=self.dtype).reshape(count, *self.shape)
