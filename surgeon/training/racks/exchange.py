"""Streams and codas between racks: by torch.distributed (gloo) between processes, by files between racks in turn.

A rack needs streams in the order in which the rack before makes them, so it just receives; bounded queues hold back a
rack that is too far ahead. Sent streams are not kept. Where a process ends, all connections break, and all racks resume
from a checkpoint that every one of them has.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from queue import Full, Queue
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store  # type: ignore[attr-defined]

from surgeon.processes.files import check_space, whole_file
from surgeon.runtime.comm.collectives import Line, Link, SystemClock
from surgeon.training.racks.rack_log import ItemKey, ItemKind, RackLog

# A rack waits for the one before it as long as that computes; one that ends breaks its connections at once.
PATIENCE = timedelta(days=1)
_LOOK_SECONDS = 0.5
# Step, kind, place, dtype, rows, columns, nanoseconds until it has arrived over an emulated link.
_NUMBERS_IN_HEAD = 7
_HEAD, _NUMBERS = 0, 1  # tags
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_NO_MORE = -1  # in place of a kind


class RackExchange:
    """Connections of one rack to all others; replicas of a rack connect to those of their own number.

    Where another process ends, every method raises RuntimeError, as torch.distributed does.

    Attributes:
        index: of this rack.
        racks: their number.
    """

    def __init__(
        self,
        store: Store,
        index: int,
        racks: int,
        ahead: int,
        link: Link | None,
        log: RackLog,
    ) -> None:
        """Connect to all other racks, which do the same.

        Args:
            store: of the processes of one replica number.
            ahead: windows that a rack may be ahead of the next one.
            link: emulated for all that is sent; the racks must be on one machine.
        """
        self.index = index
        self.racks = racks
        self._log = log
        self._clock = SystemClock()
        self._line = None if link is None else Line(link, self._clock)
        groups = (PrefixStore(name, store) for name in ("streams", "codas", "checkpoints"))
        connected: list[Any] = [ProcessGroupGloo(one, index, racks, PATIENCE) for one in groups]
        self._streams, self._codas, self._checkpoints = connected
        self._saved: Any = None
        self._failure: BaseException | None = None
        self._outgoing = Queue[tuple[ItemKey, Tensor] | None](1)
        # One more is under way, and one waits to be sent.
        self._incoming = Queue[tuple[ItemKey, float, Tensor] | BaseException | None](max(1, ahead - 2))
        self._threads: list[threading.Thread] = []
        if index > 0:
            self._threads.append(threading.Thread(target=self._receive, daemon=True))
        if index + 1 < racks:
            self._threads.append(threading.Thread(target=self._send, daemon=True))
        for thread in self._threads:
            thread.start()

    def offer(self, *items: tuple[ItemKey, Tensor]) -> None:
        """Send streams of windows, (tokens, width) each, to the next rack; waits while the queue is full."""
        with self._log.waiting("wait_room", items[0][0]):
            for key, stream in items:
                self._put((key, stream.detach().to("cpu", copy=True).contiguous()))

    def ask(self, key: ItemKey) -> Tensor:
        """Wait for the stream of a window, (tokens, width), from the rack before."""
        with self._log.waiting("wait_input", key):
            found = self._incoming.get()
            if isinstance(found, BaseException):
                raise found
            sent, due, stream = found or (None, 0.0, torch.empty(0))
            if sent != key:
                raise ValueError(
                    f"rack {self.index - 1} has sent {sent or 'all it had'} where rack {self.index} needs {key}; "
                    "remove the run's folder to begin again"
                )
            self._clock.wait_until(due)
        return stream

    def gather(self, step: int, coda: Tensor) -> list[Tensor]:
        """Gather the codas of all racks after a step, (numbers,) each, in the racks' order."""
        with self._log.waiting("wait_input", ItemKey(step, ItemKind.CODA)):
            others = self.racks - 1
            due = 0.0
            if self._line is not None:
                due = self._line.send(others * coda.nbytes)
            said = self._of_all(torch.tensor([coda.numel(), due], dtype=torch.float64))
            for rack, (numbers, _) in enumerate(said):
                if int(numbers) != coda.numel():
                    raise ValueError(
                        f"rack {rack} has a coda of {int(numbers):,} numbers and rack {self.index} one of "
                        f"{coda.numel():,}; codas of different shapes are not averaged: use average: never"
                    )
            found = self._of_all(coda)
            for way in ("sent", "received"):
                self._log.count(way, "codas", ItemKind.CODA, others * coda.nbytes, others)
            self._clock.wait_until(max(float(arrives) for _, arrives in said))
        return found

    def _of_all(self, tensor: Tensor) -> list[Tensor]:
        found = [torch.empty_like(tensor) for _ in range(self.racks)]
        self._codas.allgather([found], [tensor]).wait()
        return found

    def before_checkpoint(self) -> None:
        """Wait until all racks have the checkpoint before: a rack keeps two, and one of them has to be everyone's."""
        if self._saved is not None:
            self._saved.wait()
            self._saved = None

    def checkpoint_saved(self) -> None:
        self.before_checkpoint()
        self._saved = self._checkpoints.barrier()

    def finish(self) -> None:
        """Wait until everything is sent and received, and all racks are done."""
        if self.index + 1 < self.racks:
            self._put(None)
        if self.index > 0 and (rest := self._incoming.get()) is not None:
            raise rest if isinstance(rest, BaseException) else ValueError(f"nobody needed {rest[0]}")
        for thread in self._threads:
            thread.join()
        if self._failure is not None:
            raise self._failure
        self.before_checkpoint()
        self._checkpoints.barrier().wait()

    def _put(self, item: tuple[ItemKey, Tensor] | None) -> None:
        while self._failure is None:
            with suppress(Full):
                return self._outgoing.put(item, timeout=_LOOK_SECONDS)
        raise self._failure

    def _send(self) -> None:
        after = self.index + 1
        try:
            while (item := self._outgoing.get()) is not None:
                key, stream = item
                begun = time.monotonic()
                due = 0.0
                if self._line is not None:
                    due = self._line.send(stream.nbytes)
                shape = _DTYPES.index(stream.dtype), *stream.shape
                self._streams.send([torch.tensor([*key, *shape, int(due * 1e9)])], after, _HEAD).wait()
                self._streams.send([stream], after, _NUMBERS).wait()
                self._log.count("sent", "forward", key.kind, stream.nbytes)
                self._log.add(begun, max(time.monotonic(), due), "send", key, stream.nbytes)
            no_more = torch.full((_NUMBERS_IN_HEAD,), _NO_MORE)
            self._streams.send([no_more], after, _HEAD).wait()
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            self._failure = error

    def _receive(self) -> None:
        before = self.index - 1
        head = torch.empty(_NUMBERS_IN_HEAD, dtype=torch.int64)
        try:
            while True:
                self._streams.recv([head], before, _HEAD).wait()
                step, kind, place, dtype, rows, columns, due = head.tolist()
                if kind == _NO_MORE:
                    return self._incoming.put(None)
                stream = torch.empty(rows, columns, dtype=_DTYPES[dtype])
                self._streams.recv([stream], before, _NUMBERS).wait()
                key = ItemKey(step, ItemKind(kind), place)
                self._log.count("received", "forward", key.kind, stream.nbytes)
                self._incoming.put((key, due / 1e9, stream))
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            self._incoming.put(error)


