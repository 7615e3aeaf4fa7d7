"""What a rack takes from another: asked for by key, over a connection that is made again whenever it breaks."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor

from surgeon.processes.sockets import watch_over
from surgeon.runtime.comm.link import SystemClock
from surgeon.training.racks.items import Item, ItemKey
from surgeon.training.racks.outbox import GREETING_SECONDS
from surgeon.training.racks.traffic import Direction, Timeline, Traffic
from surgeon.training.racks.wire import (
    ASK_BYTES,
    NO_KEY,
    Answered,
    Asked,
    Lane,
    Word,
    answer_bytes,
    greet,
    receive,
    say,
)

Where = Callable[[], tuple[str, int] | None]  # host and port; None as long as they are not known
_LOOK_SECONDS = 0.5
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5


@dataclass(frozen=True)
class Absence:
    """How long a rack that is away is waited for.

    Attributes:
        told: seconds until a line says so.
        limit: seconds until the run is given up.
    """

    told: float = 5.0
    limit: float = 600.0


class Inbox:
    """The asking side of one lane.

    Attributes:
        me, other: the asking rack, and the one that is asked.
        lane: what it is asked for.

    Items come in the order of their keys, those after the one that was asked for too, so that they are there when they
    are asked for.
    """

    def __init__(
        self,
        me: int,
        other: int,
        where: Where,
        token: bytes,
        lane: Lane = Lane.STREAMS,
        absence: Absence | None = None,
        traffic: Traffic | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        """Begin to connect.

        Args:
            me, other: the asking rack's number, and that of the rack that is asked.
            where: that one listens; asked again at every attempt.
            token: of the run.
        """
        self.me, self.other = me, other
        self._where, self._token, self.lane = where, token, lane
        self._absence = absence or Absence()
        self._traffic, self._timeline = traffic or Traffic(), timeline or Timeline()
        self._changed = threading.Condition()
        self._saying = threading.Lock()
        self._clock = SystemClock()
        self._connection: socket.socket | None = None
        self._items: dict[ItemKey, tuple[Item, float]] = {}
        self._wanted: ItemKey | None = None
        self._gone: str | None = None
        self._covered = -1
        self._ending = self._farewelled = self._closed = False
        self._away_since: float = time.monotonic()
        self._why = "it has not been started"
        self._at = "an address that it has not said yet"
        threading.Thread(target=self._run, daemon=True).start()

    def ask(self, key: ItemKey) -> Tensor:
        """Wait for an item.

        Raises:
            ConnectionError: if the other rack has been away for too long.
            ValueError: if it does not have the item any more, or it has come damaged.
        """
        with self._timeline.waiting("wait_input", key):
            with self._changed:
                self._wanted, self._gone = key, None
                self._items = {each: held for each, held in self._items.items() if each >= key}
            self._say(Asked(Word.ASK, key))
            item, due = self._await(key)
            self._clock.wait_until(due)
            return item.tensor()

    def _await(self, key: ItemKey) -> tuple[Item, float]:
        begun, told = time.monotonic(), False
        with self._changed:
            while key not in self._items:
                if self._gone is not None:
                    raise ValueError(f"rack {self.other}: {self._gone}")
                told = self._mind_absence(begun, told)
                self._changed.wait(min(_LOOK_SECONDS, self._absence.limit))
            self._wanted = None
            return self._items.pop(key)

    def _mind_absence(self, begun: float, told: bool) -> bool:
        """Say once that the other rack is away, and give up after long; under the lock."""
        if self._connection is not None:
            return False
        away = time.monotonic() - max(begun, self._away_since)
        if away > self._absence.limit:
            raise ConnectionError(
                f"rack {self.other} at {self._at} has been away for {away:.0f} s ({self._why}); start it again, then "
                "the same command goes on"
            )
        if away > self._absence.told and not told:
            print(
                f"rack {self.me}: waiting for rack {self.other} at {self._at}, which is away ({self._why}); it is "
                f"given up after {self._absence.limit:.0f} s",
                file=sys.stderr,
                flush=True,
            )
            return True
        return told

    def covered(self, step: int) -> None:
        """Say that checkpoints of this rack have all that came of the items up to a step: these are not asked again."""
        with self._changed:
            self._covered = max(self._covered, step)
        self._say(self._covering())

    def _covering(self) -> Asked:
        return Asked(Word.COVERED, NO_KEY._replace(step=self._covered))

    def end(self, seconds: float = 10.0) -> bool:
        """Say that nothing is needed any more; returns whether the other rack has heard it in time."""
        with self._changed:
            self._ending = True
        self._say(Asked(Word.END, NO_KEY))
        until = time.monotonic() + seconds
        with self._changed:
            while not self._farewelled and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
            return self._farewelled

    def close(self) -> None:
        """Close the connection."""
        with self._changed:
            self._closed = True
            connection = self._connection
            self._changed.notify_all()
        if connection is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _say(self, asked: Asked) -> None:
        """Say something if there is a connection; if not, it is said when there is one."""
        connection = self._connection
        if connection is not None:
            with suppress(OSError):
                self._say_to(connection, asked)

    def _say_to(self, connection: socket.socket, asked: Asked) -> None:
        with self._saying:
            say(connection, asked)
        self._traffic.count("sent", "codas" if self.lane is Lane.CODAS else "backward", None, ASK_BYTES)

    def _run(self) -> None:
        """Connect, take in what comes, and connect again."""
        pause = _FIRST_PAUSE
        while not self._closed:
            try:
                with self._connect() as connection:
                    pause = _FIRST_PAUSE
                    while True:
                        self._take_in(receive(connection))
            except (EOFError, OSError, ValueError) as error:
                with self._changed:
                    if self._connection is not None:
                        self._away_since = time.monotonic()
                    self._connection = None
                    self._why = getattr(error, "strerror", None) or str(error) or type(error).__name__
                    if not self._closed:
                        self._changed.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _connect(self) -> socket.socket:
        """A connection over which has been said what the other rack has to know."""
        address = self._where()
        if address is None:
            raise ConnectionError("it does not listen yet")
        self._at = f"{address[0]}:{address[1]}"
        connection = socket.create_connection(address, GREETING_SECONDS)
        try:
            watch_over(connection)
            greet(connection, self._token, self.me, self.lane)
            connection.settimeout(None)
            with self._changed:
                if self._closed:
                    raise ConnectionError("this rack ends")
                self._connection = connection
                wanted, ending = self._wanted, self._ending
            if self._covered >= 0:
                self._say_to(connection, self._covering())
            if ending:
                self._say_to(connection, Asked(Word.END, NO_KEY))
            elif wanted is not None:
                self._say_to(connection, Asked(Word.ASK, wanted))
        except BaseException:
            connection.close()
            raise
        return connection

    def _take_in(self, answer: Answered) -> None:
        direction: Direction = "codas" if self.lane is Lane.CODAS else "forward"
        kind = None if answer.item is None else answer.item.key.kind
        self._traffic.count("received", direction, kind, answer_bytes(answer))
        with self._changed:
            if answer.item is not None:
                self._items[answer.item.key] = (answer.item, answer.due)
            elif answer.word is Word.GONE:
                self._gone = answer.text
            elif answer.word is Word.BYE:
                self._farewelled = True
            self._changed.notify_all()
