"""How rank 0 and the others find each other, without any process: who is let in, who is missing, who contradicts."""

from __future__ import annotations

import os
import pickle
import re
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from surgeon.processes.rendezvous import PURPOSES, Rendezvous, connect_rank0, find_rank0
from surgeon.processes.torchrun import (
    RankLocation,
    TorchrunEnvironment,
    interface_of,
    interface_variables,
)
from tests.waiting import PATIENCE


@pytest.fixture
def torchrun() -> TorchrunEnvironment:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return TorchrunEnvironment(0, 2, 0, 2, "127.0.0.1", port, patience=PATIENCE)


def other(torchrun: TorchrunEnvironment, rank: int = 1) -> TorchrunEnvironment:
    return replace(torchrun, rank=rank, local_rank=rank)


def join(torchrun: TorchrunEnvironment) -> dict[str, Connection]:
    connect = find_rank0(torchrun)
    return {purpose: connect(purpose) for purpose in PURPOSES}


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
        self.join(PATIENCE)
        assert not self.is_alive()
        return self.result if self.error is None else self.error


def listening_addresses() -> set[str]:
    """Where this process listens on TCP, as the kernel has it."""
    import psutil

    return {
        each.laddr.ip
        for each in psutil.Process().net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    }


def test_a_rank_joins_and_is_heard(torchrun: TorchrunEnvironment) -> None:
    early = Aside(join, other(torchrun))  # before there is a rank 0
    time.sleep(0.2)
    rendezvous = Rendezvous(torchrun)
    assert listening_addresses() == {"127.0.0.1"}  # the store among them
    (connections,) = rendezvous.accept()
    ends = early.outcome()
    hello = connections["commands"].hello
    assert (hello.rank, hello.ranks, hello.host, hello.pid) == (1, 2, socket.gethostname(), os.getpid())
    assert hello.location == RankLocation(1, 2, interface_of("127.0.0.1"))
    # The clocks are the same; what is left is the way here.
    assert 0 <= connections["commands"].lag < PATIENCE
    for purpose in PURPOSES:
        ends[purpose].send_bytes(purpose.encode())
        assert connections[purpose].connection.recv_bytes() == purpose.encode()
    with pytest.raises(ValueError, match="have served and ended"):
        rendezvous.accept()


