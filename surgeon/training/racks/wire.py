"""What racks say to each other: one asks, as often as it likes, and the other one answers.

A rack connects twice to another one for each lane: over one connection it fetches items, and over the other it tells
meanwhile what it asks for now. Every demand says all there is to know of who makes it, so that either side may come
back at any time, and the answering side keeps nothing for a connection. Whether both know the token of the run is
proved before anything is said (`surgeon.processes.sockets.prove`). The bytes go through sockets as files.

This is done by the standard library: a rack goes on when any other one is killed and comes back, which process groups
of gloo do not survive, and it has to see at once that another one has gone, which ZeroMQ hides.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Container, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import BinaryIO

from surgeon.processes.sockets import PROOF_SECONDS, Stranger, prove
from surgeon.training.racks.items import BEGINNING, KEY, Item, ItemKey, read_exactly

TOKEN_BYTES = 16
_HELLO = struct.Struct("<iB")
_WELCOME = b"\1"
_DEMAND = struct.Struct(f"<{KEY.size}sq?I{KEY.size}s")
_DELIVERY = struct.Struct("<BdI")

Address = tuple[str, int]


class Lane(IntEnum):
    """One order of items, which are asked for by the same racks."""

    STREAMS = 0
    CODAS = 1


@dataclass(frozen=True)
class Demand:
    """What an asking rack says.

    Attributes:
        wanted: what it has asked for last.
        covered: the step up to which its checkpoints have all that came of the items.
        ended: whether it needs nothing any more.
        most: how many items it fetches, and is answered with by then; 0 where it only tells.
        since: the first key that it has not fetched yet.
    """

    wanted: ItemKey = BEGINNING
    covered: int = -1
    ended: bool = False
    most: int = 0
    since: ItemKey = BEGINNING

    nbytes = _DEMAND.size

    def write(self, file: BinaryIO) -> None:
        """Say it."""
        file.write(_DEMAND.pack(KEY.pack(*self.wanted), self.covered, self.ended, self.most, KEY.pack(*self.since)))

    @classmethod
    def read(cls, file: BinaryIO) -> Demand:
        """What is said next.

        Raises:
            EOFError, OSError: if the other end has gone.
            ValueError: if it makes no sense.
        """
        wanted, covered, ended, most, since = _DEMAND.unpack(read_exactly(file, _DEMAND.size))
        return cls(ItemKey.unpack(wanted), covered, ended, most, ItemKey.unpack(since))


class Word(IntEnum):
    """What kind of delivery it is; each but the first is the last one of a demand."""

    ITEM = 0
    THAT_IS_ALL = 1
    GONE = 2
    END_NOTED = 3


@dataclass(frozen=True)
class Delivery:
    """What it is answered.

    Attributes:
        due: when the item has arrived over an emulated link, on this machine's clock; 0 without one.
        text: why what is wanted will not come.
    """

    word: Word
    due: float = 0.0
    item: Item | None = None
    text: str = ""

    @property
    def nbytes(self) -> int:
        """What `write` writes."""
        return _DELIVERY.size + len(self.text.encode()) + (0 if self.item is None else self.item.nbytes)

    def write(self, file: BinaryIO) -> None:
        """Deliver it."""
        text = self.text.encode()
        file.write(_DELIVERY.pack(self.word, self.due, len(text)) + text)
        if self.item is not None:
            self.item.write(file)

    @classmethod
    def read(cls, file: BinaryIO) -> Delivery:
        """What is answered next; errors as of `Demand.read`."""
        number, due, length = _DELIVERY.unpack(read_exactly(file, _DELIVERY.size))
        word = Word(number)
        text = read_exactly(file, length).decode()
        return cls(word, due, Item.read(file) if word is Word.ITEM else None, text)


def connect(address: Address, token: bytes, rack: int, lane: Lane) -> socket.socket:
    """Connect to a rack.

    Args:
        rack: that this one is.

    Raises:
        Stranger: if what listens there is no rack of this run.
        EOFError, OSError: if nobody does, or it closes, or does not answer in time.
    """
    connected = socket.create_connection(address, PROOF_SECONDS)
    try:
        prove(connected, token, first=False)
        connected.sendall(_HELLO.pack(rack, lane))
        if connected.recv(1) != _WELCOME:
            raise Stranger
    except BaseException as error:
        connected.close()
        if isinstance(error, Stranger):
            raise Stranger("what listens there is no rack, or one of another run") from None
        raise
    return connected


def welcome(connected: socket.socket, token: bytes, takers: Mapping[Lane, Container[int]]) -> tuple[int, Lane]:
    """Hear which rack has connected, and for what.

    Args:
        takers: which racks may take each lane.

    Raises:
        Stranger: if it is no rack of this run.
        EOFError, OSError: if it closes, or says nothing in time.
    """
    prove(connected, token, first=True)
    rack, number = _HELLO.unpack(connected.recv(_HELLO.size, socket.MSG_WAITALL))
    if number not in takers or rack not in takers[Lane(number)]:
        raise Stranger("what has connected is no rack of this run")
    connected.sendall(_WELCOME)
    return rack, Lane(number)
