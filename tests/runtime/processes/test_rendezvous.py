"""How rank 0 and the others find each other, without any process: who is let in, who is missing, who contradicts."""

from __future__ import annotations

import os
import pickle
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import pytest

from surgeon.runtime.processes.joining import Door, find_rank0
from surgeon.runtime.processes.rendezvous import Meeting
from surgeon.runtime.processes.sockets import PURPOSES, interface_of
from surgeon.runtime.processes.torchrun import Place, Seat

PATIENCE = 20.0


@pytest.fixture
def place() -> Place:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return Place(0, 2, 0, 2, "127.0.0.1", port, patience=PATIENCE)


def other(place: Place, rank: int = 1) -> Place:
    return replace(place, rank=rank, local_rank=rank)


def join(place: Place) -> dict[str, Connection]:
    door = find_rank0(place)
    return {purpose: door.connect(purpose) for purpose in PURPOSES}


class Aside(threading.Thread):
    """What a function returns or raises, from a thread of its own."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        super().__init__(daemon=True)
        self.function, self.arguments = function, arguments
        self.result: Any = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self.function(*self.arguments)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.error = error

    def outcome(self) -> Any:
        self.join(3 * PATIENCE)
        assert not self.is_alive()
        return self.result if self.error is None else self.error


def listening_addresses() -> set[str]:
    """Where this process listens on TCP, as the kernel has it."""
    import psutil

    return {each.laddr.ip for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN}


def test_a_rank_joins_and_is_heard(place: Place) -> None:
    early = Aside(join, other(place))  # before there is a rank 0
    time.sleep(0.2)
    meeting = Meeting(place)
    assert listening_addresses() == {"127.0.0.1"}  # the store among them
    (guest,) = meeting.guests()
    ends = early.outcome()
    hello = guest.hello
    assert (hello.rank, hello.ranks, hello.host, hello.pid) == (1, 2, socket.gethostname(), os.getpid())
    assert hello.seat == Seat(1, 2, interface_of("127.0.0.1"))
    assert 0 <= guest.lag < PATIENCE  # the clocks are the same; what is left is the way here
    for purpose in PURPOSES:
        ends[purpose].send_bytes(purpose.encode())
        connection: Connection = getattr(guest, purpose)
        assert connection.recv_bytes() == purpose.encode()
    with pytest.raises(ValueError, match="have served and ended"):
        meeting.guests()


def test_every_rank_that_is_missing_is_named(place: Place) -> None:
    place = replace(place, ranks=4, local_ranks=4)
    meeting = Meeting(replace(place, patience=1.5))
    joining = Aside(join, other(place, 2))
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"^ranks 1, 3 of 4 did not join rank 0 at 127\.0\.0\.1 within 1\.5 s"):
        meeting.guests()
    assert 1.4 < time.monotonic() - began < 10
    lifeline = joining.outcome()["lifeline"]
    assert lifeline.recv_bytes().startswith(b"ranks 1, 3 of 4 did not join")


def test_nobody_has_rank_0(place: Place) -> None:
    with pytest.raises(TimeoutError, match=rf"^rank 1 did not find rank 0 at 127.0.0.1, port {place.port}, within 1 s"):
        find_rank0(replace(other(place), patience=1.0))


def test_rank_0_ends_while_others_wait(place: Place) -> None:
    meeting = Meeting(place)
    joining = Aside(join, other(place))
    time.sleep(0.5)
    meeting._listener.close()  # as the end of its process does
    error = joining.outcome()
    assert isinstance(error, ConnectionError)
    assert re.match("rank 0 at 127.0.0.1, port .* has gone", str(error))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 3}, "rank 1 on .* has WORLD_SIZE 3, and rank 0 2; start all with the same numbers"),
        ({"rank": 0}, r"RANK 0 is taken twice: by process \d+ on .* and by rank 0 itself"),
    ],
)
def test_contradictions(changes: dict[str, Any], message: str, place: Place) -> None:
    meeting = Meeting(place)
    joining = Aside(find_rank0(replace(other(place), **changes)).connect, "lifeline")
    with pytest.raises(ValueError, match=message):
        meeting.guests()
    assert re.match(message, joining.outcome().recv_bytes().decode())


def test_a_rank_that_is_there_twice(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = Meeting(replace(place, ranks=3))
    door = find_rank0(replace(other(place), ranks=3))
    waiting = Aside(meeting.guests)
    door.connect("lifeline")
    monkeypatch.setattr(os, "getpid", lambda: 17)
    second = door.connect("lifeline")
    error = waiting.outcome()
    assert isinstance(error, ValueError)
    assert re.match("RANK 1 is taken twice: by process 17 on .* and by process .* on .*", str(error))
    assert second.recv_bytes().decode() == str(error)


def test_another_version(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = Meeting(place)
    waiting = Aside(meeting.guests)
    monkeypatch.setattr("surgeon.runtime.processes.joining.__version__", "0.0.7")
    find_rank0(other(place)).connect("lifeline")
    assert re.match(r"rank 1 on .* runs surgeon 0.0.7, and rank 0 .*; install the same", str(waiting.outcome()))


class Loaded:
    """Says when it is unpickled."""

    seen = False

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return Loaded.look, ()

    @staticmethod
    def look() -> None:
        Loaded.seen = True


def test_strangers_are_not_listened_to(place: Place) -> None:
    meeting = Meeting(place)
    door = find_rank0(other(place))
    waiting = Aside(meeting.guests)
    # One that sends a pickle at once, one that goes at once, one that guesses the secret.
    for stranger in range(2):
        connected = socket.create_connection((place.address, door.port))
        if stranger:
            body = pickle.dumps(Loaded())
            connected.sendall(len(body).to_bytes(4, "big") + body)
            connected.settimeout(PATIENCE)
            while connected.recv(1000):  # its challenge, then what it thinks of the answer
                pass
        connected.close()
    guess = Door(other(place), door.port, b"x" * 32)
    with pytest.raises(ConnectionError, match="rank 0 at .* has gone: digest sent was rejected"):
        guess.connect("commands")
    assert not Loaded.seen
    join(other(place))
    assert [guest.hello.rank for guest in waiting.outcome()] == [1]


def test_ranks_know_that_it_is_rank_0(place: Place) -> None:
    """Whoever took rank 0's port after it ended does not know the secret either."""
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        door = Door(other(place), impostor.getsockname()[1], b"x" * 32)
        joining = Aside(door.connect, "commands")
        connection = Connection(impostor.accept()[0].detach())
        connection.send_bytes(b"#CHALLENGE#" + b"0" * 20)
        connection.recv_bytes()
        connection.send_bytes(b"#WELCOME#")
        connection.recv_bytes()
        connection.send_bytes(b"whatever")
        assert isinstance(joining.outcome(), ConnectionError)


def test_addresses_that_are_not_here(place: Place) -> None:
    with pytest.raises(ValueError, match=r"^MASTER_ADDR '192\.0\.2\.1' \(192\.0\.2\.1\) is no address of .*"):
        Meeting(replace(place, address="192.0.2.1"))  # RFC 5737: nobody's
    with pytest.raises(ValueError, match="^MASTER_ADDR 'no.such.host.invalid' cannot be found from here"):
        Meeting(replace(place, address="no.such.host.invalid"))


def test_a_port_in_use(place: Place) -> None:
    with (
        socket.create_server(("127.0.0.1", place.port)),
        pytest.raises(OSError, match=rf"^rank 0 cannot listen at 127\.0\.0\.1, MASTER_PORT {place.port}: .* in use"),
    ):
        Meeting(place)


def test_interfaces() -> None:
    loopback = interface_of("127.0.0.1")
    assert loopback is not None
    assert interface_of("127.0.1.1") == loopback
    assert interface_of("192.0.2.1") is None
