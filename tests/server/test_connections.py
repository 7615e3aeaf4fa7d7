"""Clients that hold connections: requests that never arrive, and too many of them."""

from __future__ import annotations

import asyncio
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvicorn

from surgeon.server.run import QUEUE, Connection, connections_for, files_left
from tests.server.servers import Server
from tests.waiting import PATIENCE, wait_until

# Of a clock that the tests move: none of it passes by itself, however busy the machine is.
HEAD = 20_000
BODY = 120_000
IDLE = 30_000
ANSWERED = 4
REFUSED = 3
GET = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 5\r\n\r\n"


class App:
    """Answers with the request's body."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    async def __call__(self, _: Any, receive: Any, send: Any) -> None:
        try:
            body, more = b"", True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                body, more = body + message["body"], message["more_body"]
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": body})
        finally:
            self.ended.set()


class Loop(asyncio.SelectorEventLoop):
    """Its time can be moved on."""

    ahead = 0.0

    def time(self) -> float:
        return super().time() + self.ahead

    async def pass_time(self, seconds: float) -> None:
        """Have everything done that is due then."""
        self.ahead += seconds
        for _ in range(5):  # a timer ends a connection, of which others are told, who act on that
            await asyncio.sleep(0)


class Running:
    """A server of the application in a thread."""

    def __init__(self, app: App) -> None:
        self.app, self.loop, self.received = app, Loop(), 0
        running = self

        class Noting(Connection):
            head_seconds = HEAD
            body_seconds = BODY

            def data_received(self, data: bytes) -> None:
                super().data_received(data)
                running.received += len(data)

        config = uvicorn.Config(
            app,
            http=Noting,
            backlog=REFUSED,
            lifespan="off",
            log_config=None,
            limit_concurrency=ANSWERED + 1,
            timeout_keep_alive=IDLE,
            timeout_graceful_shutdown=1,
        )
        self.server = uvicorn.Server(config)

    @contextmanager
    def in_thread(self) -> Iterator[Running]:
        with (
            socket.create_server(("127.0.0.1", 0)) as bound,
            asyncio.Runner(loop_factory=lambda: self.loop) as runner,
        ):
            self.address = bound.getsockname()
            thread = threading.Thread(target=lambda: runner.run(self.server.serve([bound])))
            thread.start()
            wait_until(lambda: self.server.started)
            bound.listen(QUEUE)
            try:
                yield self
            finally:
                self.server.should_exit = True
                thread.join(PATIENCE)

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, PATIENCE)

    def connected(self) -> int:
        return len(self.server.server_state.connections)

    def hears(self, connection: socket.socket, sent: bytes) -> None:
        """Send something, and wait until it is there."""
        before = self.received
        connection.sendall(sent)
        wait_until(lambda: self.received == before + len(sent))

    def pass_time(self, seconds: float) -> None:
        asyncio.run_coroutine_threadsafe(self.loop.pass_time(seconds), self.loop).result(PATIENCE)


@pytest.fixture
def running() -> Iterator[Running]:
    with Running(App()).in_thread() as found:
        yield found


def answer(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    found = b""
    while part := connection.recv(1 << 16):
        found += part
    return found


@pytest.mark.parametrize(
    ("sent", "expected", "limit"),
    [
        (b"", b"", HEAD),
        (GET[:-2], b"HTTP/1.1 408 ", HEAD),
        (POST + b"abc", b"HTTP/1.1 408 ", BODY),
        (GET, b"HTTP/1.1 200 ", IDLE),
        (GET + GET[:9], b"HTTP/1.1 200 ", HEAD),
    ],
    ids=["nothing", "half a head", "half a body", "idle after", "half a second one"],
)
def test_what_does_not_arrive_is_not_waited_for(
    sent: bytes, expected: bytes, limit: float, running: Running
) -> None:
    with running.connect() as connection:
        running.hears(connection, sent)
        wait_until(lambda: running.connected() == 1)
        if expected == b"HTTP/1.1 200 ":
            assert running.app.ended.wait(PATIENCE)
        running.pass_time(0.9 * limit)
        assert running.connected() == 1
        running.pass_time(0.2 * limit)
        found = answer(connection)
    assert found.startswith(expected)
    assert bool(found) == bool(expected)
    assert (b"did not arrive in time" in found) == (b"408" in found)


def test_trickling_does_not_help_and_slow_bodies_have_their_own_time(running: Running) -> None:
    with running.connect() as connection:
        for byte in GET[:15]:
            assert running.connected() < 2
            running.hears(connection, bytes([byte]))
            running.pass_time(HEAD / 16)
        assert running.connected() == 1
        running.pass_time(HEAD / 8)
        assert answer(connection).startswith(b"HTTP/1.1 408 ")
    with running.connect() as connection:
        running.hears(connection, POST)
        running.pass_time(0.9 * BODY)
        connection.sendall(b"hello")
        assert connection.recv(9999).startswith(b"HTTP/1.1 200 ")


def test_too_many_are_told_and_far_too_many_are_not(running: Running) -> None:
    with ExitStack() as stack:
        held = [stack.enter_context(running.connect()) for _ in range(ANSWERED)]
        wait_until(lambda: running.connected() == ANSWERED)
        with running.connect() as further:
            further.sendall(GET)
            found = answer(further)
        assert found.startswith(b"HTTP/1.1 503 ")
        wait_until(lambda: running.connected() == ANSWERED)
        more = [stack.enter_context(running.connect()) for _ in range(REFUSED)]
        wait_until(lambda: running.connected() == ANSWERED + REFUSED)
        with running.connect() as one_more, suppress(ConnectionResetError):
            assert one_more.recv(9) == b""
        for one in (*held, *more):
            one.close()
        wait_until(lambda: is_served(running))


def is_served(running: Running) -> bool:
    """Whether a further client gets an answer of the application's."""
    with suppress(ConnectionResetError), running.connect() as connection:
        connection.sendall(GET)
        return connection.recv(99).startswith(b"HTTP/1.1 200 ")
    return False


@pytest.mark.thorough
def test_a_flood_leaves_the_server_whole(chat_model: Path) -> None:
    """It may open 128 files; its log stays short, and once the flood is over it answers."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, most))
    try:
        server = Server(str(chat_model), "--port", "0", cold=True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))
    try:
        server.wait_until_serving()
        host, _, port = server.url.removeprefix("http://").partition(":")
        with ExitStack() as stack:
            for _ in range(300):
                stack.enter_context(socket.create_connection((host, int(port)), timeout=PATIENCE))
            time.sleep(0.3)
            assert psutil.Process(server.process.pid).num_fds() < 110
        assert server.ask("GET", "/health").status_code == 200
        assert server.post("/v1/completions", prompt="a", max_tokens=2).status_code == 200
        assert len(server.lines) == 3  # where it serves, how many texts fit, and what computes
    finally:
        server.close()


def test_limits_leave_files_over() -> None:
    for files in (16, 100, 1000, 1 << 20):
        answered, accepted = connections_for(files)
        assert answered + 8 * accepted <= files
    with pytest.raises(ValueError, match=r"only 9 more files .* \(ulimit -n\)"):
        connections_for(9)
    assert 0 < files_left() < resource.getrlimit(resource.RLIMIT_NOFILE)[0]
