"""Files of a checkpoint that are read while others of it are still being written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from threading import Condition

from torch import Tensor

from surgeon.beside import Stopped
from surgeon.checkpoint.read import Stored


class WholeFiles:
    """Which files are whole already; whoever reads one waits for it."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._closed = False
        self._changed = Condition()

    def add(self, name: str) -> None:
        """This file is whole."""
        with self._changed:
            self._names.add(name)
            self._changed.notify_all()

    def close(self) -> None:
        """No other file will be."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait(self, name: str) -> None:
        """Wait until a file is whole.

        Raises:
            Stopped: if it never will be.
        """
        with self._changed:
            self._changed.wait_for(lambda: name in self._names or self._closed)
            if name not in self._names:
                raise Stopped


@dataclass(frozen=True)
class StoredWhenWhole:
    """A tensor in a file that may not be whole yet: reading it waits, and raises `Stopped` if it never will be."""

    stored: Stored
    files: WholeFiles

    def tensor(self) -> Tensor:
        """The whole tensor; what is not looked at of it is not read."""
        self._wait()
        return self.stored.tensor()

    def rows(self, count: int) -> Iterator[Tensor]:
        """All rows in order, so many at a time."""
        self._wait()
        return self.stored.rows(count)

    def _wait(self) -> None:
        self.files.wait(self.stored.checkpoint.files[self.stored.name].name)