_STREAMS = "streams"  # of a file: (windows, tokens, width)


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


class KeptStreams:
    """Streams in files, for a rack that is trained later.

    A stream that is offered again stays as it was. Each offer is a file, of windows that follow each other.

    Args:
        folder: in the folder of the rack before; it is made.
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
        """Refuse a run whose streams, of so many bytes, the disk cannot hold."""
        check_space(
            self.folder, max(1, needed - sum(path.stat().st_size for path in self.folder.iterdir()))
        )

    def offer(self, *items: tuple[ItemKey, Tensor]) -> None:
        """Write streams; they are on the disk before a checkpoint."""
        step = items[0][0].step
        if step > 1 and ItemKey(step - 1, ItemKind.TRAINING) not in self._places:
            raise OSError(
                f"{self.folder} has nothing of step {step - 1}: what was handed on earlier is gone; remove "
                f"{self.folder.parent}, and the same command trains that rack again"
            )
        new = [(key, stream) for key, stream in items if key not in self._places]
        if new:
            first = new[0][0]
            path = (
                self.folder / f"{first.step:09}-{first.kind:d}-{first.place:06}-{len(new)}.safetensors"
            )
            with whole_file(path, durable=True) as beside:
                save_file({_STREAMS: torch.stack([stream.detach().cpu() for _, stream in new])}, beside)
            self._note(path, first, len(new))

    def ask(self, key: ItemKey) -> Tensor:
        try:
            path, place = self._places[key]
            with safe_open(path, framework="pt") as file:
                stream: Tensor = file.get_slice(_STREAMS)[place]
        except (KeyError, OSError, SafetensorError) as error:
            raise OSError(
                f"{self.folder} does not have {key}; remove {self.folder.parents[1]} to begin the run again"
            ) from error
        return stream
