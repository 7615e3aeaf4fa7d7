"""Items kept on disk until the rack that they are for has a checkpoint that was made with them."""

from __future__ import annotations

import os
import re
from bisect import bisect_left, insort
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from surgeon.errors import is_full_disk
from surgeon.processes.files import sync
from surgeon.training.racks.items import Item, ItemKey, read_head

_SEGMENT = re.compile(r"step-(\d+)\.items")


class Spool:
    """A folder with one file for each step, to which items are only added, and which goes as a whole.

    What a killed process was writing is dropped when the folder is opened again. Items survive the end of the process
    at once, and that of the machine from `sync` on.

    Attributes:
        folder: is made if it is not there.
        keys: of all items, in their order; not to be changed.
    """

    def __init__(self, folder: Path, advice: str = "make room, and run the same command again to go on") -> None:
        """Open it.

        Args:
            advice: for those whose disk is full.
        """
        self.folder = folder
        self._advice = advice
        self.keys: list[ItemKey] = []
        self._begins: dict[ItemKey, int] = {}  # bytes of its file before it
        self._unsynced: set[Path] = set()
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if _SEGMENT.fullmatch(path.name):
                self._scan(path)
        self.keys = sorted(self._begins)

    def _scan(self, path: Path) -> None:
        """Find the items of a file, and cut off what is not a whole one."""
        whole = 0
        end = path.stat().st_size
        with path.open("r+b") as file, suppress(EOFError, ValueError):
            while True:
                key, _, size = read_head(file)
                if file.tell() + size > end:
                    break
                self._begins.setdefault(key, whole)
                whole = file.seek(size, os.SEEK_CUR)
        os.truncate(path, whole)

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:09}.items"

    def __contains__(self, key: ItemKey) -> bool:
        return key in self._begins

    def since(self, key: ItemKey, most: int) -> Sequence[ItemKey]:
        """The first keys that are no earlier than this, so many at most."""
        begin = bisect_left(self.keys, key)
        return self.keys[begin : begin + most]

    def between(self, after: ItemKey, before: ItemKey) -> int:
        """How many items lie between two keys, without these."""
        begin = bisect_left(self.keys, after) + (after in self)
        return max(0, bisect_left(self.keys, before) - begin)

    def add(self, item: Item) -> None:
        """Keep an item; one that is there already is not written again.

        Raises:
            OSError: if the disk is full; what was kept before stays whole.
        """
        if item.key in self:
            return
        path = self._path(item.key.step)
        begin = path.stat().st_size if path.exists() else 0
        try:
            with path.open("ab") as file:
                item.write(file)
        except OSError as error:
            os.truncate(path, begin)
            if not is_full_disk(error):
                raise
            raise OSError(f"the disk of {self.folder} filled up with {item.key}: {self._advice}") from None
        self._unsynced.add(path)
        self._begins[item.key] = begin
        insort(self.keys, item.key)

    def get(self, key: ItemKey) -> Item:
        """An item as it was added.

        Raises:
            KeyError: if it is not there.
            EOFError, OSError, ValueError: if it cannot be read.
        """
        begin = self._begins[key]
        with self._path(key.step).open("rb") as file:
            file.seek(begin)
            return Item.read(file)

    def drop(self, step: int) -> None:
        """Forget the items up to a step, and this one's."""
        gone = {key.step for key in self.keys if key.step <= step}
        for each in gone:
            self._path(each).unlink(missing_ok=True)
            self._unsynced.discard(self._path(each))
        self.keys = [key for key in self.keys if key.step > step]
        self._begins = {key: self._begins[key] for key in self.keys}

    def sync(self) -> None:
        """Have everything on disk even if the machine ends."""
        for path in sorted(self._unsynced):
            sync(path)
        if self._unsynced:
            sync(self.folder)
        self._unsynced.clear()
