"""What a rack hands on: kept on disk, sent to the racks that ask for it, and never far ahead of what they ask for."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from surgeon.processes.sockets import watch_over
from surgeon.runtime.comm.link import Line, Link, SystemClock
from surgeon.training.racks.items import Item, ItemKey, ItemKind
from surgeon.training.racks.shelf import Asker, Shelf
from surgeon.training.racks.traffic import Direction, Timeline, Traffic
from surgeon.training.racks.wire import ASK_BYTES, Answered, Lane, Word, hear, send, welcome

GREETING_SECONDS = 10.0
_LOOK_SECONDS = 1.0


class Closed(Exception):
    """The outbox has been closed while something waited for it."""


class Outbox:
    """A server from which other racks take tensors, in the order of their keys.

    Every item is written to disk as it is offered, and kept until the asking racks say that their checkpoints cover
    it, so that either side may be killed at any moment. What is offered again is sent as it was offered first.

    Attributes:
        address: host and port that it listens at.
    """

    def __init__(
        self,
        folder: Path,
        token: bytes,
        askers: Mapping[Lane, Sequence[int]],
        ahead: int = 4,
        listen: tuple[str, int] = ("127.0.0.1", 0),
        link: Link | None = None,
        traffic: Traffic | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        """Listen.

        Args:
            folder: for what is kept; what an earlier process has kept there is handed out again.
            token: of the run; who does not know it is sent away.
            askers: which racks take each lane.
            ahead: how many items of the streams may wait for being asked for.
            listen: host and port; port 0 for one that is free.
            link: emulated for what is sent; the asking racks must be on this machine.

        Raises:
            OSError: if it cannot listen there, or the folder cannot be read.
        """
        if ahead < 1:
            raise ValueError(f"a rack must be allowed to be at least 1 item ahead of the next one, not {ahead}")
        self._token, self._traffic = token, traffic or Traffic()
        self._timeline = timeline or Timeline()
        self._changed = threading.Condition()
        self._line = None if link is None else Line(link, SystemClock())
        self._closed = False
        self._failed: Exception | None = None
        self._shelves = {
            lane: Shelf(folder / lane.name.lower(), racks, ahead if lane is Lane.STREAMS else None)
            for lane, racks in askers.items()
        }
        for shelf in self._shelves.values():
            shelf.free()
        self._server = _listening(*listen)
        self.address: tuple[str, int] = self._server.getsockname()[:2]
        threading.Thread(target=self._accept, daemon=True).start()

    def begin(self, step: int) -> None:
        """Say that this rack goes on from a checkpoint: what it made before is on disk, or lost."""
        with self._changed:
            for lane, shelf in self._shelves.items():
                kind = ItemKind.TRAINING if lane is Lane.STREAMS else ItemKind.CODA
                shelf.latest = max(shelf.latest or ItemKey(0, kind), ItemKey(step, kind, sys.maxsize))
            self._changed.notify_all()

    def offer(self, key: ItemKey, tensor: Tensor) -> None:
        """Hand an item on, as soon as fewer than `ahead` items wait before it.

        Raises:
            OSError: if the disk is full.
            Closed: if the outbox is closed meanwhile.
        """
        self.offer_all([(key, tensor)])

    def offer_all(self, items: Sequence[tuple[ItemKey, Tensor]]) -> None:
        """Hand on items that belong together, as soon as fewer than `ahead` items wait before the first of them."""
        shelf = self._shelves[_lane_of(items[0][0].kind)]
        made = [Item.of(key, tensor) for key, tensor in items]
        with self._timeline.waiting("wait_room", items[0][0]), self._changed:
            while shelf.is_full(items[0][0]) and not self._closed:
                self._changed.wait(_LOOK_SECONDS)
        with self._changed:
            if self._closed:
                raise self._failed or Closed
            shelf.add(made)
            self._changed.notify_all()

    def sync(self) -> None:
        """Have all that is kept on disk even if the machine ends; to be called before a checkpoint is written."""
        with self._changed:
            for shelf in self._shelves.values():
                shelf.spool.sync()

    def wait_until_taken(self, told_after: float = 30.0) -> None:
        """Wait until no rack needs anything any more."""
        begun, told = time.monotonic(), False
        with self._changed:
            while not self._closed and (left := self._waiting_for()):
                self._changed.wait(_LOOK_SECONDS)
                if not told and time.monotonic() - begun > told_after:
                    told = True
                    racks = " and ".join(f"rack {rack}" for rack in left)
                    print(f"done; what {racks} may still need is kept ready", file=sys.stderr, flush=True)

    def _waiting_for(self) -> list[int]:
        found = {r for shelf in self._shelves.values() for r, asker in shelf.askers.items() if asker.needs_more}
        return sorted(found)

    def close(self) -> None:
        """Stop listening, and end all connections; what is kept stays on disk, and is not touched any more."""
        with self._changed:
            self._closed = True
            connections = [one.connection for shelf in self._shelves.values() for one in shelf.askers.values()]
            self._changed.notify_all()
            for shelf in self._shelves.values():
                shelf.spool.close()
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for connection in filter(None, connections):
            _hang_up(connection)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._attend, args=(connection,), daemon=True).start()

    def _attend(self, connection: socket.socket) -> None:
        """Serve one connection until it breaks."""
        with connection, suppress(EOFError, OSError, ValueError):
            watch_over(connection)
            connection.settimeout(GREETING_SECONDS)
            rack, lane = welcome(connection, self._token, {lane: shelf.askers for lane, shelf in self._shelves.items()})
            connection.settimeout(None)
            shelf = self._shelves[lane]
            asker = shelf.askers[rack]
            with self._changed:
                if self._closed:
                    return
                if asker.connection is not None:
                    _hang_up(asker.connection)  # a rack that has come back asks anew
                asker.connect(connection)
            writer = threading.Thread(target=self._write, args=(connection, shelf, asker, lane), daemon=True)
            writer.start()
            try:
                while True:
                    self._hear(connection, shelf, rack, lane)
            finally:
                _hang_up(connection)
                with self._changed:
                    if asker.connection is connection:
                        asker.connection = None
                    self._changed.notify_all()
                writer.join()

    def _hear(self, connection: socket.socket, shelf: Shelf, rack: int, lane: Lane) -> None:
        """Take in one thing that a rack says."""
        asked = hear(connection)
        asker = shelf.askers[rack]
        self._traffic.count("received", _answers(lane), None, ASK_BYTES)
        with self._changed:
            if self._closed or asker.connection is not connection:
                return  # the folder may be another outbox's by now, or what was said a process's that has ended
            if asked.word is Word.ASK:
                asker.ask(asked.key)
                shelf.skip(asked.key)
            elif asked.word is Word.COVERED:
                asker.covered = max(asker.covered, asked.key.step)
                shelf.free()
            elif asked.word is Word.END:
                shelf.end(rack)
            self._changed.notify_all()

    def _write(self, connection: socket.socket, shelf: Shelf, asker: Asker, lane: Lane) -> None:
        """Send what is to be sent over one connection, until it breaks."""
        try:
            while (answer := self._next(connection, shelf, asker)) is not None:
                begun = time.monotonic()
                size = send(connection, answer)
                key = None if answer.item is None else answer.item.key
                self._traffic.count("sent", _direction(lane), None if key is None else key.kind, size)
                if key is not None:
                    self._timeline.sent(begun, max(time.monotonic(), answer.due), key, size)
                if answer.word is Word.BYE:
                    with self._changed:
                        asker.left = True
                        self._changed.notify_all()
        except OSError:
            _hang_up(connection)
        except Exception as error:  # noqa: BLE001 - what is kept cannot be read: for those who offer
            with self._changed:
                self._failed, self._closed = error, True
                self._changed.notify_all()
            _hang_up(connection)

    def _next(self, connection: socket.socket, shelf: Shelf, asker: Asker) -> Answered | None:
        """What is to be said next; None if the connection has ended."""
        with self._changed:
            while asker.connection is connection and not self._closed:
                if asker.ended and not asker.farewelled:
                    asker.farewelled = True
                    return Answered(Word.BYE)
                if (key := shelf.next_for(asker)) is not None:
                    asker.sent.add(key)
                    item = shelf.take(key)
                    due = 0.0 if self._line is None else self._line.send(item.nbytes)
                    return Answered(Word.ITEM, due, item)
                if shelf.refuses(asker):
                    asker.refused = asker.demand
                    return Answered(Word.GONE, text=_lost(asker.demand))
                self._changed.wait(_LOOK_SECONDS)
            return None


def _lost(key: ItemKey | None) -> str:
    return (
        f"{key} is not kept any more, and is not made again: its file in spool/ is gone or cut short, or the rack that "
        "asks for it has gone back further than its checkpoints said; remove the run's folder to begin again"
    )


def _lane_of(kind: ItemKind) -> Lane:
    return Lane.CODAS if kind is ItemKind.CODA else Lane.STREAMS


def _direction(lane: Lane) -> Direction:
    return "codas" if lane is Lane.CODAS else "forward"


def _answers(lane: Lane) -> Direction:
    return "codas" if lane is Lane.CODAS else "backward"


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _listening(host: str, port: int) -> socket.socket:
    """A server's socket."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise OSError(
            f"a rack cannot listen at {host}:{port} ({error.strerror or error}); give another --listen, or end what "
            "listens there"
        ) from None
