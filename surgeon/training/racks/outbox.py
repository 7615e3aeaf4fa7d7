"""What a rack hands on: kept on disk, given to the racks that ask for it, and never far ahead of what they ask for."""

from __future__ import annotations

import math
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from surgeon.processes.files import write_text
from surgeon.runtime.comm.link import Line, Link, SystemClock
from surgeon.training.racks.items import BEGINNING, Item, ItemKey, ItemKind
from surgeon.training.racks.rack_log import RackLog
from surgeon.training.racks.spool import Spool
from surgeon.training.racks.wire import Address, Delivery, Demand, Lane, Word, welcome

_LOOK_SECONDS = 1.0
_FULL = (
    "what a rack hands on is kept there until the next rack's checkpoints cover it; make room, or save checkpoints "
    "more often (save_every), and run the same command again to go on"
)


class Closed(Exception):
    """The outbox has been closed while something waited for it."""


class Lost(Exception):
    """What a rack wants will not come."""

    def __init__(self, key: ItemKey) -> None:
        super().__init__(
            f"{key} is not kept any more, and is not made again: its file in spool/ is gone or cut short, or the rack "
            "that asks for it has gone back further than its checkpoints said; remove the run's folder to begin again"
        )


@dataclass
class Asker:
    """A rack that takes what this one hands on, as its requests say it (`Demand`).

    Attributes:
        ends: whether it needs nothing any more.
        ended: whether it knows that this has been noted.
    """

    wanted: ItemKey = BEGINNING
    covered: int = -1
    ends: bool = False
    ended: bool = False


