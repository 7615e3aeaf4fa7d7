"""What a rack takes from another: asked for by key, over connections that are made again whenever they break."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, Literal

from torch import Tensor

from surgeon.errors import first_line
from surgeon.runtime.comm.link import SystemClock
from surgeon.training.racks.items import BEGINNING, ItemKey
from surgeon.training.racks.rack_log import Direction, RackLog
from surgeon.training.racks.wire import Address, Delivery, Demand, Lane, Word, connect

_LOOK_SECONDS = 0.5
_FIRST_PAUSE = 0.01
_LONGEST_PAUSE = 0.5


@dataclass(frozen=True)
class Absence:
    """How long a rack that is away is waited for: seconds until a line says so, and until the run is given up."""

    silent: float = 5.0
    limit: float = 600.0


class Inbox:
    """The asking side of one lane.

    Items come in the order of their keys, some of those after the one that was asked for too, so that they are there
    when they are asked for.

    Attributes:
        me, other: the asking rack, and the one that is asked.
        lane: what it is asked for.
        absence: how long the other rack is waited for.
    """

    def __init__(
        self,
        me: int,
        other: int,
        where: Callable[[], Address | None],
        token: bytes,
        lane: Lane = Lane.STREAMS,
        ahead: int = 4,
        absence: Absence | None = None,
        log: RackLog | None = None,
    ) -> None:
        """Begin to connect.

        Args:
            me, other: the asking rack's number, and that of the rack that is asked.
            where: that one listens, None as long as nobody knows; asked again at every attempt.
            token: of the run.
            ahead: how many items of the streams are there before they are asked for.
        """
        self.me = me
        self.other = other
        self.lane = lane
        self.absence = absence or Absence()
        self._where = where
        self._token = token
        self._ahead = ahead if lane is Lane.STREAMS else 0
        self._log = log or RackLog()
        self._clock = SystemClock()
        self._changed = threading.Condition()  # for all that follows
        self._items: dict[ItemKey, Delivery] = {}
        self._says = Demand()
        self._waits = self._fetches = self._end_noted = self._closed = False
        self._lost: str | None = None
        self._connections: tuple[socket.socket, ...] = ()  # the one that fetches, the one that tells
        self._away_since: float | None = time.monotonic()  # None while it is there
        self._why = "it has not been started"
        self._at = "an address that it has not said yet"
        threading.Thread(target=self._run, daemon=True).start()

    def ask(self, key: ItemKey) -> Tensor:
        """Wait for an item.

        Raises:
            ConnectionError: if the other rack has been away for too long.
            ValueError: if it does not have the item any more, or it has come damaged.
        """
        with self._log.waiting("wait_input", key):
            with self._changed:
                self._items = {each: delivery for each, delivery in self._items.items() if each >= key}
                self._waits = key not in self._items
                self._lost = None
                since = self._says.since
                if self._waits and key < since:  # it goes back
                    self._items.clear()
                    since = key
                self._say(wanted=key, since=since)
            delivery = self._await(key)
            assert delivery.item is not None
            self._clock.wait_until(delivery.due)
            return delivery.item.tensor()

    def _await(self, key: ItemKey) -> Delivery:
        begun = time.monotonic()
        said = False
        with self._changed:
            while key not in self._items:
                if self._lost is not None:
                    raise ValueError(f"rack {self.other}: {self._lost}")
                said = self._mind_absence(begun, said)
                self._changed.wait(min(_LOOK_SECONDS, self.absence.limit))
            return self._items.pop(key)

    def _mind_absence(self, begun: float, said: bool) -> bool:
        """Say once that the other rack is away, and give up after long; returns whether it was said."""
        if self._away_since is None:
            return False
        away = time.monotonic() - max(begun, self._away_since)
        if away > self.absence.limit:
            raise ConnectionError(
                f"rack {self.other} at {self._at} has been away for {away:.0f} s ({self._why}); start it again, then "
                "the same command goes on"
            )
        if away > self.absence.silent and not said:
            print(
                f"rack {self.me}: waiting for rack {self.other} at {self._at}, which is away ({self._why}); it is "
                f"given up after {self.absence.limit:.0f} s",
                file=sys.stderr,
                flush=True,
            )
            return True
        return said

    def cover(self, step: int) -> None:
        """Say that checkpoints of this rack have all that came of the items up to a step: these are not asked again."""
        self._say(covered=max(self._says.covered, step))

    def end(self, seconds: float = 10.0, is_noted: Callable[[], bool] = lambda: False) -> bool:
        """Say that nothing is needed any more; returns whether the other rack has noted it in time.

        Args:
            is_noted: another way to know it, of a rack that is away, since it may have ended itself.
        """
        self._say(ended=True)
        until = time.monotonic() + seconds
        with self._changed:
            while not self._end_noted and (left := until - time.monotonic()) > 0:
                if self._away_since is not None and is_noted():
                    return True
                self._changed.wait(min(left, _LOOK_SECONDS))
            return self._end_noted

    def close(self) -> None:
        """Close the connections."""
        with self._changed:
            self._closed = True
            self._hang_up()

    def _say(self, **news: Any) -> None:
        """Change what requests say: the next one that fetches or, until the last one is answered, one that tells."""
        with self._changed:
            self._says = replace(self._says, **news)
            self._changed.notify_all()
            if self._fetches and self._connections:
                try:
                    with self._connections[-1].makefile("wb") as outgoing:
                        self._says.write(outgoing)
                except OSError:
                    self._hang_up()
                else:
                    self._count("sent", None, Demand.nbytes)

    def _hang_up(self) -> None:
        with self._changed:
            for connection in self._connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self._connections = ()
            self._changed.notify_all()

    def _count(self, way: Literal["sent", "received"], key: ItemKey | None, size: int) -> None:
        direction: Direction = "codas" if self.lane is Lane.CODAS else "backward" if way == "sent" else "forward"
        self._log.count(way, direction, key, size)

    def _run(self) -> None:
        """Connect, fetch, and connect again."""
        pause = _FIRST_PAUSE
        while not self._closed:
            try:
                with ExitStack() as stack:
                    incoming, outgoing = self._connect(stack)
                    pause = _FIRST_PAUSE
                    while True:
                        self._fetch(incoming, outgoing)
            except (EOFError, OSError, ValueError) as error:
                with self._changed:
                    if self._away_since is None:
                        self._away_since = time.monotonic()
                    self._connections = ()
                    self._fetches = False
                    self._why = getattr(error, "strerror", None) or first_line(error)
                    if not self._closed:
                        self._changed.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _connect(self, stack: ExitStack) -> tuple[BinaryIO, BinaryIO]:
        """Both connections; returns the files of the one that fetches."""
        address = self._where()
        if address is None:
            raise ConnectionError("it does not listen yet")
        self._at = f"{address[0]}:{address[1]}"
        made = [stack.enter_context(connect(address, self._token, self.me, self.lane)) for _ in range(2)]
        with self._changed:
            if self._closed:
                raise ConnectionError("this rack ends")
            self._connections = tuple(made)
            self._away_since = None
        return stack.enter_context(made[0].makefile("rb")), stack.enter_context(made[0].makefile("wb"))

    def _fetch(self, incoming: BinaryIO, outgoing: BinaryIO) -> None:
        """Fetch once, as soon as there is room for something, or this rack ends."""
        with self._changed:
            self._changed.wait_for(lambda: not self._connections or self._room() > 0 or self._ends())
            if not self._connections:
                raise ConnectionError("the connection has broken")
            self._fetches, demand = True, replace(self._says, most=max(1, self._room()))
        demand.write(outgoing)
        outgoing.flush()
        self._count("sent", None, demand.nbytes)
        since = demand.since
        while True:
            delivery = Delivery.read(incoming)
            self._count("received", None if delivery.item is None else delivery.item.key, delivery.nbytes)
            with self._changed:
                if delivery.item is not None:
                    since = self._take_in(delivery, delivery.item.key, since)
                    continue
                self._fetches = False
                self._end_noted = delivery.word is Word.END_NOTED
                if delivery.word is Word.GONE and self._says.wanted == demand.wanted:
                    self._lost = delivery.text
                self._changed.notify_all()
                return

    def _room(self) -> int:
        """How many items there is a use for now."""
        if self._says.wanted == BEGINNING or self._says.ended or self._lost is not None:
            return 0
        return self._ahead + self._waits - len(self._items)

    def _ends(self) -> bool:
        return self._says.ended and not self._end_noted

    def _take_in(self, delivery: Delivery, key: ItemKey, since: ItemKey) -> ItemKey:
        """Take in an item; returns the first key after it. Nobody wants it if this rack has gone back meanwhile."""
        after = key._replace(place=key.place + 1)
        if self._says.since == since:
            self._says = replace(self._says, since=after)
            if key >= self._says.wanted:
                self._items[key] = delivery
                self._waits = self._waits and key != self._says.wanted
                self._changed.notify_all()
        return after