def test_every_rank_that_is_missing_is_named(
    torchrun: TorchrunEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time that they have is over as soon as one of them has joined."""
    torchrun = replace(torchrun, ranks=4, local_ranks=4)
    rendezvous = Rendezvous(replace(torchrun, patience=1000.5))
    admitted, admit = [], rendezvous._admit

    def noting(connected: socket.socket) -> object:
        admitted.append(connected)
        return admit(connected)

    clock = SimpleNamespace(monotonic=lambda: 1000.6 if len(admitted) == len(PURPOSES) else 0.1)
    monkeypatch.setattr(rendezvous, "_admit", noting)
    monkeypatch.setattr("surgeon.processes.rendezvous.time", clock)
    joining = Aside(join, other(torchrun, 2))
    with pytest.raises(
        TimeoutError, match=r"^ranks 1, 3 of 4 did not join rank 0 at 127\.0\.0\.1 within 1000\.5 s"
    ):
        rendezvous.accept()
    lifeline = joining.outcome()["lifeline"]
    assert lifeline.recv_bytes().startswith(b"ranks 1, 3 of 4 did not join")


def test_nobody_has_rank_0(torchrun: TorchrunEnvironment) -> None:
    with pytest.raises(
        TimeoutError,
        match=rf"^rank 1 did not find rank 0 at 127.0.0.1, port {torchrun.port}, within 1 s",
    ):
        find_rank0(replace(other(torchrun), patience=1.0))


def test_rank_0_ends_while_others_wait(torchrun: TorchrunEnvironment) -> None:
    rendezvous = Rendezvous(torchrun)
    joining = Aside(join, other(torchrun))
    assert select.select([rendezvous._listener], [], [], PATIENCE)[0]
    rendezvous._listener.close()  # as the end of its process does
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
def test_contradictions(changes: dict[str, Any], message: str, torchrun: TorchrunEnvironment) -> None:
    rendezvous = Rendezvous(torchrun)
    joining = Aside(find_rank0(replace(other(torchrun), **changes)), "lifeline")
    with pytest.raises(ValueError, match=message):
        rendezvous.accept()
    assert re.match(message, joining.outcome().recv_bytes().decode())


def test_a_rank_that_is_there_twice(
    torchrun: TorchrunEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendezvous = Rendezvous(replace(torchrun, ranks=3))
    connect = find_rank0(replace(other(torchrun), ranks=3))
    waiting = Aside(rendezvous.accept)
    connect("lifeline")
    monkeypatch.setattr(os, "getpid", lambda: 17)
    second = connect("lifeline")
    error = waiting.outcome()
    assert isinstance(error, ValueError)
    assert re.match("RANK 1 is taken twice: by process 17 on .* and by process .* on .*", str(error))
    assert second.recv_bytes().decode() == str(error)


def test_another_version(torchrun: TorchrunEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    rendezvous = Rendezvous(torchrun)
    waiting = Aside(rendezvous.accept)
    send = Connection.send
    monkeypatch.setattr(
        Connection, "send", lambda end, hello: send(end, replace(hello, version="0.0.7"))
    )
    find_rank0(other(torchrun))("lifeline")
    assert re.match(
        r"rank 1 on .* runs surgeon 0.0.7, and rank 0 .*; install the same", str(waiting.outcome())
    )


class Loaded:
    """Says when it is unpickled."""

    seen = False

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return Loaded.look, ()

    @staticmethod
    def look() -> None:
        Loaded.seen = True


def test_strangers_are_not_listened_to(torchrun: TorchrunEnvironment) -> None:
    rendezvous = Rendezvous(torchrun)
    port = rendezvous._listener.getsockname()[1]
    waiting = Aside(rendezvous.accept)
    # One that sends a pickle at once, one that goes at once, one that guesses the secret.
    for stranger in range(2):
        connected = socket.create_connection((torchrun.address, port))
        if stranger:
            body = pickle.dumps(Loaded())
            connected.sendall(len(body).to_bytes(4, "big") + body)
            connected.settimeout(PATIENCE)
            while connected.recv(1000):  # its challenge, then what it thinks of the answer
                pass
        connected.close()
    with pytest.raises(ConnectionError, match="rank 0 at .* has gone: digest sent was rejected"):
        connect_rank0(other(torchrun), port, b"x" * 32, "commands")
    assert not Loaded.seen
    join(other(torchrun))
    assert [each["commands"].hello.rank for each in waiting.outcome()] == [1]


def test_ranks_know_that_it_is_rank_0(torchrun: TorchrunEnvironment) -> None:
    """Whoever took rank 0's port after it ended does not know the secret either."""
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        port = impostor.getsockname()[1]
        joining = Aside(connect_rank0, other(torchrun), port, b"x" * 32, "commands")
        connection = Connection(impostor.accept()[0].detach())
        connection.send_bytes(b"#CHALLENGE#" + b"0" * 20)
        connection.recv_bytes()
        connection.send_bytes(b"#WELCOME#")
        connection.recv_bytes()
        connection.send_bytes(b"whatever")
        assert isinstance(joining.outcome(), ConnectionError)


def test_rank_0_takes_long_to_plan(torchrun: TorchrunEnvironment) -> None:
    """It listens meanwhile, and is waited for as long as ranks wait for each other."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        said = f"rank 0 at 127.0.0.1, port {port}, did not answer rank 1 within 0.2 s"
        with pytest.raises(TimeoutError, match=said):
            connect_rank0(replace(other(torchrun), patience=0.2), port, b"x" * 32, "commands")


def test_addresses_that_are_not_here(torchrun: TorchrunEnvironment) -> None:
    with pytest.raises(
        ValueError, match=r"^MASTER_ADDR '192\.0\.2\.1' \(192\.0\.2\.1\) is no address of .*"
    ):
        Rendezvous(replace(torchrun, address="192.0.2.1"))  # RFC 5737: nobody's
    with pytest.raises(
        ValueError, match="^MASTER_ADDR 'no.such.host.invalid' cannot be found from here"
    ):
        Rendezvous(replace(torchrun, address="no.such.host.invalid"))


def test_a_port_in_use(torchrun: TorchrunEnvironment) -> None:
    with (
        socket.create_server(("127.0.0.1", torchrun.port)),
        pytest.raises(
            OSError,
            match=rf"^rank 0 cannot listen at 127\.0\.0\.1, MASTER_PORT {torchrun.port}: .* in use",
        ),
    ):
        Rendezvous(torchrun)


def test_interfaces() -> None:
    loopback = interface_of("127.0.0.1")
    assert loopback is not None
    assert interface_of("127.0.1.1") == loopback
    assert interface_of("192.0.2.1") is None
    # NCCL takes every interface that begins with a name, but for one behind "=".
    assert interface_variables("eth1") == {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}