class Shelf:
    """One lane's items, and who takes them.

    Attributes:
        ahead: how many items may wait for being asked for; None for any number.
        latest: how far this rack has come.
        fresh: items that nobody has taken yet, in memory.
    """

    def __init__(self, folder: Path, askers: Sequence[int], ahead: int | None) -> None:
        self.spool = Spool(folder, _FULL)
        self.ahead = ahead
        self.latest = BEGINNING
        self.fresh: dict[ItemKey, Item] = {}
        self.askers = {rack: Asker(ended=(folder / ended_mark(rack)).exists()) for rack in askers}
        self._free()

    def hear(self, rack: int, demand: Demand) -> None:
        """Take in what a rack says of itself."""
        asker = self.askers[rack]
        asker.wanted = demand.wanted
        self.fresh = {key: item for key, item in self.fresh.items() if key >= asker.wanted}
        if demand.covered > asker.covered:
            asker.covered = demand.covered
            self._free()
        asker.ends |= demand.ended  # a fetch that was sent before may be heard later
        if demand.ended:  # whatever happens to this process
            write_text(self.spool.folder / ended_mark(rack), "")

    def end(self, rack: int) -> None:
        """A rack knows that its end has been noted."""
        self.askers[rack].ended = True
        self._free()

    def _free(self) -> None:
        """Forget what the checkpoints of all that ask cover."""
        covered = min((math.inf if one.ended else one.covered for one in self.askers.values()), default=math.inf)
        if self.spool.keys:
            self.spool.drop(int(min(covered, self.spool.keys[-1].step)))
            self.fresh = {key: item for key, item in self.fresh.items() if key in self.spool}

    def is_full(self, key: ItemKey) -> bool:
        """Whether an item has to wait until those before it are asked for."""
        return self.ahead is not None and any(
            not one.ended and self.spool.between(one.wanted, key) >= self.ahead for one in self.askers.values()
        )

    def add(self, items: Sequence[Item]) -> None:
        """Keep items; those that are there already stay as they are."""
        self.latest = items[-1].key
        if all(asker.ended for asker in self.askers.values()):
            return
        if self.ahead is None:
            self.fresh.clear()  # all take the latest at about the same time
        for item in items:
            if item.key not in self.spool:
                self.spool.add(item)
                self.fresh[item.key] = item

    def found(self, asker: Asker, demand: Demand) -> Sequence[ItemKey]:
        """What a rack that fetches gets now: what it wants, then what it will want.

        Raises:
            Lost: if what it wants will not come: it was made earlier, and is not kept.
        """
        wanted = asker.wanted
        if demand.since <= wanted and wanted not in self.spool:
            if wanted < self.latest or asker.ended:
                raise Lost(wanted)
            return ()
        return self.spool.since(max(demand.since, wanted), demand.most)

    def take(self, key: ItemKey) -> Item:
        """An item that was found.

        Raises:
            Lost: if it cannot be read.
        """
        fresh = self.fresh.get(key) if self.ahead is None else self.fresh.pop(key, None)
        try:
            return fresh or self.spool.get(key)
        except (KeyError, EOFError, OSError, ValueError):
            raise Lost(key) from None


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
        listen: Address = ("127.0.0.1", 0),
        link: Link | None = None,
        log: RackLog | None = None,
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
        self._token = token
        self._log = log or RackLog()
        self._changed = threading.Condition()  # for all that follows
        self._line = None if link is None else Line(link, SystemClock())
        self._closed = False
        self._shelves = {
            lane: Shelf(folder / lane.name.lower(), racks, ahead if lane is Lane.STREAMS else None)
            for lane, racks in askers.items()
        }
        self._server = _listening(*listen)
        self.address: Address = self._server.getsockname()[:2]
        threading.Thread(target=self._accept, daemon=True).start()

    def begin(self, step: int) -> None:
        """Say that this rack goes on from a checkpoint: what it made before is on disk, or lost."""
        with self._changed:
            for lane, shelf in self._shelves.items():
                kind = ItemKind.TRAINING if lane is Lane.STREAMS else ItemKind.CODA
                shelf.latest = max(shelf.latest, ItemKey(step, kind, sys.maxsize))
            self._changed.notify_all()

    def offer(self, *items: tuple[ItemKey, Tensor]) -> None:
        """Hand on items that belong together, as soon as fewer than `ahead` items wait before the first of them.

        Raises:
            OSError: if the disk is full.
            Closed: if the outbox is closed meanwhile.
        """
        first = items[0][0]
        made = [Item.of(key, tensor) for key, tensor in items]
        shelf = self._shelves[Lane.CODAS if first.kind is ItemKind.CODA else Lane.STREAMS]
        with self._changed:
            with self._log.waiting("wait_room", first):
                self._changed.wait_for(lambda: self._closed or not shelf.is_full(first))
            if self._closed:
                raise Closed
            shelf.add(made)
            self._changed.notify_all()

    def sync(self) -> None:
        """Have all that is kept on disk even if the machine ends; to be called before a checkpoint is written."""
        with self._changed:
            for shelf in self._shelves.values():
                shelf.spool.sync()

    def wait_until_taken(self, patience: float = 30.0) -> None:
        """Wait until no rack needs anything any more; says so after some seconds."""
        with self._changed:
            if self._changed.wait_for(lambda: self._closed or not self._waiting_for(), patience):
                return
            racks = " and ".join(f"rack {rack}" for rack in sorted(self._waiting_for()))
            print(f"done; what {racks} may still need is kept ready", file=sys.stderr, flush=True)
            self._changed.wait_for(lambda: self._closed or not self._waiting_for())

    def _waiting_for(self) -> set[int]:
        return {rack for shelf in self._shelves.values() for rack, one in shelf.askers.items() if not one.ended}

    def close(self) -> None:
        """Close all connections; what was offered stays on disk."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        with suppress(OSError):  # wakes up whoever accepts
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connected, _ = self._server.accept()
                threading.Thread(target=self._attend, args=(connected,), daemon=True).start()

    def _attend(self, connected: socket.socket) -> None:
        """Answer what comes over one connection, until it breaks."""
        with connected, suppress(EOFError, OSError, ValueError, Closed), ExitStack() as stack:
            rack, lane = welcome(connected, self._token, {lane: shelf.askers for lane, shelf in self._shelves.items()})
            shelf = self._shelves[lane]
            codas = lane is Lane.CODAS
            stack.callback(self._lose, shelf, rack)
            incoming = stack.enter_context(connected.makefile("rb"))
            outgoing = stack.enter_context(connected.makefile("wb"))
            while True:
                demand = Demand.read(incoming)
                self._log.count("received", "codas" if codas else "backward", None, demand.nbytes)
                for delivery in self._deliveries(shelf, rack, demand):
                    begun = time.monotonic()
                    key = None if delivery.item is None else delivery.item.key
                    delivery.write(outgoing)
                    # Before the other rack can have it: this process may end as soon as all is there.
                    self._log.count("sent", "codas" if codas else "forward", key, delivery.nbytes)
                    outgoing.flush()
                    if key is not None:
                        self._log.add(begun, max(time.monotonic(), delivery.due), "send", key, delivery.nbytes)

    def _lose(self, shelf: Shelf, rack: int) -> None:
        """A connection has broken: whoever was ending has ended."""
        with self._open():
            if shelf.askers[rack].ends:
                shelf.end(rack)
                self._changed.notify_all()

    def _deliveries(self, shelf: Shelf, rack: int, demand: Demand) -> Iterator[Delivery]:
        """What a rack is sent; each delivery has been written when the next one is asked for."""
        with self._open():
            shelf.hear(rack, demand)
            self._changed.notify_all()
        if not demand.most:
            return
        if demand.ended:
            yield Delivery(Word.END_NOTED)
            with self._open():
                shelf.end(rack)
                self._changed.notify_all()
            return
        try:
            for key in self._found(shelf, shelf.askers[rack], demand):
                with self._open():
                    item = shelf.take(key)
                    due = 0.0 if self._line is None else self._line.send(item.nbytes)
                yield Delivery(Word.ITEM, due, item)
        except Lost as lost:
            yield Delivery(Word.GONE, text=str(lost))
        else:
            yield Delivery(Word.THAT_IS_ALL)

    def _found(self, shelf: Shelf, asker: Asker, demand: Demand) -> list[ItemKey]:
        """Wait for what a rack fetches, but for a moment only, and no longer when it has something else to say."""
        found = list[ItemKey]()

        def ends() -> bool:
            found[:] = shelf.found(asker, demand)
            return self._closed or bool(found) or asker.ends or asker.wanted < demand.wanted

        with self._open():
            self._changed.wait_for(ends, _LOOK_SECONDS)
        return found

    @contextmanager
    def _open(self) -> Iterator[None]:
        """The lock, while the outbox is open: afterwards the folder may be another one's."""
        with self._changed:
            if self._closed:
                raise Closed
            yield


def ended_mark(rack: int) -> str:
    """The file in a lane's folder that says that a rack needs nothing of it any more."""
    return f"rack-{rack}.ended"


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
