"""Items kept on disk until the rack that they are for has a checkpoint that was made with them."""

from __future__ import annotations

import io
import os
import re
from bisect import bisect_left, insort
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from surgeon.errors import is_full_disk
from surgeon.processes.files import sync
from surgeon.training.racks.items import Item, ItemKey, read_header

_SEGMENT = re.compile(r"step-(\d+)\.items")


class Spool:
    """A folder with one file for each step, to which items are only added, and which goes as a whole.

    What a killed process was writing is dropped when the folder is opened again. Items survive the end of the process
    at once, and that of the machine from `sync` on.

    Attributes:
        folder: is made if it is not there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._places: dict[ItemKey, tuple[Path, int, int]] = {}  # file, where the item begins, bytes
        self._keys: list[ItemKey] = []
        self._unsynced: set[Path] = set()
        self._open: tuple[Path, int] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.iterdir()):
            if _SEGMENT.fullmatch(path.name):
                self._scan(path)

    def _scan(self, path: Path) -> None:
        """Find the items of a file, and cut off what is not a whole one."""
        with path.open("r+b") as file:
            size, begin = os.fstat(file.fileno()).st_size, 0
            with suppress(EOFError, ValueError):
                while begin < size:
                    key, header, length = read_header(lambda count: _exactly(file, count))
                    end = begin + len(header) + length
                    if end > size:
                        break
                    self._note(key, path, begin, end - begin)
                    begin = end
                    file.seek(begin)
            file.truncate(begin)

    def _note(self, key: ItemKey, path: Path, begin: int, size: int) -> None:
        if key not in self._places:
            insort(self._keys, key)
            self._places[key] = (path, begin, size)

    def __contains__(self, key: ItemKey) -> bool:
        return key in self._places

    def keys(self) -> Sequence[ItemKey]:
        """Of all items, in their order; not to be changed."""
        return self._keys

    def from_key(self, key: ItemKey) -> int:
        """The index in `keys` of the first one that is no earlier than this."""
        return bisect_left(self._keys, key)

    def between(self, after: ItemKey | None, before: ItemKey) -> int:
        """How many items lie between two keys, without these; from the first one where there is no `after`."""
        begin = 0 if after is None else self.from_key(after) + (after in self._places)
        return max(0, self.from_key(before) - begin)

    def add(self, item: Item) -> None:
        """Keep an item; one that is there already is not written again.

        Raises:
            OSError: if the disk is full; what was kept before stays whole.
        """
        if item.key in self._places:
            return
        path, descriptor = self._segment(item.key.step)
        begin = os.fstat(descriptor).st_size
        try:
            for part in (item.header, item.data):
                _write(descriptor, part)
        except OSError as error:
            os.ftruncate(descriptor, begin)
            if not is_full_disk(error):
                raise
            raise OSError(
                f"the disk of {self.folder} filled up with {item.key}: what a rack hands on is kept there until the "
                "next rack's checkpoints cover it; make room, or save checkpoints more often (--save-every), and run "
                "the same command again to go on"
            ) from None
        self._unsynced.add(path)
        self._note(item.key, path, begin, item.nbytes)

    def _segment(self, step: int) -> tuple[Path, int]:
        """The file of a step, and its open descriptor."""
        path = self.folder / f"step-{step:09}.items"
        if self._open is None or self._open[0] != path:
            self.close()
            self._open = (path, os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600))
        return self._open

    def get(self, key: ItemKey) -> Item:
        """An item as it was added.

        Raises:
            KeyError: if it is not there.
            OSError: if it cannot be read.
        """
        path, begin, size = self._places[key]
        with path.open("rb") as file:
            file.seek(begin)
            held = _exactly(file, size)
        reader = io.BytesIO(held)
        _, header, _ = read_header(lambda count: _exactly(reader, count))
        return Item(key, header, held[len(header) :])

    def drop(self, step: int) -> None:
        """Forget the items up to a step, and this one's."""
        gone = {path for key, (path, _, _) in self._places.items() if key.step <= step}
        if self._open is not None and self._open[0] in gone:
            self.close()
        for path in gone:
            path.unlink(missing_ok=True)
        self._unsynced -= gone
        self._keys = [key for key in self._keys if key.step > step]
        self._places = {key: self._places[key] for key in self._keys}

    def sync(self) -> None:
        """Have everything on disk even if the machine ends."""
        for path in sorted(self._unsynced):
            sync(path)
        if self._unsynced:
            sync(self.folder)
        self._unsynced.clear()

    def close(self) -> None:
        """Release the open file; the spool may be used again."""
        if self._open is not None:
            os.close(self._open[1])
            self._open = None


def _exactly(file: io.BufferedRandom | io.BufferedReader | io.BytesIO, count: int) -> bytearray:
    held = bytearray(file.read(count))
    if len(held) < count:
        raise EOFError
    return held


def _write(descriptor: int, data: bytes | bytearray) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]
