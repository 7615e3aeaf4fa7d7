"""Streams and codas between racks: by torch.distributed (gloo) between processes, by files between racks in turn.

A rack needs streams in the order in which the rack before makes them, so it just receives. It asks for a few messages
ahead; a rack that has sent more than these waits. Sent streams are not kept. Where a process ends, all connections
break, and all racks resume from a checkpoint that every one of them has.

A log has the traffic of a rack's connections, and a timeline of its work.
"""

from __future__ import annotations

import csv
import resource
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed import ProcessGroupGloo, Store  # type: ignore[attr-defined]

from surgeon.checkpoint.tensor_file import read_json
from surgeon.processes.files import check_space, whole_file, write_json
from surgeon.runtime.comm.collectives import Line, Link, SystemClock
from surgeon.training.head_loss import LossParts

# A rack waits for the one before it as long as that computes; one that ends breaks its connections at once.
PATIENCE = timedelta(days=1)
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

    Traffic is counted in bytes and items by kind: streams go to the next rack, codas to all racks.

    The timeline is a table: start, end (seconds of this machine's monotonic clock), activity, and item. A rack computes
    (`compute`, with the optimiser's steps and checkpoints) when it does not wait for input (`wait_input`) or for room
    in front of the next rack (`wait_room`). Transfers (`send`) go on beside that, and last until they have arrived,
    over an emulated link too; the rack sees that when it sends again.

    Attributes:
        waited: seconds in all.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """Begin, or resume from the files of a folder; None keeps all in memory."""
        self.folder = folder
        self.waited = 0.0
        self._traffic: dict[str, Any] = {"sent": {}, "received": {}}
        self._rows: list[tuple[float, float, str, str, int, int, int]] = []
        self._computes_since: float | None = None
        if folder is None:
            return
        if (folder / TRAFFIC_FILE).is_file():
            self._traffic = read_json(folder / TRAFFIC_FILE)
        timeline = folder / TIMELINE_FILE
        rows = timeline.read_text("utf-8") if timeline.is_file() else ""
        # A kill may have cut the last row off.
        timeline.write_text(rows[: rows.rfind("\n") + 1] or f"{','.join(COLUMNS)}\n", "utf-8")

    def count(self, way: str, kind: ItemKind, size: int, items: int = 1) -> None:
        """Add items, of so many bytes together, that were "sent" or "received"."""
        total = self._traffic[way].setdefault(kind.name.lower(), {"bytes": 0, "items": 0})
        total["bytes"] += size
        total["items"] += items

    def traffic(self) -> dict[str, Any]:
        """Nest the counts by way and kind, with the process's peak memory in bytes."""
        unit = 1 if sys.platform == "darwin" else 1024  # Linux counts in kilobytes, macOS in bytes
        return self._traffic | {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}

    def begin_computing(self) -> None:
        self._computes_since = time.monotonic()

    @contextmanager
    def time_wait(self, what: str, key: ItemKey) -> Iterator[None]:
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
        """Add a row to the timeline."""
        self._rows.append((begun, ended, what, key.kind.name.lower(), key.step, key.place, size))
        if len(self._rows) >= _MOST_ROWS:
            self.write()

    def write(self) -> None:
        if self.folder is not None:
            with (self.folder / TIMELINE_FILE).open("a", newline="", encoding="utf-8") as file:
                csv.writer(file, lineterminator="\n").writerows(
                    (f"{begun:.6f}", f"{ended:.6f}", *others) for begun, ended, *others in self._rows
                )
            write_json(self.folder / TRAFFIC_FILE, self.traffic())
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

    def slow_down(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        begun = busy()

        def rest() -> None:
            took = busy() - begun
            time.sleep(max(0.0, pace.factor * took - took, pace.least - took))

        parts = loss(model, inputs)
        engine: Any = Variable._execution_engine
        # The callback runs at the end of the backward pass.
        parts["loss"].register_hook(lambda _: engine.queue_callback(rest))
        return parts

    return slow_down


# Step, kind, place, dtype, tokens, bytes, nanoseconds until it has arrived over an emulated link: before each stream.
_HEAD_BYTES = 7 * torch.int64.itemsize
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_NO_MORE = -1  # in place of a kind
_UNDER_WAY = 2  # messages of a sender that the next rack has not asked for, or not got


class _Sent(NamedTuple):
    work: Any
    message: Tensor  # lives as long as it is sent
    key: ItemKey | None
    size: int
    begun: float
    due: float


class RackExchange:
    """Connections of one rack to all others; replicas of a rack connect to those of their own number.

    Where another process ends, every method raises RuntimeError, as torch.distributed does.

    Attributes:
        index: of this rack.
        racks: their number.
        log: of what is sent, received and waited for.
    """

    def __init__(
        self,
        store: Store,
        index: int,
        racks: int,
        ahead: int,
        room: int,
        link: Link | None,
        log: RackLog,
    ) -> None:
        """Connect to all other racks, which do the same.

        Args:
            store: of the processes of one replica number.
            ahead: windows that a rack may be ahead of the next one.
            room: bytes of a window's stream, at most.
            link: emulated for all that is sent; the racks must be on one machine.
        """
        self.index = index
        self.racks = racks
        self.log = log
        self._clock = SystemClock()
        self._line = None if link is None else Line(link, self._clock)
        self._group: Any = ProcessGroupGloo(store, index, racks, PATIENCE)
        self._saved: Any = None
        self._room = room
        self._asked_ahead = max(1, ahead - _UNDER_WAY)
        self._outgoing = deque[_Sent]()
        self._incoming = deque[tuple[Any, Tensor]]()
        if index > 0:
            for _ in range(self._asked_ahead):
                self._ask_ahead()

    def offer(self, *items: tuple[ItemKey, Tensor]) -> None:
        """Send streams of windows, (tokens, width) each, to the next rack; waits where that is too far behind."""
        with self.log.time_wait("wait_room", items[0][0]):
            for key, stream in items:
                while len(self._outgoing) >= _UNDER_WAY:
                    self._end_sending()
                due = 0.0
                if self._line is not None:
                    due = self._line.send(stream.nbytes)
                numbers = stream.detach().cpu().contiguous().flatten().view(torch.uint8)
                shape = _DTYPES.index(stream.dtype), len(stream), numbers.numel()
                self._send([*key, *shape, int(due * 1e9)], numbers, key, due)
                self.log.count("sent", key.kind, stream.nbytes)

    def _send(self, head: list[int], numbers: Tensor, key: ItemKey | None, due: float) -> None:
        left = torch.empty(self._room - numbers.numel(), dtype=torch.uint8)
        message = torch.cat([torch.tensor(head).view(torch.uint8), numbers, left])
        work = self._group.send([message], self.index + 1, 0)
        self._outgoing.append(_Sent(work, message, key, numbers.numel(), time.monotonic(), due))

    def _end_sending(self) -> None:
        sent = self._outgoing.popleft()
        sent.work.wait()
        if sent.key is not None:
            self.log.add(sent.begun, max(time.monotonic(), sent.due), "send", sent.key, sent.size)

    def _ask_ahead(self) -> None:
        message = torch.empty(_HEAD_BYTES + self._room, dtype=torch.uint8)
        self._incoming.append((self._group.recv([message], self.index - 1, 0), message))

    def _receive(self) -> tuple[ItemKey | None, Tensor, float]:
        """Wait for the next stream, and when it is due; None where the rack before has no more."""
        work, message = self._incoming.popleft()
        work.wait()
        step, kind, place, dtype, tokens, size, due = message[:_HEAD_BYTES].view(torch.int64).tolist()
        key = None if kind == _NO_MORE else ItemKey(step, ItemKind(kind), place)
        numbers = message[_HEAD_BYTES : _HEAD_BYTES + size].view(_DTYPES[dtype])
        return key, numbers.view(tokens, -1), due / 1e9

    def ask(self, key: ItemKey) -> Tensor:
        """Wait for the stream of a window, (tokens, width), from the rack before."""
        with self.log.time_wait("wait_input", key):
            sent, stream, due = self._receive()
            self._ask_ahead()
            if sent != key:
                raise ValueError(
                    f"rack {self.index - 1} has sent {sent or 'all it had'} where rack {self.index} needs {key}; "
                    "remove the run's folder to begin again"
                )
            self._clock.wait_until(due)
        self.log.count("received", key.kind, stream.nbytes)
        return stream

    def average(self, step: int, coda: Tensor) -> Tensor:
        """Return the mean of the codas of all racks after a step, (numbers,), the same bits in all of them."""
        others = self.racks - 1
        with self.log.time_wait("wait_input", ItemKey(step, ItemKind.CODA)):
            due = 0.0
            if self._line is not None:
                due = self._line.send(others * coda.nbytes)
            own = torch.tensor([coda.numel(), due], dtype=torch.float64)
            said = [torch.empty_like(own) for _ in range(self.racks)]
            self._group.allgather([said], [own]).wait()
            for rack, (numbers, _) in enumerate(said):
                if int(numbers) != coda.numel():
                    raise ValueError(
                        f"rack {rack} has a coda of {int(numbers):,} numbers and rack {self.index} one of "
                        f"{coda.numel():,}; codas of different shapes are not averaged: use average: never"
                    )
            mean = coda / self.racks
            self._group.allreduce([mean]).wait()
            self._clock.wait_until(max(float(arrives) for _, arrives in said))
        for way in ("sent", "received"):
            self.log.count(way, ItemKind.CODA, others * coda.nbytes, others)
        return mean

    def before_checkpoint(self) -> None:
        """Wait until all racks have the checkpoint before: a rack keeps two, and one of them has to be everyone's."""
        if self._saved is not None:
            self._saved.wait()
            self._saved = None

    def checkpoint_saved(self) -> None:
        self.before_checkpoint()
        self._saved = self._group.barrier()

    def finish(self) -> None:
        """Wait until everything is sent and received, and all racks are done."""
        if self.index + 1 < self.racks:
            for _ in range(self._asked_ahead):
                self._send([0, _NO_MORE, 0, 0, 1, 0, 0], torch.empty(0, dtype=torch.uint8), None, 0.0)
        while self._outgoing:
            self._end_sending()
        while self._incoming:
            key, _, _ = self._receive()
            if key is not None:
                raise ValueError(f"nobody needed {key}")
        self.before_checkpoint()
        self._group.barrier().wait()


_STREAM = "stream"  # of a file: (tokens, width)


class KeptStreams:
    """Streams in files, a window each, for a rack that is trained later.

    A stream that is offered again stays as it was.

    Args:
        folder: in the folder of the rack before; it is made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def _path(self, key: ItemKey) -> Path:
        return self.folder / f"{key.step:09}-{key.kind:d}-{key.place:06}.safetensors"

    def require_room(self, needed: int) -> None:
        """Refuse a run whose streams, of so many bytes, the disk cannot hold."""
        there = sum(path.stat().st_size for path in self.folder.iterdir())
        check_space(self.folder, max(1, needed - there))

    def offer(self, *items: tuple[ItemKey, Tensor]) -> None:
        """Write streams; they are on the disk before a checkpoint."""
        step = items[0][0].step
        if step > 1 and not self._path(ItemKey(step - 1, ItemKind.TRAINING)).is_file():
            raise OSError(
                f"{self.folder} has nothing of step {step - 1}: what was handed on earlier is gone; remove "
                f"{self.folder.parent}, and the same command trains that rack again"
            )
        for key, stream in items:
            path = self._path(key)
            if not path.is_file():
                with whole_file(path, durable=True) as beside:
                    save_file({_STREAM: stream.detach().cpu().contiguous()}, beside)

    def ask(self, key: ItemKey) -> Tensor:
        try:
            return load_file(self._path(key))[_STREAM]
        except (OSError, SafetensorError) as error:
            raise OSError(
                f"{self.folder} does not have {key}; remove {self.folder.parents[1]} to begin the run again"
            ) from error


@dataclass(frozen=True)
class RackStreams:
    """Streams that a rack takes and gives, a micro-batch or a held-out window at a time.

    Places count windows in the run's order; step s, from 1, has those from (s - 1) * batch on.

    Attributes:
        batch: windows of a step.
        source: None for the first rack.
        sink: None for the last one.
    """

    batch: int
    source: RackExchange | KeptStreams | None = None
    sink: RackExchange | KeptStreams | None = None

    def keys(self, places: Tensor) -> list[ItemKey]:
        """List the keys of a micro-batch."""
        return [
            ItemKey(one // self.batch + 1, ItemKind.TRAINING, one % self.batch)
            for one in places.tolist()
        ]

    def take(self, *keys: ItemKey) -> Tensor | None:
        """Ask for the streams of windows, (windows, tokens, width); None in the first rack."""
        if self.source is None:
            return None
        return torch.stack([self.source.ask(key) for key in keys])

    def give(self, stream: Tensor, *keys: ItemKey) -> None:
        if self.sink is not None:
            self.sink.offer(*zip(keys, stream, strict=True))
