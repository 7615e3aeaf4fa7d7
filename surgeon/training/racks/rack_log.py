"""Traffic of a rack's connections, and a timeline of its work."""

from __future__ import annotations

import copy
import csv
import resource
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd import Variable

from surgeon.checkpoint.tensor_file import read_json
from surgeon.processes.files import write_json
from surgeon.training.checkpoints import read_rows
from surgeon.training.head_loss import LossParts

TRAFFIC_FILE = "traffic.json"
TIMELINE_FILE = "timeline.csv"
COLUMNS = ("start", "end", "what", "kind", "step", "place", "bytes")
_MOST_ROWS = 256  # before they are written


class ItemKind(IntEnum):
    """Kinds of items, in the order in which a rack makes them after the same number of steps."""

    TRAINING = 0
    HELD_OUT = 1
    CODA = 2


class ItemKey(NamedTuple):
    """Key of an item; keys are ordered as a rack makes the items.

    Attributes:
        step: of training, from 1, that it is an input of; of others, the number of steps made before.
        place: of training, the window in the step's batch; of held-out text, the window.
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


class RackLog:
    """Traffic of a rack, in this process and earlier ones, and a timeline.

    Traffic is counted in bytes and items by kind: streams go forward, to the next rack, codas to all racks.

    The timeline is a table: start, end (seconds of this machine's monotonic clock), activity, and item. A rack computes
    (`compute`, with the optimiser's steps and checkpoints) when it does not wait for input (`wait_input`) or for room
    in front of the next rack (`wait_room`). Transfers (`send`) go on beside that, and last until they have arrived,
    over an emulated link too.

    Attributes:
        waited: seconds in all.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """Begin, or resume from the files of a folder; None keeps all in memory."""
        self.folder = folder
        self.waited = 0.0
        self._lock = threading.Lock()
        self._traffic: dict[str, Any] = {
            way: {direction: {"bytes": 0, "items": 0} for direction in ("forward", "codas")}
            for way in ("sent", "received")
        }
        self._rows: list[tuple[float, float, str, str, int, int, int]] = []
        self._computes_since: float | None = None
        if folder is None:
            return
        if (folder / TRAFFIC_FILE).is_file():
            self._traffic = read_json(folder / TRAFFIC_FILE)
        whole = [row for row in read_rows(folder / TIMELINE_FILE) if set(COLUMNS) <= set(row)]
        with (folder / TIMELINE_FILE).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n", extrasaction="ignore")
            writer.writeheader()
            writer.writerows(whole)

    def count(self, way: str, direction: str, kind: ItemKind, size: int, items: int = 1) -> None:
        """Add items, of so many bytes together, that were "sent" or "received", "forward" or among "codas"."""
        with self._lock:
            total = self._traffic[way][direction]
            for each in (total, total.setdefault(kind.name.lower(), {"bytes": 0, "items": 0})):
                each["bytes"] += size
                each["items"] += items

    def traffic(self) -> dict[str, Any]:
        """Nest the counts by way, direction and kind, with totals, and the process's peak memory in bytes."""
        unit = 1 if sys.platform == "darwin" else 1024  # Linux counts in kilobytes, macOS in bytes
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        with self._lock:
            return copy.deepcopy(self._traffic) | {"peak": peak}

    def begin_computing(self) -> None:
        self._computes_since = time.monotonic()

    @contextmanager
    def waiting(self, what: str, key: ItemKey) -> Iterator[None]:
        """Time a wait; before it, the rack has computed."""
        begun = time.monotonic()
        if self._computes_since is not None:
            self.add(self._computes_since, begun, "compute", key)
        try:
            yield
        finally:
            self._computes_since = ended = time.monotonic()
            self.waited += ended - begun
            self.add(begun, ended, what, key)

    def add(self, begun: float, ended: float, what: str, key: ItemKey, size: int = 0) -> None:
        """Add a row to the timeline; from any thread."""
        with self._lock:
            self._rows.append((begun, ended, what, key.kind.name.lower(), key.step, key.place, size))
            if len(self._rows) >= _MOST_ROWS:
                self._write_rows()

    def write(self) -> None:
        with self._lock:
            self._write_rows()
        if self.folder is not None:
            write_json(self.folder / TRAFFIC_FILE, self.traffic())

    def _write_rows(self) -> None:
        if self.folder is not None:
            with (self.folder / TIMELINE_FILE).open("a", newline="", encoding="utf-8") as file:
                csv.writer(file, lineterminator="\n").writerows(
                    (f"{begun:.6f}", f"{ended:.6f}", *others) for begun, ended, *others in self._rows
                )
        self._rows.clear()


@dataclass(frozen=True)
class RackPace:
    """Artificial slowness of a rack.

    Attributes:
        factor: multiplies the time of a micro-batch's forward and backward pass, by sleeping after it.
        least: seconds that they take at least.
    """

    factor: float = 1.0
    least: float = 0.0

    def __post_init__(self) -> None:
        if self.factor < 1 or self.least < 0:
            raise ValueError(
                f"a rack is made slower by a factor of at least 1 and takes at least 0 seconds, not {self.factor:g} "
                f"and {self.least:g}"
            )


def paced_loss(loss: LossParts, pace: RackPace, log: RackLog) -> LossParts:
    """Slow a loss, with its backward pass, down to a pace; waiting for others is not counted."""

    def busy() -> float:
        return time.monotonic() - log.waited

    def slowed(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        begun = busy()

        def rest() -> None:
            took = busy() - begun
            time.sleep(max(0.0, pace.factor * took - took, pace.least - took))

        parts = loss(model, inputs)
        engine: Any = Variable._execution_engine
        # The callback runs at the end of the backward pass.
        parts["loss"].register_hook(lambda _: engine.queue_callback(rest))
        return parts

    return slowed
