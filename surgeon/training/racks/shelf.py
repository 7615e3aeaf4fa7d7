"""What a rack keeps for those that ask for it, and what each of them is to be sent next."""

from __future__ import annotations

import math
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from surgeon.processes.files import write_text
from surgeon.training.racks.items import Item, ItemKey
from surgeon.training.racks.spool import Spool


@dataclass
class Asker:
    """A rack that takes what this one hands on; all of it under the outbox's lock.

    Attributes:
        demand: the key it asked for last.
        covered: the steps of its checkpoints.
        ended: whether it needs nothing any more.
        connection: the one that it asks over now; what follows is said of it.
        asked: whether it has asked for anything.
        sent: keys that are on their way, from its demand on.
        refused: what it was told will not come.
        farewelled: whether its end is being acknowledged.
        left: whether it has been.
    """

    demand: ItemKey | None = None
    covered: int = -1
    ended: bool = False
    connection: socket.socket | None = None
    asked: bool = False
    sent: set[ItemKey] = field(default_factory=set)
    refused: ItemKey | None = None
    farewelled: bool = False
    left: bool = False

    @property
    def needs_more(self) -> bool:
        """Whether it may still ask, or does not know yet that its end was noted."""
        return not self.ended or (self.connection is not None and not self.left)

    def connect(self, connection: socket.socket) -> None:
        """It has come, or come back, and asks anew."""
        self.connection, self.asked, self.sent = connection, False, set()
        self.refused, self.farewelled, self.left = None, False, False

    def ask(self, key: ItemKey) -> None:
        """It asks for an item; for one that it had already when it goes back."""
        if self.demand is None or key <= self.demand:
            self.sent = set()
        self.sent = {each for each in self.sent if each >= key}
        self.demand, self.asked, self.refused = key, True, None


class Shelf:
    """One lane's items: on disk, and in memory as long as they have not been sent."""

    def __init__(self, folder: Path, askers: Sequence[int], ahead: int | None) -> None:
        self.spool, self.ahead = Spool(folder), ahead
        self.fresh: dict[ItemKey, Item] = {}
        self.latest: ItemKey | None = None  # how far this rack has come
        self.askers = {rack: Asker(ended=self._mark(rack).exists()) for rack in askers}

    def _mark(self, rack: int) -> Path:
        return self.spool.folder / ended_mark(rack)

    def end(self, rack: int) -> None:
        """A rack needs nothing any more, whatever happens to this process."""
        write_text(self._mark(rack), "")
        asker = self.askers[rack]
        asker.ended, asker.asked, asker.farewelled, asker.left = True, False, False, False
        self.free()

    def free(self) -> None:
        """Forget what the checkpoints of all that ask cover."""
        covered = min((math.inf if each.ended else each.covered for each in self.askers.values()), default=math.inf)
        if covered >= 0:
            latest = self.spool.keys()[-1].step if self.spool.keys() else 0
            self.spool.drop(latest if math.isinf(covered) else int(covered))
            self.fresh = {key: item for key, item in self.fresh.items() if key in self.spool}

    def is_full(self, key: ItemKey) -> bool:
        """Whether an item has to wait until those before it are asked for."""
        if self.ahead is None:
            return False
        return any(not one.ended and self.spool.between(one.demand, key) >= self.ahead for one in self.askers.values())

    def next_for(self, asker: Asker) -> ItemKey | None:
        """What is to be sent to a rack now: what it has asked for, then what it will ask for."""
        if asker.demand is None or not asker.asked:
            return None
        keys = self.spool.keys()
        begin = self.spool.from_key(asker.demand)
        for key in keys[begin : begin + (self.ahead or 0) + 1]:
            if key not in asker.sent:
                return key
        return None

    def refuses(self, asker: Asker) -> bool:
        """Whether a rack is to be told that what it asks for will not come: it was made earlier, and is not kept."""
        key = asker.demand
        if key is None or not asker.asked or key in (asker.refused, *asker.sent) or key in self.spool:
            return False
        return asker.ended or (self.latest is not None and key < self.latest)

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

    def take(self, key: ItemKey) -> Item:
        """An item that is about to be sent."""
        found = self.fresh.get(key) if self.ahead is None else self.fresh.pop(key, None)
        return self.spool.get(key) if found is None else found

    def skip(self, key: ItemKey) -> None:
        """Nothing before this key is asked for: not to be held in memory."""
        self.fresh = {each: item for each, item in self.fresh.items() if each >= key}


def ended_mark(rack: int) -> str:
    """The file in a lane's folder that says that a rack needs nothing of it any more."""
    return f"rack-{rack}.ended"
