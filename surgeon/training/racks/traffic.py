"""What went over a rack's connections, counted, and where its time went."""

from __future__ import annotations

import csv
import resource
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from surgeon.checkpoint.read import read_json
from surgeon.processes.files import write_json
from surgeon.training.racks.items import ItemKey, ItemKind
from surgeon.training.run_log import read_rows

Way = Literal["sent", "received"]
Direction = Literal["forward", "backward", "codas"]
TRAFFIC_FILE, TIMELINE_FILE = "traffic.json", "timeline.csv"
COLUMNS = ("start", "end", "what", "kind", "step", "place", "bytes")
_ROWS_HELD = 256  # before they are written


class Traffic:
    """Bytes and messages that a rack has sent and received, in this process and those before it, by what they were.

    Forward go items to the next rack, backward what that one says (requests, and what its checkpoints cover); codas
    go to and fro. Headers count.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """Count.

        Args:
            folder: where `write` writes; what it has written before is gone on with. None keeps it in memory.
        """
        self._path = None if folder is None else folder / TRAFFIC_FILE
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str, str], list[int]] = {}
        if self._path is not None and self._path.is_file():
            self._read(read_json(self._path))

    def _read(self, written: dict[str, Any]) -> None:
        for way in ("sent", "received"):
            for direction, kinds in written[way].items():
                for kind, count in kinds.items():
                    if isinstance(count, dict):
                        self._counts[way, direction, kind] = [int(count["bytes"]), int(count["items"])]

    def count(self, way: Way, direction: Direction, kind: ItemKind | None, size: int) -> None:
        """One message of so many bytes; without a kind it is no item."""
        with self._lock:
            found = self._counts.setdefault((way, direction, _named(kind)), [0, 0])
            found[0] += size
            found[1] += 1

    def to_json(self) -> dict[str, Any]:
        """{"sent": {"forward": {"bytes", "items", "training": {"bytes", "items"}, ...}, ...}, "received": ..., "peak"}.

        "peak" is the most memory that this process has held, in bytes.
        """
        found: dict[str, Any] = {
            way: {each: {"bytes": 0, "items": 0} for each in ("forward", "backward", "codas")}
            for way in ("sent", "received")
        }
        with self._lock:
            for (way, direction, kind), (size, items) in self._counts.items():
                total = found[way][direction]
                total["bytes"] += size
                total["items"] += items
                total[kind] = {"bytes": size, "items": items}
        # Linux counts in kilobytes, macOS in bytes.
        unit = 1 if sys.platform == "darwin" else 1024
        return found | {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}

    def write(self) -> None:
        """Write the counts as they are now."""
        if self._path is not None:
            write_json(self._path, self.to_json())


def _named(kind: ItemKind | None) -> str:
    return "control" if kind is None else kind.name.lower()


class Timeline:
    """What a rack did when, as a table: start, end (seconds of this machine's monotonic clock), what, and of what item.

    It computes (`compute`, the optimiser's steps and checkpoints among it) when it does not wait for input
    (`wait_input`) or for room in front of the next rack (`wait_room`). Transfers (`send`), which go on beside that,
    last until they have arrived, over an emulated link too.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """Begin.

        Args:
            folder: of the table; rows that are there stay. None writes nothing.
        """
        self._path = None if folder is None else folder / TIMELINE_FILE
        self._lock = threading.Lock()
        self._rows: list[tuple[float, float, str, str, int, int, int]] = []
        self._since: float | None = None
        self.waited = {"wait_input": 0.0, "wait_room": 0.0}
        if self._path is not None:
            whole = read_rows(self._path)
            with self._path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, COLUMNS, lineterminator="\n", extrasaction="ignore")
                writer.writeheader()
                writer.writerows(row for row in whole if set(COLUMNS) <= set(row))

    def begin(self) -> None:
        """Computing begins now."""
        self._since = time.monotonic()

    @contextmanager
    def waiting(self, what: Literal["wait_input", "wait_room"], key: ItemKey) -> Iterator[None]:
        """The time that something waits; before it, the rack has computed."""
        begun = time.monotonic()
        if self._since is not None:
            self._add(self._since, begun, "compute", key, 0)
        try:
            yield
        finally:
            self._since = ended = time.monotonic()
            self.waited[what] += ended - begun
            self._add(begun, ended, what, key, 0)

    def sent(self, begun: float, ended: float, key: ItemKey, size: int) -> None:
        """A transfer, which other threads see to."""
        self._add(begun, ended, "send", key, size)

    def _add(self, begun: float, ended: float, what: str, key: ItemKey, size: int) -> None:
        with self._lock:
            self._rows.append((begun, ended, what, _named(key.kind), key.step, key.place, size))
            if len(self._rows) >= _ROWS_HELD:
                self._write()

    def write(self) -> None:
        """Write what has been held back so far."""
        with self._lock:
            self._write()

    def _write(self) -> None:
        if self._path is not None and self._rows:
            with self._path.open("a", newline="", encoding="utf-8") as file:
                csv.writer(file, lineterminator="\n").writerows(
                    (f"{begun:.6f}", f"{ended:.6f}", *others) for begun, ended, *others in self._rows
                )
        self._rows.clear()
