"""What racks say to each other over a connection: who they are, what they want, and what they have of it.

The asking rack connects and says hello (the run's token, its own number, the lane), and is welcomed. From then on it
says `ASK key`, `COVERED step`, `END`, each in as many bytes; the other one sends items, `GONE` for one that it will not
have again, and `BYE` for an end that it has noted. A lane is one order of items: the streams, or the codas.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Container, Mapping
from dataclasses import dataclass
from enum import IntEnum

from surgeon.training.racks.items import Item, ItemKey, ItemKind, read_header

TOKEN_BYTES = 16
_HELLO = struct.Struct("<8s16siB")
_WELCOME = struct.Struct("<8sB")
_ASKING = struct.Struct("<BqBq")
_ANSWER = struct.Struct("<Bd")
_LENGTH = struct.Struct("<I")
_MARK = b"surgeon1"
_LONGEST_TEXT = 4096


class Lane(IntEnum):
    """What a connection is for."""

    STREAMS = 0
    CODAS = 1


class Word(IntEnum):
    """What is said, after the welcome."""

    ASK = 1
    COVERED = 2
    END = 3
    ITEM = 4
    GONE = 5
    BYE = 6


class Stranger(ConnectionError):
    """What listens there, or has come, is no rack of this run."""


@dataclass(frozen=True)
class Asked:
    """What an asking rack says.

    Attributes:
        key: what it wants, or, with COVERED, any of the step that its checkpoints cover.
    """

    word: Word
    key: ItemKey


@dataclass(frozen=True)
class Answered:
    """What it is told.

    Attributes:
        due: when the item has arrived over an emulated link, on this machine's clock; 0 without one.
        text: why it will not come.
    """

    word: Word
    due: float = 0.0
    item: Item | None = None
    text: str = ""


ASK_BYTES = _ASKING.size
NO_KEY = ItemKey(0, ItemKind.TRAINING, 0)


def read_exactly(connection: socket.socket, count: int) -> bytearray:
    """So many bytes.

    Raises:
        EOFError: if the other end closes before.
        OSError: as sockets raise it.
    """
    held = bytearray(count)
    left = memoryview(held)
    while left:
        got = connection.recv_into(left)
        if not got:
            raise EOFError("the other rack closed the connection")
        left = left[got:]
    return held


def greet(connection: socket.socket, token: bytes, me: int, lane: Lane) -> None:
    """Say hello to a rack, and wait for its welcome.

    Raises:
        Stranger: if it is none, or of another run.
        EOFError, OSError: if it closes, or does not answer in time.
    """
    connection.sendall(_HELLO.pack(_MARK, token, me, lane))
    mark, same = _WELCOME.unpack(read_exactly(connection, _WELCOME.size))
    if mark != _MARK:
        raise Stranger("what listens there is no rack")
    if not same:
        raise Stranger("the rack that listens there is of another run")


def welcome(connection: socket.socket, token: bytes, takers: Mapping[Lane, Container[int]]) -> tuple[int, Lane]:
    """Hear who has connected: its number, and what the connection is for.

    Args:
        takers: which racks may take each lane.

    Raises:
        Stranger: if it is no rack of this run.
        EOFError, OSError: if it closes, or says nothing in time.
    """
    mark, theirs, rack, lane = _HELLO.unpack(read_exactly(connection, _HELLO.size))
    if mark != _MARK or lane not in set(Lane):
        raise Stranger("what has connected is no rack")
    known = theirs == token and rack in takers.get(Lane(lane), ())
    connection.sendall(_WELCOME.pack(_MARK, known))
    if not known:
        raise Stranger("the rack that has connected is of another run")
    return rack, Lane(lane)


def say(connection: socket.socket, asked: Asked) -> None:
    """Say what an asking rack has to say."""
    key = asked.key
    connection.sendall(_ASKING.pack(asked.word, key.step, key.kind, key.place))


def hear(connection: socket.socket) -> Asked:
    """What an asking rack says next.

    Raises:
        EOFError, OSError: if it has gone.
        ValueError: if it makes no sense.
    """
    word, step, kind, place = _ASKING.unpack(read_exactly(connection, _ASKING.size))
    return Asked(Word(word), ItemKey(step, ItemKind(kind), place))


def send(connection: socket.socket, answer: Answered) -> int:
    """Answer an asking rack; returns the bytes that this took."""
    parts: list[bytes | bytearray] = [_ANSWER.pack(answer.word, answer.due)]
    if answer.item is not None:
        parts += [answer.item.header, answer.item.data]
    elif answer.word is Word.GONE:
        text = answer.text.encode()[:_LONGEST_TEXT]
        parts += [_LENGTH.pack(len(text)), text]
    for part in parts:
        connection.sendall(part)
    return sum(map(len, parts))


def receive(connection: socket.socket) -> Answered:
    """What an asking rack is told next.

    Raises:
        EOFError, OSError: if the other one has gone.
        ValueError: if it makes no sense.
    """
    number, due = _ANSWER.unpack(read_exactly(connection, _ANSWER.size))
    word = Word(number)
    if word is Word.ITEM:
        key, header, size = read_header(lambda count: read_exactly(connection, count))
        return Answered(word, due, Item(key, header, read_exactly(connection, size)))
    if word is Word.GONE:
        (length,) = _LENGTH.unpack(read_exactly(connection, _LENGTH.size))
        return Answered(word, text=read_exactly(connection, min(length, _LONGEST_TEXT)).decode(errors="replace"))
    return Answered(word)


def answer_bytes(answer: Answered) -> int:
    """How many bytes an answer takes."""
    item = 0 if answer.item is None else answer.item.nbytes
    return _ANSWER.size + item + (_LENGTH.size + len(answer.text.encode()) if answer.word is Word.GONE else 0)
